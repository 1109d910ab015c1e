"""The one call: lazy and eager, once per shape, checked and honest."""

import copy
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import baechi
from baechi.probing.graph_launches import GRAPH_LAUNCH_NS
from baechi.records.op_costs import OpCost
from baechi.runtime import placed_state
from baechi.runtime.executable import Executable
from baechi.runtime.placed_module import installed
from baechi.torch_support.torch_devices import torch_threads
from baechi.units import format_ns

DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def test_each_shape_is_traced_once_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    placed = baechi.place(model(), DEVICES)
    with pytest.raises(baechi.ExecutionError, match="not specialized yet"):
        _ = placed.placement
    for rows in (2, 2, 3, 2, 3):
        assert placed(torch.randn(rows, 8)).shape == (rows, 4)
    said = capsys.readouterr().err
    assert said.count("tracing Sequential") == 2
    assert "input [2, 8]" in said
    assert "input [3, 8]" in said
    assert said.count("predicted: ") == 2
    step = format_ns(placed.schedule.makespan_ns)
    assert f"predicted: {step} a step, on 1 of 2 devices; the fullest, cpu:0, holds " in said
    assert "of 1.0 GiB" in said


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
def test_as_cuda_graphs_tapes_are_launched_and_not_operators(
    cuda_graphs: Any, training: bool
) -> None:
    example = torch.randn(2, 8)
    traced = baechi.trace(model(), (example,))
    rows = [
        OpCost(1_000, 1_000 if op in traced.backward_ops else 0, forward_launch_ns=7 + op,
               backward_launch_ns=100 + op if op in traced.backward_ops else 0)
        for op in range(len(traced.ops))
    ]  # fmt: skip
    costs = baechi.Profile(traced.digest, "", tuple(rows))
    devices = [
        baechi.Device(f"cpu:{i}", "1GiB", host=host, launches_ahead=ahead)
        for i, (host, ahead) in enumerate([("h", True), ("", True), ("h", False)])
    ]
    cluster = baechi.Cluster.connected(devices, baechi.Link(0, 10**9, overhead_ns=30))
    placed = baechi.place(
        *(model(), cluster),
        example_args=(example,),
        costs=costs,
        training=training,
        cuda_graphs=cuda_graphs,
        progress=False,
    )
    # Each hand-over begins a tape, where a host launches ahead.
    more = GRAPH_LAUNCH_NS if cuda_graphs else 0
    assert [link and link.overhead_ns for link in placed.cluster.links[1]] == [30 + more, None, 30]
    assert [row.host for row in placed.cluster.devices] == ["h", "", "h"]
    launches = [op.launch_ns for op in placed.graph.ops]
    own = [op.launch_ns for op in traced.graph(costs, training=training).ops]
    assert launches == ([0] * len(own) if cuda_graphs else own)
    assert any(own)


