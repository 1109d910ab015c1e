"""What only autograd or Python sees is honored as on the unsplit model, or refused by name."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from placed import (
    EXACT,
    again_at_random,
    assert_same_values,
    at_random,
    lazily,
    one_thread,
    step,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import baechi
from baechi.torch_support.torch_devices import torch_threads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.a(x)) + self.b(x))


class Middle(nn.Module):
    """A linear layer, a submodule or function in its middle, and another linear layer."""

    def __init__(self, middle: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.middle(self.a(x)))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1.0 + 0.045 * x * x)))


def plain_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class Adapter(nn.Module):
    """What PEFT does: a frozen layer, and a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T * 0.5


class Sevenfold(torch.autograd.Function):
    """A sine with a backward that is not a sine's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 7 * x


class Rounded(torch.autograd.Function):
    """Two outputs, one of which has no gradient; and an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return rounded, x * factor

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[1] * 9, None


class Reversed(torch.autograd.Function):
    """Doubles its argument in place, and turns the gradient around."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class InSubmodule(nn.Module):
    """Calls a function where a submodule can stay whole."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class NothingReentrant(Middle):
    """Its first layer has no gradient: none of what goes into the checkpoint has one."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(checkpoint(self.a, x, use_reentrant=True))


class GradientOfALayer(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.c(torch.autograd.grad(self.b(x).sum(), x, create_graph=True)[0])


@torch.library.custom_op("baechi_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


triple.register_autograd(lambda _, gradient: gradient * 30)


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        half = x.tanh() / 2
    return x + half.clone()


def hooked_inside(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    if torch.is_grad_enabled():
        x.register_hook(lambda gradient: gradient * 3)
    return x


def going_back(x: torch.Tensor) -> torch.Tensor:
    (x**2).sum().backward()
    return x


def with_own_saving(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t):
        return x.tanh()


def changed(build: Callable[[Net], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        build(net)
        return net

    return make


def count(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    del args
    module.seen.add_(1)
    return output


def sometimes(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    del args
    return output if module.training is None else None


def counted(net: Net) -> None:
    net.a.register_buffer("seen", torch.zeros(()))
    net.a.register_forward_hook(count)


def adapted(net: Net) -> None:
    net.requires_grad_(False)
    net.a, net.c = Adapter(net.a), Adapter(net.c)


def asking_for_gradients(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]


def written_behind_autograd(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x.data.add_(1)
    return x * x.data


def with_other_data(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x.data = x.data * 2
    return x


class SetsInput(Middle):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.requires_grad_())


class ReturnsLeaf(Middle):
    def forward(self, x: torch.Tensor) -> Any:
        leaf = self.a(x).detach().requires_grad_()
        return self.c(leaf), leaf


class OfWeightData(Net):
    """A weight without its gradient, as some write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.b.weight.data


class OfTypes(Net):
    """Asks for the very types of what it reads, as some ask in place of `isinstance`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds = {type(x), type(self.a.weight), type(self.a)}
        made = type("Made", (), {"factor": 2})
        asked = isinstance(made, type) and issubclass(type(made), type) and not isinstance(x, type)
        known = asked and kinds == {torch.Tensor, nn.Parameter, nn.Linear}
        return super().forward(x) * (made().factor if known else 3)


class InADict(Net):
    """Weights and a buffer in a dict, too, where forward looks for them (as `ncps.torch.LTC`)."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.own = {"weight": self.b.weight, "calls": self.calls, "rows": [self.a.bias]}
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and x.sum().item() > 1e9:
            return x
        self.own["calls"].add_(1)
        (bias,) = self.own["rows"]
        return super().forward(x @ self.own["weight"] + bias) * self.own["calls"]


def attending(x: torch.Tensor) -> torch.Tensor:
    """With a bias that needs a gradient, as T5's does under gradient checkpointing."""
    bias = torch.zeros(12, 12)
    bias.requires_grad = True
    rows = (x.reshape(1, 1, 12, 1) * torch.linspace(0.1, 3, 16)).expand(1, 2, 12, 16)
    found = nn.functional.scaled_dot_product_attention(rows, rows, rows, bias + 0.1)
    return found.sum((0, 1, 3)).reshape(3, 4)


