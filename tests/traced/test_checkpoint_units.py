"""Units that run forward again: the graph of a step with them, and what runs is bit for bit."""

from typing import Any

import pytest
import torch
import zoo
from placed import cpus, lazily, place_on, same
from steps import case
from torch import nn

import baechi
from baechi.traced.checkpoint_units import module_paths, named_units
from baechi.traced.step_structure import BACKWARD, LOSS, RECOMPUTE
from baechi.tracing.pytrees import tensors_in

pytestmark = pytest.mark.usefixtures("one_thread")


def profile_of(traced: baechi.Traced) -> baechi.Profile:
    costs = tuple(
        baechi.OpCost(100 + i, 200 + i, saved_bytes=op.saved_bytes, workspace_bytes=i)
        for i, op in enumerate(traced.ops)
    )
    return baechi.Profile(traced.digest, "cpu", costs)


def placed_on(
    model: nn.Module, args: Any, n: int, placer: Any, checkpoint: Any, **options: Any
) -> baechi.PlacedModule:
    return applied(baechi.trace(model, args), n, placer, checkpoint, **options)


def applied(
    traced: baechi.Traced, n: int, placer: Any, checkpoint: Any, **options: Any
) -> baechi.PlacedModule:
    options.setdefault("threads_per_device", 1)
    return place_on(traced, n, placer, checkpoint=checkpoint, **options)


def example(name: str) -> tuple[zoo.Example, baechi.Traced]:
    it = case(name)
    it.reset()
    return (it.model, *it.example()), it.traced


def traced_of(name: str) -> baechi.Traced:
    return example(name)[1]


class Layers(nn.Module):
    """A small stack with dropout, so that what runs again must draw again."""

    def __init__(self, n: int = 3, p: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.GELU()) for _ in range(n)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


# The graph.


def test_a_unit_runs_again_between_the_gradients_that_enter_it_and_its_backwards() -> None:
    traced = traced_of("gpt2")
    graph = traced.graph(profile_of(traced), checkpoint="transformer.h.*")
    n, twins, units = graph.n_forward, graph.twins, graph.units
    assert [graph.ops[at].name for at in units] == [
        f"{RECOMPUTE}transformer.h.1",
        f"{RECOMPUTE}transformer.h.0",
    ]
    for at, unit in units.items():
        inside, name = set(unit), graph.ops[at].name.removeprefix(RECOMPUTE)
        assert unit == tuple(
            i for i, op in enumerate(traced.ops) if op.name.startswith((f"{name}.", f"{name}/"))
        )
        assert graph.ops[at].time_ns == sum(graph.ops[op].time_ns for op in unit)
        backward = {twins[op] for op in unit}
        assert {graph.ops[op].group for op in (at, *inside, *backward)} == {graph.ops[at].group}
        # Nothing goes straight from a forward inside to a backward inside.
        for tensor in graph.tensors:
            assert not (tensor.producer in inside and backward & set(tensor.consumers))
        entering = {
            graph.tensors[t].producer
            for op in backward
            for t in graph.op_inputs[op]
            if graph.tensors[t].producer > n
        } - {*backward, at}
        assert entering
        assert entering <= {graph.tensors[t].producer for t in graph.op_inputs[at]}


def test_a_step_on_one_device_takes_as_much_longer_as_its_units_take_forward() -> None:
    traced = traced_of("gpt2")
    cluster = cpus(1)
    taken = {}
    for checkpoint in (None, "transformer.h.*"):
        graph = traced.graph(profile_of(traced), checkpoint=checkpoint)
        placement = baechi.solve(graph, cluster, placer="single")
        taken[checkpoint] = baechi.simulate(graph, cluster, placement).makespan_ns
    units = named_units(traced, "transformer.h.*")
    again = sum(100 + op for unit in units for op in unit.ops)
    assert taken["transformer.h.*"] - taken[None] == again


def test_times_of_every_kind_of_device_count_what_runs_again() -> None:
    traced = traced_of("gpt2")
    graph = traced.graph(profile_of(traced), checkpoint="transformer.h.*")
    assert graph.times["cpu"] == tuple(op.time_ns for op in graph.ops)


def test_a_graph_without_units_is_what_it_was() -> None:
    traced = traced_of("t5")
    graph = traced.graph(profile_of(traced))
    assert not graph.units
    n = len(traced.ops)
    order = traced.backward_ops
    assert [op.name for op in graph.ops[n:]] == [
        LOSS,
        *(BACKWARD + traced.ops[op].name for op in order),
    ]


