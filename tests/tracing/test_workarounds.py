"""Defects of torch that tracing works around, and whether torch still has them."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from placed import EXACT, again_at_random, assert_same_values, at_random, lazily, one_thread, step
from seeds import some
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import baechi
from baechi.torch_support.tracer_internals import APPLY_IS_NATIVE
from baechi.tracing.recurrent_layers import compact, recurrent_in_one
from baechi.tracing.truth_values import CHECK

X = torch.arange(12.0).reshape(3, 4)


class Square(torch.autograd.Function):
    """A square whose gradient is made up, so that nobody can derive it from the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x, None


square = Square.apply  # as people do


class Untraceable(nn.Module):
    """Export fails at its packed sequence; its siblings are then traced by fx."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([3]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][0]


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self, self.first(x)))


def custom(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return square(x, 2)


def without_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        side = model.side(x)
    return x + side


def hooked(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    if torch.is_grad_enabled():
        x.register_hook(lambda gradient: gradient * 2)
    return x


def own_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model.side(x).sum(), x, create_graph=True)[0]


def steps(model: nn.Module) -> list[Any]:
    values: list[Any] = []
    for _ in range(2):
        y = model(X)
        y.square().mean().backward()
        values.append(y.detach())
    return values + [p.grad for p in model.parameters()]


@pytest.mark.parametrize("function", some([custom, hooked, without_gradients, own_gradient], 2))
def test_fx_loses_nothing_either(function: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    most = [nn.Linear(4, 64), nn.Linear(64, 4)]  # of the parameters
    model = nn.Sequential(Untraceable(), nn.Tanh(), *most, Between(function))
    unsplit = copy.deepcopy(model)
    traced = baechi.trace(model, (X,))
    assert traced.rung == "module granularity, opaque leaves"
    placed = again_at_random(traced, seed=0, devices=2)
    assert_same_values(steps(placed), steps(unsplit), **EXACT)


@pytest.mark.parametrize("before", [(), (Untraceable(),)], ids=["export", "fx"])
def test_it_is_one_operator_whose_key_has_no_address(before: tuple[nn.Module, ...]) -> None:
    traced = baechi.trace(nn.Sequential(*before, Between(custom)), (X,))
    keys = [op.key for op in traced.ops]
    # fx cannot know the mode of gradients that C++'s `apply` hides: the module stays whole.
    title = "Between" if APPLY_IS_NATIVE and before else "Square"
    assert sum(title in key for key in keys) == 1
    assert not any(" at 0x" in key for key in keys)


class Ends(nn.Module):
    """Two outputs, one of them a function's; a metered step and a large one end tapes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), square(self.two(x), 2)


def test_what_no_loss_depends_on_gets_no_gradient_of_zeros() -> None:
    """An optimizer would let the weights decay of what unsplit it leaves alone."""
    model, x = Ends(), torch.randn(10_000, 8)
    placed = again_at_random(baechi.trace(model, (x,)), seed=0, devices=1)
    placed(x)[0].sum().backward()
    assert model.one.weight.grad is not None
    assert model.two.weight.grad is None


def test_torch_still_loses_the_backward() -> None:
    """If this fails, torch is mended: `workarounds.HeldNodes` may go."""
    model, x = Between(custom), X.clone().requires_grad_()
    exported = torch.export.export(model, (x,), strict=False).module()
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    (derived,) = torch.autograd.grad(exported(x).sum(), x)
    assert not torch.equal(derived, wanted)


class Recognizer(nn.Module):
    """Its own loss, with targets in rows or one after another."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        mask = labels > 0
        targets = labels if self.rows else labels.masked_select(mask)
        scores = logits.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, targets, lengths, mask.sum(-1)), logits


@pytest.mark.parametrize("rows", [True, False])
def test_a_model_with_a_ctc_loss_is_split(rows: bool) -> None:
    torch.manual_seed(0)
    model = Recognizer(rows)
    labels = torch.tensor([[1, 2, 0], [3, 4, 2]])
    args = (torch.randn(2, 9, 4), labels, torch.tensor([9, 8]))
    with one_thread():
        wanted = step(model, args, {})
        placed = at_random(model, args)
        assert placed.traced.rung == "torch.export (non-strict)"
        assert not wanted.differs_from(step(placed, args, {}))


def test_torch_still_lacks_the_shapes() -> None:
    """If this fails, torch is mended: `workarounds.ctc_losses_known` may go."""
    with FakeTensorMode():
        scores, targets = torch.zeros(9, 2, 5), torch.ones(2, 3, dtype=torch.int64)
        lengths = torch.tensor([9, 8]), torch.tensor([3, 2])
        with pytest.raises(DynamicOutputShapeException, match="_ctc_loss"):
            functional.ctc_loss(scores, targets, *lengths)


def test_torch_still_fixes_the_sizes_of_images() -> None:
    """If this fails, torch is mended: `workarounds.resized_by_symbols` may go."""
    environment = ShapeEnv()
    symbol = environment.create_symbol(5, ConstantSource("n"))
    size = environment.create_symintnode(symbol, hint=5)
    with FakeTensorMode(shape_env=environment):
        image = torch.empty(size, 1, 4, 4)
        assert isinstance(image.shape[0], torch.SymInt)
        resize = torch.ops.aten.upsample_bilinear2d.vec
        assert type(resize(image, [3, 3], False, None).shape[0]) is int


class Checked(nn.Module):
    """Returns its argument, unless it is negative somewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x[x >= 0].numel() == x.numel())
        return x.exp()