class CheckpointedLayer(nn.Module):
    """As those of transformers and diffusers."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = self.gradient_checkpointing and self.training
        return checkpoint(self.run, x, use_reentrant=True) if again else self.run(x)


def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    del module, args
    output.requires_grad_(True)


def test_gradient_checkpointing_of_a_model_makes_its_layers_run_again() -> None:
    """A frozen base, whose reentrant checkpointing has gradients only by the hook."""
    torch.manual_seed(0)
    layers = (CheckpointedLayer() for _ in range(2))
    unsplit = nn.Sequential(nn.Embedding(9, 6), *layers).requires_grad_(False)
    unsplit[1].a.weight.requires_grad_(True)
    unsplit[0].register_forward_hook(make_inputs_require_grads)
    for layer in unsplit[1:]:
        layer.gradient_checkpointing = True
    model, ids = copy.deepcopy(unsplit), torch.arange(4)
    placed = baechi.place(model, DEVICES, placer="round-robin", costs="estimate", progress=False)
    for one in (unsplit, placed):
        one(ids).square().sum().backward()
    assert torch.equal(model[1].a.weight.grad, unsplit[1].a.weight.grad)
    again = [op.name for op in placed.graph.ops if op.phase == "recompute"]
    assert again == ["recompute:2", "recompute:1"]


@pytest.mark.slow
def test_gradient_checkpointing_of_transformers_after_placing() -> None:
    unsplit, args, _ = zoo.MODELS["llama"]()
    model = copy.deepcopy(unsplit)
    placed = baechi.place(model, DEVICES, placer="round-robin", costs="estimate", progress=False)
    found = []
    with torch_threads(1):
        placed(*args, use_cache=False)
        for one, own in ((unsplit, unsplit), (placed, model)):
            own.requires_grad_(False)
            own.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
            own.activation_checkpointing_enable({"use_reentrant": True})
            own.enable_input_require_grads()
            loss = one(*args, labels=args[0], use_cache=False).loss
            loss.backward()
            found.append([loss, own.model.layers[0].self_attn.q_proj.weight.grad])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    again = [op.name for op in placed.graph.ops if op.phase == "recompute"]
    assert again == ["recompute:model.layers.1", "recompute:model.layers.0"]


def test_a_first_call_inside_of_hooks_on_saved_tensors_is_planned_without_them() -> None:
    """Planning goes backward itself; its own tensors are not for the caller's hooks."""
    torch.manual_seed(0)
    unsplit = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    module = copy.deepcopy(unsplit)
    placed = baechi.place(
        module, DEVICES, placer="round-robin", costs="estimate", progress=False, verify=True
    )
    found, counts = [], []
    for one in (unsplit, placed):
        x = torch.ones(2, 8, requires_grad=True)
        seen: list[torch.Size] = []

        def pack(tensor: torch.Tensor, seen: list[torch.Size] = seen) -> torch.Tensor:
            seen.append(tensor.shape)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            one(x * 1).square().sum().backward()
        counts.append(len(seen))
        found.append([x.grad, *(parameter.grad for parameter in one.parameters())])
    assert counts[0] == counts[1]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_all_is_planned_and_measured_in_any_mode_of_the_caller(mode: Any) -> None:
    unsplit = model().eval()
    module = copy.deepcopy(unsplit)  # inside it would be of inference tensors
    with mode():
        x = torch.randn(2, 8)
        placed = baechi.place(module, DEVICES, example_args=(x,), progress=False)
        assert torch.equal(placed(x), unsplit(x))
        assert placed.measure(1).step_ns > 0
    placed(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in placed.parameters())


def test_the_limit_of_shapes_is_told() -> None:
    placed = baechi.place(model(), DEVICES, progress=False, max_shapes=1, dynamic=False)
    placed(torch.randn(2, 8))
    with pytest.warns(UserWarning, match=r"1 families.*\[3, 8\].*was \[2, 8\].*max_shapes"):
        placed(torch.randn(3, 8))


def test_training_and_evaluation_mode_are_traced_apart() -> None:
    split = baechi.place(model(), DEVICES, progress=False)
    x = torch.randn(2, 8)
    assert not torch.equal(split(x), split(x))
    split.eval()
    assert torch.equal(split(x), split(x))
    torch.testing.assert_close(split(x), model().eval()(x))
    assert not split.training
    assert not split.get_submodule("2").training


def test_example_arguments_specialize_at_once() -> None:
    placed = baechi.place(
        model(), DEVICES, example_kwargs={"input": torch.randn(2, 8)}, progress=False
    )
    assert len(placed.placement.devices) == len(placed.graph.ops)
    assert placed.schedule.makespan_ns > 0


def test_constraints_hold_for_the_placement() -> None:
    x = torch.randn(2, 8)
    rules = baechi.Constraints(excluded=("cpu:0",))
    placed = baechi.place(model(), DEVICES, example_args=(x,), progress=False, constraints=rules)
    assert set(placed.placement.devices) == {1}


def test_a_model_that_does_not_fit_is_refused_with_what_is_missing() -> None:
    big = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    x = torch.randn(4, 512)
    with pytest.raises(baechi.InfeasibleError) as caught:
        baechi.place(big, {"cpu:0": "1MiB"}, example_args=(x,), progress=False)
    assert "checkpoint=True" in str(caught.value)
    with pytest.raises(baechi.InfeasibleError) as other:
        baechi.place(big, {"cpu:0": "1MiB"}, example_args=(x,), progress=False, training=False)
    assert "checkpoint" not in str(other.value), "an inference keeps nothing"
    need = (1 << 20) + caught.value.extra_bytes
    placed = baechi.place(big, {"cpu:0": need}, example_args=(x,), progress=False)
    assert max(placed.schedule.peak_bytes) <= need