def test_units_that_share_a_parameter_are_on_one_device() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    traced = baechi.trace(Shares(), (torch.randn(2, 4),))
    graph = traced.graph(profile_of(traced), checkpoint=["first", "second"])
    units = graph.units
    assert len(units) == 2
    assert len({graph.ops[at].group for at in units}) == 1


def test_a_module_that_is_called_twice_is_two_units() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x) * 2)

    model, x = Twice(), torch.randn(2, 4)
    placed = placed_on(model, (x,), 2, "m-etf", "layer")
    units = placed.graph.units
    assert len(units) == 2
    assert_equal_steps(model, placed, (x,), {})


class Crossed(nn.Module):
    """Two submodules, each of which needs something of the other's first half."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
            return self.first(x).tanh() if first else self.second(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self.Half(), self.Half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.left(x, True), self.right(x + 1, True)
        return self.left(b, False) + self.right(a, False)


def test_units_that_need_each_other_s_gradients_are_refused_by_name() -> None:
    traced = baechi.trace(Crossed(), (torch.randn(2, 4),))
    with pytest.raises(baechi.InputError, match=r"'left', 'right' need each other's"):
        traced.graph(profile_of(traced), checkpoint=["left", "right"])
    for one in ("left", "right"):
        assert traced.graph(profile_of(traced), checkpoint=one).units


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        ("transformer.l.*", r"'transformer\.l\.\*' names no submodule.*'transformer\.h"),
        (["transformer.h.0", "h.1"], r"'h\.1' names no submodule"),
        (7, "limit of memory depends on the devices"),
        (True, "limit of memory depends on the devices"),
        ([7], "checkpoint names 7, a int"),
    ],
)
def test_what_is_no_submodule_is_refused(checkpoint: Any, text: str) -> None:
    traced = traced_of("gpt2")
    with pytest.raises(baechi.InputError, match=text):
        traced.graph(profile_of(traced), checkpoint=checkpoint)


def test_what_no_gradient_reaches_is_refused_and_inference_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    traced = baechi.trace(model, (torch.randn(2, 4),))
    with pytest.raises(baechi.InputError, match=r"checkpoint '0'.*no gradient reaches"):
        traced.graph(profile_of(traced), checkpoint="0")
    with pytest.raises(baechi.InputError, match="training=True"):
        traced.graph(profile_of(traced), training=False, checkpoint="2")


def test_of_submodules_inside_each_other_the_outermost_is_the_unit() -> None:
    traced = traced_of("gpt2")
    paths = module_paths(traced)
    assert {"transformer.h.0", "transformer.h.0.attn.c_attn"} <= set(paths)
    names = [unit.name for unit in named_units(traced, ["transformer.h.0*", "transformer.h.1.mlp"])]
    assert names == ["transformer.h.0", "transformer.h.1.mlp"]


# What runs.


def step(module: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor | None]:
    """Outputs, gradients, buffers and the random state after a step that goes backward twice."""
    torch.manual_seed(7)
    module.zero_grad()
    outputs = tensors_in(module(*args, **kwargs))
    graded = [tensor for tensor in outputs if tensor.requires_grad]
    loss = torch.stack([tensor.float().square().mean() for tensor in graded]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    buffers = [buffer.clone() for buffer in module.buffers()]
    return [*outputs, *gradients, *buffers, torch.get_rng_state()]


def assert_equal_steps(model: nn.Module, placed: nn.Module, args: Any, kwargs: Any) -> None:
    """A step of the placed model equals one of the unsplit model, bit for bit."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # running statistics move on
        expected = step(model, args, kwargs)
    model.load_state_dict(start)
    for _ in range(2):
        found = step(placed, args, kwargs)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize(("devices", "placer"), [(1, "single"), (3, baechi.RandomPlacer(1))])