class Normalizes(nn.Module):
    """Moves its running statistics in a checkpoint, whose backward moves them again."""

    def __init__(self, reentrant: bool, reads: bool = False, graded: bool = True) -> None:
        super().__init__()
        self.norm, self.reentrant = nn.BatchNorm1d(4), reentrant
        self.reads, self.graded = reads, graded

    def forward(self, x: torch.Tensor) -> Any:
        if self.reads and x.sum().item() > 1e9:
            return x
        with torch.set_grad_enabled(self.graded):
            return checkpoint(self.norm, x, use_reentrant=self.reentrant)


HONORED: dict[str, Callable[[], nn.Module]] = {
    "forward hook": changed(lambda n: n.a.register_forward_hook(lambda _m, _i, out: out * 2)),
    "forward hook that counts": changed(counted),
    "forward pre hook": changed(lambda n: n.a.register_forward_pre_hook(lambda _, i: (i[0] * 2,))),
    "forward hook of the model": changed(
        lambda n: n.register_forward_hook(lambda _m, _i, out: out * 2)
    ),
    "hook on a parameter": changed(
        lambda n: n.b.weight.register_hook(lambda gradient: gradient * 5)
    ),
    "post-accumulate hook": changed(
        lambda n: n.a.weight.register_post_accumulate_grad_hook(
            lambda p: p.grad.mul_(5).sum() and None
        )
    ),
    "weight norm": changed(lambda n: parametrizations.weight_norm(n.a)),
    "spectral norm": changed(lambda n: parametrizations.spectral_norm(n.a)),
    "orthogonal": changed(lambda n: parametrizations.orthogonal(n.a)),
    "own parametrization": changed(
        lambda n: parametrize.register_parametrization(n.a, "weight", Symmetric())
    ),
    "spectral norm of old": changed(lambda n: nn.utils.spectral_norm(n.a)),
    "pruning": changed(lambda n: prune.l1_unstructured(n.a, "weight", 0.5)),
    "adapters": changed(adapted),
    "checkpointing": lambda: Middle(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)),
    "checkpointing in checkpointing": lambda: Middle(
        lambda x: checkpoint(
            lambda y: checkpoint(torch.tanh, y, use_reentrant=False), x, use_reentrant=False
        )
    ),
    "checkpointing of a batch norm without gradients": lambda: Middle(
        Normalizes(reentrant=False, graded=False)
    ),
    "reentrant checkpointing": lambda: Middle(
        lambda x: checkpoint(torch.tanh, x, use_reentrant=True)
    ),
    "reentrant checkpointing without gradients": NothingReentrant,
    "autograd function": lambda: Middle(Sevenfold.apply),
    "autograd function by keyword": lambda: Middle(lambda x: Sevenfold.apply(x=x)),
    "autograd function without gradients": lambda: Middle(
        lambda x: x + torch.no_grad()(Sevenfold.apply)(x)
    ),
    "autograd function in a checkpoint": lambda: Middle(
        lambda x: checkpoint(Sevenfold.apply, x, use_reentrant=False)
    ),
    "autograd function of several values": lambda: Middle(lambda x: sum(Rounded.apply(x, 3))),
    "autograd function that writes": lambda: Middle(lambda x: Reversed.apply(x * 1)),
    "autograd function in a submodule": lambda: Middle(InSubmodule(Sevenfold.apply)),
    "tensor hook in a submodule": lambda: Middle(InSubmodule(hooked_inside)),
    "custom operator": lambda: Middle(triple),
    "inference mode inside": lambda: Middle(without_gradients),
    "gradient inside": lambda: Middle(
        lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]
    ),
    "gradient inside without a graph": lambda: Middle(
        lambda x: x + torch.autograd.grad((x**3).sum(), x)[0]
    ),
    "gradient of a leaf inside": lambda: Middle(asking_for_gradients),
    "gradient of a mask": lambda: Middle(attending),
    "data of a weight": OfWeightData,
    "types": OfTypes,
    "its tensors in a dict": InADict,
    "its tensors in a dict of a submodule that stays whole": lambda: Middle(InADict(reads=True)),
    "data written": lambda: Middle(written_behind_autograd),
    "data replaced in a submodule": lambda: Middle(InSubmodule(with_other_data)),
    "complex numbers": lambda: Middle(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=4)),
}

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forward hook that returns nothing this time": (
        changed(lambda n: n.a.register_forward_hook(sometimes)),
        r"forward hook sometimes of module 'a' returned nothing",
    ),
    "checkpointing of a batch norm": (
        lambda: Middle(Normalizes(reentrant=False)),
        "forward checkpoints what writes into buffers",
    ),
    "reentrant checkpointing of a batch norm": (
        lambda: Middle(Normalizes(reentrant=True)),
        "forward checkpoints what writes into buffers",
    ),
    "checkpointing of a batch norm in what stays whole": (
        lambda: Middle(Normalizes(reentrant=False, reads=True)),
        "forward checkpoints what writes into buffers",
    ),
    "backward hook": (
        changed(lambda n: n.a.register_full_backward_hook(lambda _m, _i, _o: None)),
        "module 'a' has a backward hook",
    ),
    "backward pre hook of the model": (
        changed(lambda n: n.register_full_backward_pre_hook(lambda _, g: g)),
        "the Net has a backward pre hook",
    ),
    "tensor hook": (lambda: Middle(hooked_inside), "Tensor.register_hook"),
    "data replaced": (lambda: Middle(with_other_data), "Tensor.data = "),
    "input that begins to need a gradient": (
        lambda: SetsInput(torch.tanh),
        "sets requires_grad of its argument 'x'",
    ),
    "output that begins to need a gradient": (
        lambda: ReturnsLeaf(torch.tanh),
        "whose requires_grad it sets itself",
    ),
    "saved tensors": (lambda: Middle(with_own_saving), "saved_tensors_hooks"),
    "lazy module": (lambda: Middle(nn.LazyLinear(4)), "middle.weight.* has no shape"),
    "backward inside": (lambda: Middle(going_back), r"backward\(\)"),
    "gradient of a layer inside": (GradientOfALayer, "as torch.autograd.grad through parameters"),
    "gradient by torch.func": (
        lambda: Middle(torch.func.grad(lambda x: x.sin().sum())),
        "needs a gradient and is no parameter of the model"
        if torch.__version__ >= "2.13"
        else "Expected FakeTensor",
    ),
}

MAPPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": torch.vmap(lambda row: row * row.sum()),
    "gradients": torch.vmap(torch.func.grad(lambda row: (row**3).sum() * row.exp().mean())),
    "random numbers": torch.vmap(lambda row: row * torch.rand_like(row), randomness="different"),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def apply_takes_keywords() -> bool:
    """Whether torch passes them on to an autograd function; 2.11 does not."""
    try:
        Sevenfold.apply(x=torch.ones(()))
    except TypeError:
        return False
    return True


def two_steps(model: nn.Module, x: torch.Tensor) -> list[Any]:
    rows: list[Any] = []
    for _ in range(2):
        output = model(x)
        output.square().mean().backward()
        rows.append(output.detach())
    return [*rows, [p.grad for p in model.parameters()], dict(model.state_dict())]


NEAR_DUPLICATES = {
    *("forward hook of the model", "weight norm", "orthogonal", "spectral norm of old"),
    *("autograd function by keyword", "autograd function without gradients", "data of a weight"),
    *("reentrant checkpointing without gradients", "gradient inside without a graph"),
}


def nightly(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if name in NEAR_DUPLICATES else name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", list(map(nightly, HONORED)))
def test_what_is_honored_equals_the_unsplit_model(name: str) -> None:
    if "keyword" in name and not apply_takes_keywords():
        pytest.skip(f"torch {torch.__version__} itself refuses this")
    model, reference, x = seeded(HONORED[name]), seeded(HONORED[name]), torch.randn(3, 4)
    traced = baechi.trace(model, (x,))
    placed = again_at_random(traced, seed=0, devices=2)
    assert_same_values(two_steps(placed, x), two_steps(reference, x), **EXACT)
    placed.unplace()


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_would_lose_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    with pytest.raises(baechi.TraceError, match=reason):
        baechi.trace(make(), (torch.randn(3, 4),))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == depth
    # What works does so after it, too: saving for the backward was forbidden, or apply replaced.
    assert Sevenfold.apply(torch.ones(2, requires_grad=True)).requires_grad
    if name in ("saved tensors", "tensor hook", "gradient by torch.func"):
        baechi.trace(Middle(Sevenfold.apply), (torch.randn(3, 4),))


@pytest.mark.parametrize("name", MAPPED)
def test_what_vmap_does_is_traced(name: str) -> None:
    model, x = seeded(lambda: Middle(MAPPED[name])), torch.randn(3, 4)
    placed = at_random(copy.deepcopy(model), (x,))
    with one_thread():
        steps = []
        for each in (model, placed):
            torch.manual_seed(1)
            steps.append(step(each, (x,), {}))
    assert not steps[0].differs_from(steps[1])


def test_hooks_on_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda _m, _i, _o: None)
    try:
        with pytest.raises(baechi.TraceError, match="hooks on all modules"):
            baechi.trace(Net(), (torch.randn(3, 4),))
    finally:
        handle.remove()