def test_inference_needs_less_and_gives_no_gradients() -> None:
    x = torch.randn(2, 8)
    inference = baechi.place(model(), DEVICES, example_args=(x,), training=False, progress=False)
    training = baechi.place(model(), DEVICES, example_args=(x,), progress=False)
    assert sum(inference.schedule.peak_bytes) < sum(training.schedule.peak_bytes)
    assert not inference(x).requires_grad


def test_verify_compares_with_the_unsplit_model_and_changes_nothing() -> None:
    it = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = copy.deepcopy(it.state_dict())
    placed = baechi.place(
        it, DEVICES, example_args=(torch.randn(4, 8),), verify=True, progress=False
    )
    assert all(torch.equal(before[name], t) for name, t in it.state_dict().items())
    assert all(parameter.grad is None for parameter in placed.parameters())


def test_verify_finds_a_trace_that_does_not_follow_the_model() -> None:
    calls = [0]

    class Counts(nn.Module):
        """Looks at Python state that a trace cannot see."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return self.linear(x) * calls[0]

    with pytest.raises(baechi.ExecutionError, match="differs from the unsplit"):
        baechi.place(
            Counts(), DEVICES, example_args=(torch.randn(1, 2),), verify=True, progress=False
        )


def test_verify_writes_into_no_argument() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    x = torch.zeros(3)
    placed = baechi.place(Counts(), DEVICES, verify=True, progress=False)
    torch.testing.assert_close(placed(x), torch.full((3,), 2.0))
    torch.testing.assert_close(x, torch.ones(3))


def test_a_given_profile_is_used_and_a_wrong_one_refused() -> None:
    x = torch.randn(2, 8)
    it = model()
    profile = baechi.profile(baechi.trace(it, (x,)), progress=False)
    placed = baechi.place(it, DEVICES, example_args=(x,), costs=profile, progress=False)
    assert placed.graph.ops[1].time_ns in {cost.forward_ns for cost in profile.costs}
    with pytest.raises(baechi.InputError, match="another model"):
        baechi.place(nn.Linear(8, 8), DEVICES, example_args=(x,), costs=profile, progress=False)
    with pytest.raises(baechi.InputError, match="costs is 'guess'"):
        baechi.place(model(), DEVICES, costs="guess")


def test_costs_may_be_computed() -> None:
    x = torch.randn(2, 8)
    it = model()
    placed = baechi.place(it, DEVICES, example_args=(x,), costs="estimate", progress=False)
    costs = baechi.estimate(baechi.trace(it, (x,)), "cpu").costs
    assert placed.graph.ops[1].time_ns == costs[1].forward_ns
    rows = [baechi.Device("cpu:0", "1GiB", kind="abacus")]
    unknown = baechi.Cluster.connected(rows, baechi.Link(0, 10**9))
    placed = baechi.place(placed.unplace(), unknown, costs="estimate", progress=False)
    with pytest.raises(baechi.InputError, match="device kind 'abacus' is unknown"):
        placed(x)


@pytest.mark.parametrize("costs", ["measure", "estimate"])
def test_devices_without_a_kind_get_that_of_their_hardware(costs: str) -> None:
    rows = [baechi.Device("cpu:0", "1GiB"), baechi.Device("cpu:1", "1GiB")]
    cluster = baechi.Cluster.connected(rows, baechi.Link(0, 10**9))
    for devices in (rows, cluster):
        placed = baechi.place(model(), devices, costs=costs, progress=False)
        assert placed(torch.randn(2, 8)).shape == (2, 4)
        assert {device.kind for device in placed.cluster.devices} == {"cpu"}


def test_a_placed_module_cannot_be_placed_again_and_says_why() -> None:
    placed = baechi.place(model(), DEVICES)
    with pytest.raises(baechi.InputError, match="placed already"):
        baechi.place(placed, DEVICES)


def test_attributes_of_the_model_are_there() -> None:
    it = model()
    it.note = "mine"
    placed = baechi.place(it, DEVICES)
    assert placed.note == "mine"
    assert placed[0] is it[0]
    assert list(placed) == list(it)
    assert len(placed) == 4
    assert it[1] in placed
    assert isinstance(placed, baechi.PlacedModule)
    assert "PlacedModule(Sequential" in repr(placed)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = placed.no_such_thing


class Warm(nn.Module):
    """Has its number behind a property."""

    def __init__(self) -> None:
        super().__init__()
        self._warmth = 1.0

    @property
    def warmth(self) -> float:
        return self._warmth

    @warmth.setter
    def warmth(self, value: float) -> None:
        self._warmth = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.warmth


def test_a_property_of_the_model_is_set_through_the_placed_one() -> None:
    model, x = Warm(), torch.ones(2)
    placed = baechi.place(model, ["cpu"], costs="estimate", progress=False)
    placed(x)
    placed.warmth = 3.0
    assert model.warmth == 3.0
    assert torch.equal(placed(x), copy.deepcopy(model)(x))


def test_a_number_among_the_outputs_is_computed_anew_each_time() -> None:
    class ReturnsAnItem(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return x * 2, x.sum().item()

    placed = baechi.place(ReturnsAnItem(), DEVICES, placer="round-robin", progress=False)
    assert placed(torch.ones(2))[1] == 2.0
    assert placed(torch.full((2,), 4.0))[1] == 8.0
    assert placed.traced.rung == "module granularity, opaque leaves"


def test_the_first_call_draws_what_the_unsplit_model_would_draw() -> None:
    """Tracing and measuring take nothing from the random stream."""
    it = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    expected = it(x)
    placed = baechi.place(it, {"cpu:0": "1GiB"}, progress=False)
    torch.manual_seed(3)
    assert torch.equal(placed(x), expected)


@pytest.mark.parametrize("placer", ["auto", "round-robin", baechi.RandomPlacer(1)])
def test_a_parameter_or_buffer_that_is_returned_is_that_very_object(placer: object) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("shift", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return x * self.scale + self.shift, self.scale, self.shift

    it = Returns()
    placed = baechi.place(it, DEVICES, placer=placer, progress=False)
    y, scale, shift = placed(torch.ones(3))
    assert scale is it.scale
    assert shift is it.shift
    (y.sum() + scale.sum()).backward()
    torch.testing.assert_close(it.scale.grad, torch.full((3,), 2.0))


def test_a_model_without_inputs_runs() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.weight * 2

    placed = baechi.place(Constant(), DEVICES, progress=False)
    placed().sum().backward()
    torch.testing.assert_close(placed.weight.grad, torch.full((3,), 2.0))


def test_a_model_on_several_devices_goes_home_to_be_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second shape, or another mode: the first has spread the parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    moved: list[tuple[torch.Tensor, torch.device]] = []
    monkeypatch.setattr(placed_state, "move", lambda tensor, place: moved.append((tensor, place)))
    seen: list[int] = []

    class Planner:
        def joined(self, *_: object) -> None:
            return None

        def __call__(self, *_: object) -> Executable:
            seen.append(len(moved))
            raise ValueError("traced")

    state = placed_state.PlacedState(model, [torch.device("cpu")], Planner(), 8)
    placed = installed(state)
    with pytest.raises(ValueError, match="traced"):
        placed(torch.ones(2, 4))
    assert seen == [0]  # all on one device
    state.origins[0] = (torch.empty(4, device="meta"), torch.device("cpu"))
    placed.eval()
    with pytest.raises(ValueError, match="traced"):
        placed(torch.ones(2, 4))
    assert seen == [0, 4]
    assert {place for _, place in moved} == {torch.device("cpu")}


class Checking(nn.Module):
    """Two layers with a check of values between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not (x < 1e3).all():
            x = x.clamp(-1, 1)
        return self.second(x)


def test_a_model_that_stays_whole_says_because_of_which_line() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Checking()), torch.randn(2, 4)
    words = r"1 of this Sequential, with 67% of .*test_placing.py.*not \(x < 1e3\).all\(\):\. Let"
    options = {"costs": "estimate", "progress": False, "example_args": (x,)}
    with pytest.warns(UserWarning, match=words):
        placed = baechi.place(model, {"cpu:0": "1MiB", "cpu:1": "1MiB"}, **options)
    assert any("stays on one device" in remark for remark in placed.remarks)
    assert baechi.place(placed.unplace(), {"cpu:0": "1MiB"}, **options).remarks == ()
