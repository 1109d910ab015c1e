"""Streams give what calls give, in order, with several requests at work at once."""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from placed import again_at_random, cpus, lazily, made_up_profile, one_thread, place_on
from torch import Tensor, nn

import baechi
from baechi.errors import ExecutionError, InputError
from baechi.runtime.derived_class import placed_state
from baechi.runtime.request_memory import request_bytes


class Rows(nn.Module):
    """An embedding, layers with a skip, a keyword, and a dict as its result."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        first = h = self.tokens(x)
        for layer in self.layers:
            h = self.dropout(torch.tanh(layer(h))) + first
        return {"rows": h * scale, "x": x}


def requests(n: int, length: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Arguments of `Rows`."""
    rows = torch.arange(n * length).remainder(11).view(n, 1, length)
    return [(row, torch.tensor(1.0 + i)) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def traced() -> baechi.Traced:
    return baechi.trace(Rows().eval(), requests(1)[0])


def check(found: Any, request: tuple[Tensor, Tensor], plain: nn.Module) -> None:
    """One output is the model's own, in every bit, and without a graph."""
    with torch.no_grad(), one_thread():
        assert torch.equal(found["rows"], plain(*request)["rows"])
    assert found["x"] is request[0]
    assert not found["rows"].requires_grad


@pytest.mark.parametrize("in_flight", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_in_order_and_equal_in_every_bit(
    traced: baechi.Traced, seed: int, in_flight: int
) -> None:
    placed = again_at_random(traced, seed=seed, devices=3)
    plain, rows = Rows().eval(), requests(12)
    forms: list[Any] = list(rows)
    forms[::2] = [{"x": x, "scale": scale} for x, scale in rows[::2]]
    taken = 0

    def given() -> Iterator[Any]:
        nonlocal taken
        for form in forms:
            taken += 1
            yield form

    stream = placed.stream(given(), in_flight=in_flight)
    assert taken == 0
    for number, (row, found) in enumerate(zip(rows, stream, strict=True)):
        assert taken == min(number + in_flight, len(rows))
        check(found, row, plain)
    assert next(stream, None) is None
    placed.unplace()


BEGUN = threading.Condition()
COUNTS = [0, 0]


@torch.library.custom_op("baechi_tests::first", mutates_args=())
def first(x: Tensor) -> Tensor:
    """Counts."""
    with BEGUN:
        COUNTS[0] += 1
        BEGUN.notify_all()
    return x + 1


@torch.library.custom_op("baechi_tests::second", mutates_args=())
def second(x: Tensor) -> Tensor:
    """Goes on only when the next request is with the first, if there is one: of four."""
    with BEGUN:
        COUNTS[1] += 1
        assert BEGUN.wait_for(lambda: COUNTS[0] >= min(COUNTS[1] + 1, 4), timeout=20)
    return x * 2


first.register_fake(torch.empty_like)
second.register_fake(torch.empty_like)


class Line(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return second(first(x)) - 3


@pytest.mark.parametrize("how", [False, {"backend": "aot_eager"}], ids=["plain", "compiled"])
@pytest.mark.parametrize("back", [False, True])
def test_a_device_that_waits_works_on_a_later_request(back: bool, how: Any) -> None:
    """Also where it comes back to the first one later."""
    trace = baechi.trace(Line(), (torch.ones(2),))
    graph = trace.graph(made_up_profile(trace), training=False)
    (where,) = (i for i, op in enumerate(trace.ops) if any("second" in n for n in op.nodes))
    order = tuple(range(len(graph.ops)))
    devices = tuple(int(op == where or (op > where and not back)) for op in order)
    placement = baechi.Placement(graph.digest, devices, order)
    options = {"threads_per_device": 1, "compile": how}
    placed = baechi.apply(trace, placement, ["cpu:0", "cpu:1"], **options)
    rows = [torch.full((2,), float(i)) for i in range(4)]
    if how:
        COUNTS[:] = [4, 4]
        list(placed.stream(rows[:1], in_flight=2))  # alone, since it compiles
    COUNTS[:] = [0, 0]
    found = list(placed.stream(rows, in_flight=2))
    assert all(torch.equal(y, (x + 1) * 2 - 3) for x, y in zip(rows, found, strict=True))
    placed.unplace()
    torch._dynamo.reset()


def test_an_error_comes_in_its_turn_and_the_next_requests_go_on(traced: baechi.Traced) -> None:
    placed = again_at_random(traced, seed=1, devices=3)
    plain, rows = Rows().eval(), requests(8)
    bad = {2: (torch.full((1, 3), 99), torch.ones(())), 5: ("no tensor",)}

    class Given:
        """Raises an error of its own, once, in place of the last but one."""

        def __init__(self) -> None:
            self.number = -1

        def __iter__(self) -> "Given":
            return self

        def __next__(self) -> Any:
            self.number += 1
            if self.number == 6:
                raise OSError("no line")
            if self.number == len(rows):
                raise StopIteration
            return bad.get(self.number, rows[self.number])

    stream = placed.stream(Given(), in_flight=3)
    errors: dict[int, type[Exception]] = {}
    for number, row in enumerate(rows):
        try:
            check(next(stream), row, plain)
        except (ExecutionError, InputError, OSError) as error:
            errors[number] = type(error)
    assert errors == {2: ExecutionError, 5: InputError, 6: OSError}
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(InputError, match="in_flight"):
        placed.stream(rows, in_flight=0)
    placed.unplace()


@pytest.mark.parametrize("training", [False, True])
def test_memory_for_all_that_are_in_flight_is_there_or_the_error_says_for_how_many(
    traced: baechi.Traced, training: bool
) -> None:
    placed = place_on(traced, 2, "round-robin", training=training, threads_per_device=1)
    alone = place_on(traced, 2, "round-robin", training=False, threads_per_device=1)
    rooms, peaks = (
        request_bytes(placed.graph, placed.cluster, placed.placement),
        alone.schedule.peak_bytes,
    )
    weights = [row[0] for row in request_bytes(alone.graph, alone.cluster, alone.placement)]
    assert [kept + own for kept, (_, own) in zip(weights, rooms, strict=True)] == list(peaks)
    cluster = cpus(2, max(kept + 3 * own for kept, own in rooms))
    placement = placed.placement
    graph = placed.graph
    small = baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)
    rows = requests(6)
    assert len(list(small.stream(rows, in_flight=3))) == 6
    with pytest.raises(InputError, match=r"5 requests in flight.* in_flight=3, or"):
        next(small.stream(rows, in_flight=5))
    small.unplace()


def test_requests_of_other_shapes_share_a_family_or_have_plans_of_their_own() -> None:
    placed, plain = lazily(Rows().eval(), training=False), Rows().eval()
    rows = [row for n in (3, 5, 2, 3, 7, 7) for row in requests(2, n)]
    for row, found in zip(rows, placed.stream(rows, in_flight=4), strict=True):
        check(found, row, plain)
    fixed = lazily(Rows().eval(), training=False, dynamic=False)
    rows = [row for n in (3, 5, 3) for row in requests(3, n)]
    for row, found in zip(rows, fixed.stream(rows, in_flight=4), strict=True):
        check(found, row, plain)


def test_calls_and_moves_meanwhile_wait_for_what_is_under_way(traced: baechi.Traced) -> None:
    placed = again_at_random(traced, seed=2, devices=3)
    plain, rows = Rows().eval(), requests(6)
    stream = placed.stream(rows, in_flight=3)
    check(next(stream), rows[0], plain)
    with torch.no_grad():
        check(placed(*rows[5]), rows[5], plain)
    assert not placed_state(placed).underway
    check(next(stream), rows[1], plain)
    assert placed_state(placed).underway
    placed.load_state_dict(plain.state_dict())
    assert not placed_state(placed).underway
    placed.unplace()
    check(next(stream), rows[2], plain)
    check(next(stream), rows[3], plain)


def test_several_threads_may_share_a_stream(traced: baechi.Traced) -> None:
    placed, rows = again_at_random(traced, seed=2, devices=3), requests(60)
    stream, found = placed.stream(rows, in_flight=3), []
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lambda: found.extend(stream)) for _ in range(4)]:
            done.result()
    assert {id(y["x"]) for y in found} == {id(x) for x, _ in rows}
    placed.unplace()