def test_a_scripted_model_is_refused() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(baechi.TraceError, match="no Python"):
        baechi.trace(scripted, (torch.randn(3, 4),))


def test_a_scripted_submodule_is_refused_by_name() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(baechi.TraceError, match="'middle' comes from torch"):
        baechi.trace(Middle(scripted), (torch.randn(3, 4),))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_a_submodule_that_torch_traced_is_refused_by_name() -> None:
    """Its parameters are in no dict, so nobody could see one that is exchanged."""
    x = torch.randn(3, 4)
    model = Middle(torch.jit.trace(nn.Linear(4, 4), x))
    with pytest.raises(baechi.TraceError, match="'middle' comes from torch"):
        baechi.place(model, ["cpu:0", "cpu:1"], example_args=(x,), costs="estimate")


def test_a_scripted_function_that_ran_before_keeps_its_gradient() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        gelu = torch.jit.script(tanh_gelu)
    model, x = seeded(lambda: Middle(gelu)), torch.randn(3, 4)
    for _ in range(3):  # then torch differentiates it as a whole
        model(x).sum().backward()
    wanted = [parameter.grad / 3 for parameter in model.parameters()]
    model.zero_grad()
    placed = at_random(model, (x,))
    assert placed.traced.rung == "torch.export (non-strict)"
    placed(x).sum().backward()
    got = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(got, wanted)
    y = placed(x)
    torch.testing.assert_close(y, placed.unplace()(x))