def test_torch_still_takes_checks_for_facts() -> None:
    """If this fails, torch is mended: `workarounds.checks_kept` may go."""
    graph = torch.export.export(Checked(), (X,), strict=False).module().graph
    targets = [str(node.target) for node in graph.nodes]
    assert "aten._assert_scalar.default" in targets
    assert not any(target.startswith(CHECK) for target in targets)


def test_torch_still_turns_gradients_off_in_nested_checkpoints() -> None:
    """If this fails, torch is mended: `workarounds.checkpointed` may go, but for its writes."""
    inner = partial(checkpoint, torch.tanh, use_reentrant=False)
    model = Between(lambda _, x: checkpoint(inner, x, use_reentrant=False))
    assert model(X).requires_grad
    assert not torch.export.export(model, (X,), strict=False).module()(X).requires_grad


class Trying(nn.Module):
    """Gives each layer a length, and calls those that take none without (as `speechbrain` does)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                x = layer(x, length=3)
            except TypeError:
                x = layer(x)
        return x


def test_torch_still_stays_in_what_failed() -> None:
    """If this fails, torch is mended: `workarounds.errors_followed` need not leave submodules."""
    with pytest.raises(AssertionError, match="Unexpected key"):
        torch.export.export(Trying(), (X,), strict=False)
    assert baechi.trace(Trying(), (X,)).rung == "torch.export (non-strict)"


class Catching(nn.Module):
    """Catches whatever looking at a value raises, and does something else then."""

    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        try:
            factor = 2 if self.ask(x) else 3
        except Exception:  # as many would
            factor = 5
        return self.last(x) * factor


def test_who_catches_the_error_of_a_tracer_is_traced_by_another() -> None:
    model = Catching(lambda x: bool(x.sum() > 1e9))
    traced = baechi.trace(model, (X,))
    assert "truth values" in traced.rung
    assert torch.equal(traced.module.graph_module(X)[0], model(X))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: int(x.sum()),
        pytest.param(lambda x: float(x.sum()), marks=pytest.mark.slow),
        lambda x: len(x[x > 0]),
    ],
)
def test_who_catches_the_errors_of_all_tracers_is_refused(
    ask: Callable[[torch.Tensor], Any],
) -> None:
    with pytest.raises(baechi.TraceError, match="forward catches the error of a tracer"):
        baechi.trace(Catching(ask), (X,))


def test_torch_still_unrolls_lstms() -> None:
    """If this fails, torch is mended: `recurrent_layers.recurrent_in_one` may go."""
    states, weights = [torch.zeros(1, 2, 4)] * 2, [list(nn.LSTM(4, 4).parameters())]
    given = torch.zeros(3, 2, 4, requires_grad=True), states, weights
    assert decompositions.select_one_layer_lstm_function(*given) is decompositions.one_layer_lstm
    with recurrent_in_one():
        found = decompositions.select_one_layer_lstm_function(*given)
    assert found is decompositions.mkldnn_one_layer_lstm


class Gated(nn.Module):
    """What a GRU calls."""

    def forward(self, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        state = torch.zeros(1, 2, 4)
        return torch.gru(x, state, weights, True, 1, 0.0, False, False, False)[0]


def test_torch_still_fixes_the_length_of_a_gru() -> None:
    """If this fails, torch is mended: that half of `recurrent_layers.recurrent_in_one` may go."""
    weights = [parameter.detach() for parameter in nn.GRU(4, 4).parameters()]
    length = {"x": {0: torch.export.Dim("n")}, "weights": [None] * 4}

    def exported() -> nn.Module:
        given = torch.randn(5, 2, 4), weights
        program = torch.export.export(Gated(), given, dynamic_shapes=length, strict=False)
        module: nn.Module = program.module()
        return module

    with pytest.raises(Exception, match="onstant"):
        exported()
    with recurrent_in_one():
        module = exported()
    x = torch.randn(7, 2, 4)
    assert torch.equal(module(x, weights), Gated()(x, weights))


class Spaced(nn.Module):
    """Centers of pixels, as detectors have them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        y = torch.linspace(0.5, height - 0.5, height, dtype=torch.float32, device=x.device)
        return x * y[:, None] * torch.linspace(-1, 1, width).exp()