def test_what_draws_or_writes_runs_one_request_after_the_other() -> None:
    model = Rows(0.5).train()
    placed, plain = lazily(model, training=False), copy.deepcopy(model)
    rows = requests(4)
    with one_thread(), torch.no_grad():
        torch.manual_seed(3)
        expected = [plain(*row)["rows"] for row in rows]
    torch.manual_seed(3)
    found = [y["rows"] for y in placed.stream(rows, in_flight=3)]
    assert all(map(torch.equal, found, expected))


def test_a_chain_is_split_for_throughput_alone() -> None:
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).eval(), torch.randn(64, 256)
    options = {"placer": "auto", "training": False, "example_args": (x,)}
    assert len(set(lazily(copy.deepcopy(model), **options).placement.devices)) == 1
    placed = lazily(copy.deepcopy(model), objective="throughput", **options)
    stats = placed.placement.stats
    assert stats["period_ns"] < 0.6 * stats["latency_ns"]
    assert "(the period, " in placed.report()
    with torch.no_grad(), one_thread():
        assert all(torch.equal(y, model(x)) for y in placed.stream([x] * 4))
    for wrong in ({"training": True}, {"training": False, "microbatches": 2}):
        with pytest.raises(InputError, match="training=False, and no microbatches"):
            lazily(model, objective="throughput", **wrong)