@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("gpt2", "transformer.h.*"),
        pytest.param("t5", ("encoder.block.*", "decoder.block.*"), marks=pytest.mark.slow),
        ("resnet_train", "stages.*"),
        ("towers", "*"),
        ("buffers", "*"),
        ("in_place", "*"),
        ("data_dependent", "*"),
        ("dropouts", "*"),
        pytest.param("awkward", "*", marks=pytest.mark.slow),
        pytest.param("clip", "*", marks=pytest.mark.slow),
        pytest.param("lstm_lm", "*", marks=pytest.mark.slow),
        pytest.param("inception", "*", marks=pytest.mark.slow),
        pytest.param("bert", "bert.encoder.layer.*", marks=pytest.mark.slow),
    ],
)
def test_a_step_with_units_equals_the_unsplit_model_s(
    name: str, checkpoint: Any, devices: int, placer: Any
) -> None:
    (model, args, kwargs), traced = example(name)
    placed = applied(traced, devices, placer, checkpoint)
    assert any(tape.again >= 0 for tape in placed.program.tapes)
    try:
        assert_equal_steps(model, placed, args, kwargs)
    finally:
        placed._current.close()


def test_masks_of_dropout_are_drawn_again_on_one_device_as_in_the_unsplit_model() -> None:
    model, x = Layers(), torch.randn(4, 8, requires_grad=True)
    assert_equal_steps(model, placed_on(model, (x,), 1, "single", "layers.*"), (x,), {})


class Scaled(nn.Module):
    """Linear in w, so that its gradient times w tells the mask of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((32,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x * self.w, 0.5, True)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x) for part in self.parts]


def assert_masks_are_drawn_again(model: Parts, placed: nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        placed.zero_grad()
        outputs = placed(x)
        torch.stack([output.sum() for output in outputs]).sum().backward()
        for part, output in zip(model.parts, outputs, strict=True):
            assert torch.equal(part.w.grad * part.w, output)
    assert len({tuple(output.tolist()) for output in outputs}) == 4


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_dropout_are_drawn_again_on_several_devices(seed: int) -> None:
    model, x = Parts(), torch.ones(32)
    placed = placed_on(model, (x,), 3, baechi.RandomPlacer(seed), "parts.*")
    assert_masks_are_drawn_again(model, placed, x)


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [["cuda:0"], ["cuda:0/a", "cuda:0/b", "cuda:0/c"]])
def test_units_on_a_gpu_draw_again_and_give_the_gradients_of_the_unsplit_model(
    lanes: list[str],
) -> None:
    placer = baechi.RandomPlacer(1)
    model, x = Parts().to("cuda:0"), torch.ones(32, device="cuda:0")
    placed = placed_on(model, (x,), len(lanes), placer, "parts.*", devices=lanes)
    assert_masks_are_drawn_again(model, placed, x)
    other, y = Layers(p=0.0).to("cuda:0"), torch.randn(4, 8, device="cuda:0")
    placed = placed_on(other, (y,), len(lanes), placer, "layers.*", devices=lanes)
    found = []
    for module in (other, placed):
        module.zero_grad()
        module(y).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in other.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


class Normed(nn.Module):
    """Looks at values, so that it stays whole; and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if bool(x.sum() > -(10**9)) else x


class Queue(nn.Module):
    """A queue of keys, into which each forward writes, or which stays whole."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.last, self.whole = nn.Linear(8, 8), nn.Linear(8, 8), whole
        self.register_buffer("queue", torch.rand(8, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.whole and bool(h.detach().isnan().any()):
            return h
        with torch.no_grad():
            self.queue[:, : len(h)] = h.t()
        return self.last(h) + (h @ self.queue).mean(1, keepdim=True)


@pytest.mark.filterwarnings("ignore:1 of this Sequential")
@pytest.mark.parametrize("whole", [False, True])
def test_copies_of_buffers_that_forward_writes_are_predicted(whole: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Queue(whole), nn.Linear(8, 8))
    placed = lazily(model, checkpoint=["1"])
    placed(torch.rand(4, 8)).sum().backward()
    for seen, said in zip(
        placed.measure(steps=1).peak_bytes, placed.schedule.peak_bytes, strict=True
    ):
        assert seen <= said <= 1.25 * seen


def test_buffers_of_a_submodule_that_stays_whole_move_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Normed(), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    placed = placed_on(model, (x,), 1, "single", ["0", "1"])
    assert any(node.op == "call_module" for node in placed.traced.module.graph_module.graph.nodes)
    assert_equal_steps(model, placed, (x,), {})


class Skips(nn.Module):
    """Is left out at random: it stays whole, and says nowhere that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(1).item() < 0.5 else x + self.linear(x).tanh()