def test_one_plan_takes_pixels_of_all_images() -> None:
    model = Spaced()
    module = lazily(model)
    for height, width in ((4, 6), (5, 9), (8, 3), (7, 7), (12, 5)):
        x = torch.randn(2, height, width)
        assert torch.equal(module(x), model(x))
    assert len(module._specializations) == 1
    module.unplace()


def test_torch_still_fixes_the_elements_of_linspace() -> None:
    """If this fails, torch is mended: `HeldNodes.spaced` may go."""
    size = {"x": {1: torch.export.Dim("n")}}
    with pytest.raises(Exception, match="onstant"):
        torch.export.export(Spaced(), (torch.ones(2, 5, 3),), dynamic_shapes=size, strict=False)


class Layer(nn.LSTM):
    """Says where its weights are, and counts how often it is made compact."""

    places: tuple[str, ...] = ()
    count = 0

    def parameters(self, recurse: bool = True) -> Iterator[Any]:  # noqa: ARG002
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])

    def reset_parameters(self) -> None:
        """They are never read."""

    def flatten_parameters(self) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("places", "count"),
    [(("cuda:0", "cuda:0"), 1), (("cuda:0", "cuda:1"), 0), (("cpu",), 0), (("meta",), 0)],
)
def test_layers_on_one_gpu_are_made_compact(places: tuple[str, ...], count: int) -> None:
    layer = Layer(2, 2)
    layer.places, layer.count = places, 0
    compact(nn.Sequential(nn.Linear(2, 2), layer))
    assert layer.count == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.backends.cudnn.enabled, reason="cuDNN is off")
def test_a_layer_whose_weights_were_moved_one_by_one_is_compact_again() -> None:
    model, args, _ = zoo.MODELS["lstm_lm"]()
    for parameter in model.parameters():
        parameter.data = parameter.data.to("cuda:0")
    compact(model)
    (layer,) = (module for module in model.modules() if isinstance(module, nn.LSTM))
    assert len({parameter.untyped_storage()._cdata for parameter in layer.parameters()}) == 1
    model(*(tensor.to("cuda:0") for tensor in args))  # a warning would be an error


class Mapped(nn.Module):
    """Maps over the rows of a mask, as transformers does, and over weights, with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)

        def seen(i: Tensor, j: Tensor, row: Tensor) -> Tensor:
            return (i >= j) & row

        rows = torch.vmap(torch.vmap(seen, (None, 0, 0)), (0, None, None))
        seen_by = torch.vmap(rows, (None, None, 0))(positions, positions, mask)
        y = self.linear(x)
        y = torch.vmap(lambda weight: functional.gelu(y @ weight).softmax(-1))(self.weights).sum(0)
        return functional.scaled_dot_product_attention(y, y, y, attn_mask=seen_by)


def test_what_vmap_runs_is_traced_at_all_sizes() -> None:
    model = Mapped()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, placer=baechi.RandomPlacer(0))
    for length in (5, 6, 7):
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, 1] = False
        args = torch.randn(2, length, 8), mask
        assert not step(unsplit, args, {}).differs_from(step(placed, args, {}))
    # Below 2.13 a product inside of vmap and an attention without heads fix sizes.
    assert len(placed._specializations) == (1 if torch.__version__ >= "2.13" else 3)
    placed.unplace()


def test_torch_still_exports_the_levels_of_vmap() -> None:
    """If this fails, torch is mended: `workarounds.mapped` may go."""
    args = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    graph = torch.export.export(Mapped(), args).module().graph
    assert "_vmap_increment_nesting" in str(graph)


class Shares(Untraceable):
    """A submodule that stays whole, in which two share a third."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(4)
        self.one, self.two = nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(super().forward(x)))


def test_a_submodule_that_stays_whole_may_share_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Shares())
    unsplit = copy.deepcopy(model)
    placed = at_random(model, (X,), devices=2)
    traced = placed.traced
    assert traced.rung == "module granularity, opaque leaves"
    assert_same_values(steps(placed), steps(unsplit), **EXACT)
    placed.unplace()
    baechi.estimate(traced, kind="H100-SXM-80GB")
    assert_same_values(model.state_dict(), unsplit.state_dict(), **EXACT)


def test_torch_still_loses_the_weights_of_shared_modules() -> None:
    shared = nn.Linear(4, 4)
    model, own = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)), shared.weight
    state = {name: row.detach().clone() for name, row in model.named_parameters()}
    torch.func.functional_call(model, state, X)
    assert shared.weight is not own
