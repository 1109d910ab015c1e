"""Bad input gets an error at the border that names the value and says what to do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import baechi
from baechi.reporting import Plan, write_html
from baechi.scheduling.decision import decide
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.snapshot import Snapshot
from baechi.scheduling.whatif import whatif

X = torch.zeros(2, 16)


def towers() -> nn.Module:
    return zoo.towers()[0]


def place(devices: Any, **options: Any) -> baechi.PlacedModule:
    return baechi.place(towers(), devices, example_args=(X,), **options)


def small_graph(name: str = "a") -> baechi.OpGraph:
    return baechi.OpGraph((baechi.Op(name, 5), baechi.Op("b", 5)), (baechi.Tensor(0, (1,), 8),))


def two_devices() -> baechi.Cluster:
    return baechi.Cluster.uniform(2, memory="1GiB", link=baechi.Link(10, 10**9))


def snapshot() -> Snapshot:
    return Ledger(two_devices()).snapshot()


@pytest.mark.parametrize("name", ["gpu:0", "cpu0", "cuda:x", "", "tpu", "cuda:-1"])
def test_an_unknown_device(name: str) -> None:
    with pytest.raises(baechi.InputError) as caught:
        place([name])
    assert repr(name) in str(caught.value)
    assert "cpu:0" in str(caught.value) or name == ""


def test_a_device_of_the_wrong_type() -> None:
    with pytest.raises(baechi.InputError, match=r"3\.5"):
        place([3.5])


@pytest.mark.parametrize("capacity", ["10 gigs", "ten GiB", "", "GiB", "1e9", "-1GiB", "1 GiB 2"])
def test_a_capacity_that_cannot_be_read(capacity: str) -> None:
    with pytest.raises(baechi.InputError) as caught:
        place({"cpu:0": capacity})
    message = str(caught.value)
    assert repr(capacity) in message
    assert "cpu:0" in message
    assert '"10GiB"' in message


@pytest.mark.parametrize("capacity", [-1, -(2**40), 2**63])
def test_negative_or_overlarge_memory(capacity: int) -> None:
    with pytest.raises(baechi.InputError, match=str(capacity)):
        place({"cpu:0": capacity})
    with pytest.raises(baechi.InputError, match=str(capacity)):
        baechi.Device("cpu:0", capacity)


@pytest.mark.parametrize("capacity", [1.5e9, True, None, [1]])
def test_memory_of_the_wrong_type(capacity: Any) -> None:
    with pytest.raises(baechi.InputError, match="10GiB"):
        baechi.Device("cpu:0", capacity)


@pytest.mark.parametrize("devices", [[], {}, ()])
def test_no_devices(devices: Any) -> None:
    with pytest.raises(baechi.InputError, match="at least one"):
        place(devices)
    with pytest.raises(baechi.InputError, match="at least one"):
        baechi.probe(devices)


def test_no_devices_in_a_cluster() -> None:
    with pytest.raises(baechi.InputError, match="at least one"):
        baechi.Cluster((), ())


def test_duplicate_device_names() -> None:
    with pytest.raises(baechi.InputError, match=r"'cpu:0'.*unique"):
        place(["cpu:0", "cpu:0"])
    twice = (baechi.Device("a", 1), baechi.Device("a", 1))
    with pytest.raises(baechi.InputError, match=r"'a'.*unique"):
        baechi.Cluster.connected(twice, baechi.Link(0, 1))


@pytest.mark.skipif(torch.cuda.device_count() > 63, reason="the device is there")
def test_a_cuda_device_that_is_not_there() -> None:
    with pytest.raises(baechi.InputError, match="cuda:63"):
        place(["cuda:63"])
    with pytest.raises(baechi.InputError, match="cuda:63"):
        baechi.probe(["cuda:63"])


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0, 0.0, -5, "fast", None, True])
def test_a_link_rate_that_is_no_rate(rate: Any) -> None:
    with pytest.raises(baechi.InputError) as caught:
        baechi.Link(latency_ns=10, bytes_per_s=rate)
    assert repr(rate) in str(caught.value)
    assert "None instead of a Link" in str(caught.value)


@pytest.mark.parametrize("latency", [-1, 1.5, math.nan, "5us", True])
def test_a_link_latency_that_is_no_time(latency: Any) -> None:
    with pytest.raises(baechi.InputError, match="latency_ns"):
        baechi.Link(latency_ns=latency, bytes_per_s=1)


@pytest.mark.parametrize("speed", [0, -1.0, math.nan, math.inf, 10**400, "fast"])
def test_a_speed_that_is_no_speed(speed: Any) -> None:
    with pytest.raises(baechi.InputError, match="speed of device 'cpu:0'"):
        baechi.Device("cpu:0", 1, speed=speed)


def test_a_placement_of_another_graph() -> None:
    cluster = two_devices()
    placement = baechi.solve(small_graph(), cluster)
    with pytest.raises(baechi.InputError, match="is for graph"):
        baechi.simulate(small_graph("other"), cluster, placement)


def test_a_placement_of_another_model() -> None:
    traced = baechi.trace(towers(), (X,))
    placement = baechi.solve(small_graph(), two_devices())
    with pytest.raises(baechi.InputError, match=r"2 ops|another"):
        baechi.apply(traced, placement, devices=["cpu:0", "cpu:1"])


def test_a_placement_on_more_devices_than_there_are() -> None:
    placement = baechi.Placement(small_graph().digest, devices=(0, 7), order=(0, 1))
    with pytest.raises(baechi.InputError, match="7"):
        baechi.simulate(small_graph(), two_devices(), placement)


def test_a_profile_of_another_model() -> None:
    traced = baechi.trace(towers(), (X,))
    profile = baechi.Profile("0" * 64, "cpu", ())
    with pytest.raises(baechi.InputError, match="another model"):
        traced.graph(profile)


@pytest.mark.parametrize("placer", ["m-etff", "", None, 3, "M_SCT!"])
def test_an_unknown_placer(placer: Any) -> None:
    with pytest.raises(baechi.InputError) as caught:
        baechi.solve(small_graph(), two_devices(), placer=placer)
    assert repr(placer) in str(caught.value)
    assert "m-etf" in str(caught.value)


def test_an_unknown_optimizer() -> None:
    with pytest.raises(baechi.InputError, match=r"'adagrad3'.*adamw"):
        place(["cpu:0"], optimizer="adagrad3")


def test_a_graph_and_a_cluster_in_the_wrong_order() -> None:
    graph = baechi.OpGraph((baechi.Op("a", 1),))
    cluster = baechi.Cluster.uniform(1, "1GiB", baechi.Link(1, 1))
    with pytest.raises(baechi.InputError, match=r"a Cluster stands where a baechi\.OpGraph"):
        baechi.solve(cluster, graph)
    with pytest.raises(baechi.InputError, match=r"graph, cluster, placement\."):
        baechi.simulate(graph, graph, baechi.solve(graph, cluster))


def test_no_model() -> None:
    with pytest.raises(baechi.InputError, match=r"torch\.nn\.Module"):
        baechi.trace(lambda x: x, (X,))
    with pytest.raises(baechi.InputError, match=r"torch\.nn\.Module"):
        baechi.place("gpt2", ["cpu:0"], example_args=(X,))


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((X, X), {}), ((X,), {"y": X}), ((), {"y": X})]
)
def test_example_arguments_of_the_wrong_signature(args: Any, kwargs: Any) -> None:
    with pytest.raises(baechi.InputError, match=r"Towers\.forward"):
        baechi.trace(towers(), args, kwargs)


def test_an_example_without_values() -> None:
    placed = baechi.place(towers(), ["cpu:0"], costs="estimate", progress=False)
    for run in (lambda: baechi.trace(towers(), (X.to("meta"),)), lambda: placed(X.to("meta"))):
        with pytest.raises(baechi.InputError, match=r"argument x is on the meta.*real tensor"):
            run()


def test_a_model_without_weights_is_traced_without_values_and_not_placed() -> None:
    model = towers().to("meta")
    traced = baechi.trace(model, (X,))
    assert traced == baechi.trace(towers(), (X,))
    with pytest.raises(baechi.InputError, match=r"on the meta device and has no weights.*plan"):
        baechi.place(model, ["cpu:0"], example_args=(X,), costs="estimate", progress=False)


def test_a_tensor_in_place_of_a_tuple_of_arguments() -> None:
    with pytest.raises(baechi.InputError, match="tuple"):
        baechi.trace(towers(), X)


def test_example_arguments_of_the_wrong_shape() -> None:
    with pytest.raises(baechi.TraceError, match="Towers") as caught:
        baechi.trace(towers(), (torch.zeros(2, 5),))
    message = str(caught.value)
    assert "towers.py" in message, "the text has the model's own line"
    assert message.count("shapes cannot be multiplied") == 1, "what fails on all rungs is told once"


class Box:
    """An object that nothing can look into."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ReturnsABox(nn.Module):
    def forward(self, x: Tensor) -> Box:
        return Box(x * 2)