@pytest.mark.parametrize("checkpoint", [None, ["1", "2"]])
def test_what_a_submodule_that_stays_whole_draws_is_drawn_again(checkpoint: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Skips(), Skips(), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    placed = placed_on(model, (x,), 1, "single", checkpoint)
    assert sum(op.random for op in placed.traced.ops) == 2
    for seed in range(8):
        found = []
        for module in (model, placed):
            module.zero_grad()
            torch.manual_seed(seed)
            module(x).square().sum().backward()
            found.append([*(parameter.grad for parameter in model.parameters()), torch.rand(1)])
        assert all(map(same, *found))


class Force(nn.Module):
    """Goes backward inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.energy = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.energy(self.inner(at).tanh()).sum()
            return torch.autograd.grad(energy, at, create_graph=True)[0] * x


def test_what_goes_backward_inside_its_forward_runs_again() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Force(), nn.Linear(3, 3))
    placed = placed_on(model, (torch.randn(2, 3),), 1, "single", "1")
    assert_equal_steps(model, placed, (torch.randn(2, 3),), {})


def test_two_forwards_before_two_backwards_accumulate_as_in_the_unsplit_model() -> None:
    (model, args, _), traced = example("resnet_train")
    other = tuple(tensor + 1 for tensor in args)
    placed = applied(traced, 2, "m-etf", "stages.*")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for module in (model, placed):
        model.load_state_dict(start)
        module.zero_grad()
        first, second = module(*args).square().mean(), module(*other).square().mean()
        first.backward()
        second.backward()
        found.append(
            [p.grad.clone() for p in model.parameters()] + [*map(torch.clone, model.buffers())]
        )
    for one, other_one in zip(*found, strict=True):
        assert torch.equal(one, other_one)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_is_as_it_was_in_the_forward(outside: bool) -> None:
    """Whatever holds where `backward` is called."""
    model, x = Layers(p=0.0), torch.randn(4, 8)
    gradients = []
    for checkpoint in (None, "layers.*"):
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            placed = placed_on(model, (x,), 2, "round-robin", checkpoint)
        placed.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            loss = placed(x).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_later_no_gradients_and_inference_need_nothing_again() -> None:
    model, x = Layers(p=0.0), torch.randn(4, 8)
    placed = placed_on(model, (x,), 2, "round-robin", "layers.*")
    expected = model(x)
    with torch.no_grad():
        assert torch.equal(placed(x), expected)
    with torch.inference_mode():
        assert torch.equal(placed(x), expected)
    model.layers[0].requires_grad_(False)
    placed(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.layers[0].parameters())
    assert all(parameter.grad is not None for parameter in model.layers[2].parameters())
    model.requires_grad_(False)
    assert not placed(x).requires_grad


def test_what_is_written_between_forward_and_backward_is_refused() -> None:
    model, x = Layers(), torch.randn(4, 8)
    placed = placed_on(model, (x,), 1, "single", "layers.*", threads_per_device=None)
    loss = placed(x).sum()
    with torch.no_grad():
        model.layers[1][0].weight.add_(1)
    with pytest.raises(baechi.ExecutionError, match=r"shape \[8, 8\].*written in place"):
        loss.backward()
    placed(x).sum().backward()


CALLS: list[int] = []


@torch.library.custom_op("baechi_tests::tires", mutates_args=())
def tires(x: torch.Tensor) -> torch.Tensor:
    """Fails each second time."""
    CALLS.append(1)
    if len(CALLS) % 2 == 0:
        raise IndexError("too tired")
    return x.clone()


@tires.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


tires.register_autograd(lambda ctx, gradient: gradient)  # noqa: ARG005


@pytest.mark.parametrize("devices", [1, 2])
def test_an_operator_that_fails_again_is_named_and_the_next_call_works(devices: int) -> None:
    class Tires(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tires(x * 2)

    model = nn.Sequential(nn.Linear(3, 3), Tires())
    x = torch.randn(2, 3)
    placed = placed_on(model, (x,), devices, "round-robin", "1")
    CALLS.clear()
    with pytest.raises(baechi.ExecutionError, match=r"1/tires.*IndexError: too tired"):
        placed(x).sum().backward()
    CALLS.clear()
    assert placed(x).shape == (2, 3)


def test_a_program_tells_what_runs_again() -> None:
    model, x = Layers(1), torch.randn(4, 8)
    text = placed_on(model, (x,), 1, "single", "layers.*").program.explain()
    assert "recompute segment" in text