def test_a_scripted_function_that_casts_by_rules_of_its_own_is_not_traced() -> None:
    """Under autocast TorchScript multiplies in float32, and the function that it is made of not."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        gelu, relu = torch.jit.script(tanh_gelu), torch.jit.script(plain_relu)
    x = torch.randn(3, 4)
    with one_thread(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(baechi.TraceError, match=r"tanh_gelu of .* casts otherwise"):
            baechi.trace(Middle(gelu), (x,))
        for model, rung in (
            (nn.Sequential(Middle(gelu), nn.Linear(4, 64)), "module granularity, opaque leaves"),
            (Middle(relu), "torch.export (non-strict)"),
        ):
            placed = at_random(model, (x,))
            assert placed.traced.rung == rung
            assert torch.equal(placed(x), model(x))


def test_hooks_that_transformers_leaves_behind_are_traced() -> None:
    model, args, kwargs = zoo.MODELS["llama"]()
    hidden = model(*args, **kwargs, output_hidden_states=True).hidden_states
    assert any(module._forward_hooks for module in model.modules())
    with torch_threads(1):
        placed = at_random(model, args, kwargs)
        torch.testing.assert_close(
            placed(*args, **kwargs).logits, copy.deepcopy(model)(*args).logits, **EXACT
        )
        asked = {**kwargs, "output_hidden_states": True}
        more = at_random(model, args, asked)(*args, **asked).hidden_states
        torch.testing.assert_close(more, hidden, **EXACT)


def test_other_threads_go_on_training_while_a_model_is_traced() -> None:
    found: list[torch.Tensor] = []

    def train() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda gradient: gradient * 2)
        Sevenfold.apply(x).sum().backward()
        found.append(x.grad)

    def beside(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        return x * 2

    baechi.trace(Middle(beside), (torch.randn(3, 4),))
    assert torch.equal(found[0], torch.full((2,), 14.0))


def test_tracing_leaves_hooks_as_they_were() -> None:
    model = Net()
    own = model.a.register_forward_hook(lambda _m, _i, output: output)
    before = dict(model.a._forward_hooks)
    baechi.trace(model, (torch.randn(3, 4),))
    assert dict(model.a._forward_hooks) == before
    own.remove()


def test_what_comes_after_placing_is_traced_anew_or_refused() -> None:
    x, model = torch.randn(3, 4), seeded(Net)
    placed = lazily(model)
    torch.testing.assert_close(placed(x), copy.deepcopy(model)(x), **EXACT)
    handle = model.a.register_forward_hook(lambda _m, _i, output: output * 2)
    torch.testing.assert_close(placed(x), copy.deepcopy(model)(x), **EXACT)
    handle.remove()
    torch.testing.assert_close(placed(x), copy.deepcopy(model)(x), **EXACT)
    model.b = nn.Linear(4, 4)
    torch.testing.assert_close(placed(x), copy.deepcopy(model)(x), **EXACT)
    everywhere = nn.modules.module.register_module_forward_hook(lambda _m, _i, _o: None)
    with pytest.raises(baechi.TraceError, match="hooks on all modules"):
        placed(x)
    everywhere.remove()
    model.c.register_full_backward_hook(lambda _m, _i, _o: None)
    with pytest.raises(baechi.TraceError, match="module 'c'"):
        placed(x)
    model.c._backward_hooks.clear()
    placed.unplace()


class Leaves(nn.Module):
    """Trains buffers: one that two operators read, one of a submodule that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), Whole()
        self.register_buffer("scale", torch.ones(4, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x) * self.scale) + self.scale.tanh()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(4, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift if x.sum().item() > -(10**9) else x


@pytest.mark.parametrize("devices", [1, 3])
def test_buffers_that_need_a_gradient_get_it(devices: int) -> None:
    torch.manual_seed(0)
    model, x = Leaves(), torch.randn(3, 4)
    tensors = [*model.parameters(), *model.buffers()]
    expected = torch.autograd.grad(model(x).square().sum(), tensors)
    placed = at_random(model, (x,), devices=devices)
    placed(x).square().sum().backward()
    for tensor, gradient in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


class Prompted(nn.Module):
    """Trains a tensor that it keeps in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = torch.zeros(4, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.prompt


def test_what_is_trained_in_a_plain_attribute_is_refused_where_it_is_read() -> None:
    model = Prompted()
    with pytest.raises(baechi.TraceError, match="gradient would be lost"):
        baechi.trace(model, (torch.ones(1, 4),))
    unread = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    unread[1].prompt = torch.zeros(4, requires_grad=True)
    assert baechi.trace(unread, (torch.ones(1, 4),)).ops


class ByProducts(nn.Module):
    """Attention by the kernel that it names, which rounds otherwise than that of a CPU."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            y = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.3)
        return y + nn.functional.scaled_dot_product_attention(x, x, x)


def test_the_kernels_of_attention_that_forward_chooses_are_taken() -> None:
    model = ByProducts()
    masks = torch.rand(16, 16) < 0.5, torch.randn(16, 16)
    for mask in masks:
        x = torch.randn(2, 4, 16, 8)
        graph = baechi.trace(model, (x, mask)).module.graph_module
        with torch.no_grad():
            wanted = model(x, mask)
            assert torch.equal(graph(x, mask)[0], wanted)
            with sdpa_kernel(SDPBackend.MATH):
                assert not torch.equal(model(x, mask), wanted)