class TakesABox(nn.Module):
    def forward(self, box: Box) -> Tensor:
        return box.tensor * 2


class BranchesOnANumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no {x.ndim} dimensions today")


@pytest.mark.parametrize("model", [ReturnsABox(), BranchesOnANumber(), Raises()])
def test_a_model_that_cannot_be_traced_at_all(model: nn.Module) -> None:
    with pytest.raises(baechi.TraceError) as caught:
        baechi.trace(model, (X,))
    message = str(caught.value)
    runs = not isinstance(model, Raises)
    assert type(model).__name__ in message
    assert ("cannot be traced, though it runs" in message) == runs
    assert ("ValueError: no 2 dimensions today" in message) != runs


def test_on_meta_no_error_says_that_the_model_runs() -> None:
    with pytest.raises(baechi.TraceError, match=r"nothing shows whether it runs:\n.*reduction dim"):
        baechi.trace(nn.Linear(4, 2, device="meta"), (torch.ones(2, 3),))


def test_a_model_that_takes_what_cannot_be_traced() -> None:
    with pytest.raises((baechi.TraceError, baechi.InputError), match="Box"):
        baechi.trace(TakesABox(), (Box(X),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: baechi.OpGraph(3),  # type: ignore[arg-type]
        lambda: baechi.OpGraph((1,)),  # type: ignore[arg-type]
        lambda: baechi.OpGraph((baechi.Op("a", 1),), (), 3),  # type: ignore[arg-type]
        lambda: baechi.Tensor(0, 1, 1),  # type: ignore[arg-type]
        lambda: baechi.Cluster(3, ()),  # type: ignore[arg-type]
        lambda: baechi.Cluster.connected([1], baechi.Link(1, 1)),  # type: ignore[list-item]
        lambda: baechi.Placement("x", 3, ()),  # type: ignore[arg-type]
        lambda: baechi.Placement(3, (), ()),  # type: ignore[arg-type]
        lambda: baechi.Profile("x", "cpu", (1,)),  # type: ignore[arg-type]
        lambda: baechi.simulate(small_graph(), two_devices(), 3),  # type: ignore[arg-type]
        lambda: baechi.load(3),  # type: ignore[call-overload]
        lambda: baechi.dump(small_graph(), 3),  # type: ignore[arg-type]
        lambda: baechi.probe(3),
        lambda: baechi.profile(3),  # type: ignore[arg-type]
        lambda: baechi.estimate(3, "cpu"),  # type: ignore[arg-type]
        lambda: baechi.apply(3, 3),  # type: ignore[arg-type]
        lambda: baechi.trace(towers(), X),  # type: ignore[arg-type]
        lambda: baechi.trace(towers(), (X,), 3),  # type: ignore[arg-type]
        lambda: baechi.place(towers(), ["cpu"], example_args=X),  # type: ignore[arg-type]
        lambda: place(["cpu"], optimizer=torch.optim.Adam),
        lambda: place(["cpu"], threads_per_device="a"),
        lambda: place(["cpu"], max_shapes=0),
        lambda: baechi.place(towers(), ["cpu"], effort="hard"),
        lambda: baechi.place(towers(), ["cpu"], placer="nobody"),
        lambda: place(["cpu"], training="yes"),
        lambda: place(["cpu"], threads_per_device=2**40),
        lambda: baechi.load("x.json", 3),  # type: ignore[call-overload]
        lambda: baechi.calibrate(3),  # type: ignore[arg-type]
        lambda: baechi.Schedule(3, (), ()),  # type: ignore[arg-type]
        lambda: baechi.Schedule((), (3,), ()),  # type: ignore[arg-type]
        lambda: baechi.Pinned(3),  # type: ignore[arg-type]
        lambda: baechi.Auto(("m-etf",)),  # type: ignore[arg-type]
        lambda: baechi.METF("x"),  # type: ignore[arg-type]
        lambda: baechi.MSCT(tolerance=math.nan),
        lambda: baechi.MTopo(1),  # type: ignore[arg-type]
        lambda: baechi.SingleDevice("cpu"),  # type: ignore[arg-type]
        lambda: baechi.Timeline(small_graph(), two_devices()).fits("a", 0),  # type: ignore[arg-type]
        lambda: decide(3, snapshot()),  # type: ignore[arg-type]
        lambda: decide(small_graph(), 3),  # type: ignore[arg-type]
        lambda: decide(small_graph(), snapshot(), 3),  # type: ignore[arg-type]
        lambda: whatif(small_graph(), snapshot(), after=3),  # type: ignore[arg-type]
        lambda: Ledger(two_devices(), 3),  # type: ignore[arg-type]
        lambda: Ledger(two_devices(), sharing=3),  # type: ignore[arg-type]
        lambda: Ledger(two_devices()).reserve("job", 3),  # type: ignore[arg-type]
        lambda: Ledger(two_devices()).residual(0.5),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_type(make: Any) -> None:
    with pytest.raises(baechi.InputError, match=r"\b(is|are|has)\b"):
        make()


def test_a_name_that_no_file_can_hold(tmp_path: Path) -> None:
    graph, cluster = small_graph("\ud800"), two_devices()
    placement = baechi.solve(graph, cluster)
    plan = Plan(graph, cluster, placement, baechi.simulate(graph, cluster, placement))
    with pytest.raises(baechi.InputError, match="Unicode"):
        write_html(tmp_path / "x.html", plan)
    with pytest.raises(baechi.InputError, match="Unicode"):
        baechi.dump(graph, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_of_a_placed_module() -> None:
    placed = place({"cpu:0": "1GiB"}, costs="estimate", progress=False)
    with pytest.raises(baechi.InputError, match="optimizer is 3"), placed.metered(3):  # type: ignore[arg-type]
        pass
    placed.unplace()


@pytest.mark.parametrize("wrong", [2.0, int, torch.ones(1), True, 0, 2**70, "2"])
def test_a_number_that_is_no_positive_integer(wrong: Any) -> None:
    with pytest.raises(baechi.InputError, match="max_shapes"):
        place({"cpu:0": "1GiB"}, max_shapes=wrong)
    traced = baechi.trace(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(baechi.InputError, match="threads"):
        baechi.profile(traced, "cpu", threads=wrong, progress=False)


def test_a_limit_of_memory_for_nothing() -> None:
    with pytest.raises(baechi.InputError, match=r"cluster is None.*give a Cluster"):
        baechi.within_memory(None, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(baechi.InputError, match=r"traced is None.*give a Traced"):
        baechi.choose_checkpoint(None, None, two_devices())  # type: ignore[arg-type]
