"""Hooks that return nothing see in every call what they see on the unsplit model."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import placed
import pytest
import torch
from placed import at_random
from torch import nn
from torch.utils import _pytree as pytree

import baechi
from baechi.runtime import torch_compile
from baechi.tracing.observers import observes

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 32).reshape(4, 8)
SEEN: list[Any] = []
OUTSIDE: list[torch.Tensor] = []


@dataclasses.dataclass
class Rows:
    rows: torch.Tensor
    names: list[str]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Rows:
        left, right = self.a(x), self.b(x)  # two branches
        return Rows(x + self.act(left) * right * scale, ["rows"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.drop = nn.ModuleList([Block(), Block()]), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5).rows
        with torch.no_grad():
            self.blocks[0].b(x)
        return self.drop(x).square()


def frozen(value: Any) -> list[Any]:
    """What a hook sees, as it is now."""
    leaves = pytree.tree_leaves([value.rows, value.names] if isinstance(value, Rows) else value)
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def watch(model: nn.Module, seen: list[Any]) -> None:
    """Observe all modules in all ways, and gradients of some outputs."""

    def graded(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        del module, args
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(("gradient", gradient.clone())))
            output.retain_grad()
            seen.append(output)

    def named(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        assert not args[0].is_meta
        seen.append((name, module.training, *frozen((args, kwargs)), *frozen(output)))

    for name, module in model.named_modules():
        module.register_forward_hook(partial(named, name), with_kwargs=True, always_call=True)
        module.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach().clone()))
    model.blocks[0].a.register_forward_hook(graded)


def comparable(seen: list[Any]) -> list[Any]:
    rows = [
        (r.detach(), r.grad) if isinstance(r, torch.Tensor) and r.requires_grad else r for r in seen
    ]
    return [
        leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(rows)
    ]


def step(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    output = model(X)
    output.sum().backward()
    gradients = [p.grad.tolist() for p in model.parameters()]
    model.zero_grad()
    return [output.tolist(), *gradients]


def test_what_hooks_see_is_what_they_see_on_the_unsplit_model() -> None:
    model, seen = Net(), ([], [])
    unsplit = copy.deepcopy(model)
    watch(unsplit, seen[0])
    watch(model, seen[1])
    module = at_random(model, (X,), devices=3)
    assert len({*module.placement.devices}) > 1
    assert not seen[1], "they do not run when the model is traced"
    for _ in range(2):
        expected, found = step(unsplit), step(module)
        assert len(seen[0]) > 20
        assert comparable(seen[1]) == comparable(seen[0])
        assert found == expected
        seen[0].clear(), seen[1].clear()
    module.measure(1)
    assert not seen[1]
    for one in (unsplit, module):
        torch.manual_seed(1)
        with torch.no_grad():
            one(X)
    assert comparable(seen[1]) == comparable(seen[0])


def test_a_hook_comes_and_goes_after_placing() -> None:
    model, seen = Net(), []
    module = placed.lazily(model, placer="round-robin", training=False, verify=True)
    handle = model.blocks[1].b.register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    module(X)
    assert seen == [(4, 8)]
    handle.remove()
    module(X)
    assert len(seen) == 1


def test_hooks_that_come_anew_for_each_call_have_one_plan() -> None:
    model = Net()
    unsplit = copy.deepcopy(model)
    module = placed.lazily(model)
    for _ in range(3):
        kept: list[list[torch.Tensor]] = []
        for each in (unsplit, module):
            seen: list[torch.Tensor] = []

            def note(_m: Any, _a: Any, out: Any, seen: list[torch.Tensor] = seen) -> None:
                seen.append(out.detach().clone())

            block = each.blocks[1]
            handles = [block.b.register_forward_hook(note), block.a.register_forward_hook(note)]
            each(X)
            for handle in handles:
                handle.remove()
            kept.append(seen)
        assert len(kept[0]) == 2
        assert all(map(torch.equal, *kept))
    assert len(module._specializations) == 1


def test_a_hook_that_removes_itself_runs_once_and_the_next_runs_as_before() -> None:
    model = Net()
    unsplit = copy.deepcopy(model)
    module = placed.lazily(model)
    for _ in range(2):
        kept: list[list[str]] = []
        for each in (unsplit, module):
            seen: list[str] = []
            handles: list[Any] = []

            def once(*_: Any, seen: list[str] = seen, handles: list[Any] = handles) -> None:
                seen.append("once")
                handles[0].remove()

            def note(*_: Any, seen: list[str] = seen) -> None:
                seen.append("note")

            handles += [each.blocks[1].b.register_forward_hook(hook) for hook in (once, note)]
            each(X)
            handles[1].remove()
            kept.append(seen)
        assert kept[0] == kept[1] == ["once", "note"]


def test_a_loss_on_what_a_hook_kept_is_refused() -> None:
    model, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), []
    model[2].register_forward_hook(lambda _m, _a, out: seen.append(out))
    module = placed.lazily(model)
    y = module(X)
    with pytest.raises(RuntimeError, match="a tensor that a hook kept of a placed model"):
        (y.sum() + seen[0].square().sum()).backward()


def test_what_runs_again_is_observed_once_and_without_a_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    seen: list[Any] = []
    model[1][0].register_forward_hook(lambda _m, _a, out: seen.append(out))
    module = placed.lazily(model, placer="single", checkpoint=["1"])
    module(X).sum().backward()
    assert len(seen) == 1
    assert not seen[0].requires_grad


def writes(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    del module, args
    output.mul_(2)


def replaces(module: nn.Module, args: Any) -> None:
    module.weight = nn.Parameter(module.weight * args[0].shape[1])


def returns(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    SEEN.append(output)
    found = {}.get  # what it calls may return something
    return found(module, args)


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (lambda m: m.register_forward_hook(writes), "hook writes of module '0' changes what it"),
        (lambda m: m.register_forward_pre_hook(replaces), "pre hook replaces .* changes what"),
        (
            lambda m: m.register_forward_hook(lambda m, _a, _o: SEEN.count(m)),
            "returned something",
        ),
    ],
)
def test_who_does_more_than_observe_is_named(register: Callable[..., Any], text: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    register(model[0])
    module = at_random(model, (X,))
    with pytest.raises(baechi.ExecutionError, match=text):
        module(X)


class Remembers(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.a, self.reads = nn.Linear(8, 8), reads
        self.scale, self.notes = 1.0, {}
        self.a.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        del module, args
        self.scale, self.notes["a"] = 2.0, output.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.scale if self.reads else self.a(x)


def test_forward_must_not_read_what_an_observer_sets() -> None:
    module = placed.lazily(Remembers(reads=False), placer="single", training=False)
    for _ in range(2):
        assert torch.equal(module(X), module.notes["a"])
    assert len(module._specializations) == 1
    module = placed.lazily(Remembers(reads=True), placer="single", training=False)
    with pytest.raises(baechi.ExecutionError, match="sets 'scale', which forward reads"):
        module(X)


class ReadsOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.a.register_forward_hook(lambda _m, _a, out: OUTSIDE.append(out.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return x + OUTSIDE[0] if OUTSIDE else x


def test_forward_must_not_read_what_an_observer_puts_into_a_global() -> None:
    OUTSIDE.clear()
    module = at_random(ReadsOutside(), (X,))
    with pytest.raises(baechi.ExecutionError, match="sets 'OUTSIDE', which forward reads"):
        module(X)


class Features(nn.Module):
    """Reads what a hook keeps where no attribute of a module is set: in a closure."""

    def __init__(self, *, returns: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)
        kept = {"a": torch.zeros(4, 8)} if in_place else {}
        self.kept = lambda: kept["a"]

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            del module, args
            if in_place:
                kept["a"].copy_(output.detach())
            else:
                kept["a"] = output

        def keep_and_return(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            keep(module, args, output)
            return output

        self.a.register_forward_hook(keep_and_return if returns else keep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).sum() + self.kept().sum()


@pytest.mark.parametrize("in_place", [False, True])
def test_forward_must_not_read_what_an_observer_keeps_anywhere(in_place: bool) -> None:
    model = Features(in_place=in_place)
    with torch.no_grad():
        model(X)
    module = at_random(model, (X,))
    for _ in range(2):
        with pytest.raises(baechi.ExecutionError, match="keeps a tensor that forward reads"):
            module(2 * X)


def test_an_observer_may_note_more_and_more_beside_what_forward_reads() -> None:
    factor, notes = torch.full((8,), 2.0), [float(k) for k in range(900)]

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        del module, args, output
        notes.extend(float(len(notes) + k) / 7 for k in range(int(factor[0])))

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * factor

    model = Scaled(8, 8)
    expected = copy.deepcopy(model)(X)
    model.register_forward_hook(note)
    module = at_random(model, (X,))
    for _ in range(100):
        assert torch.equal(module(X), expected)
    assert len(notes) >= 1_100


def test_who_reads_what_no_hook_kept_yet_is_told_to_return_it() -> None:
    with pytest.raises(baechi.TraceError, match="end with `return output`: then it is traced"):
        baechi.trace(Features(), (X,))
    model = Features(returns=True)
    expected = copy.deepcopy(model)(X)
    assert torch.equal(at_random(model, (X,))(X), expected)


def test_a_segment_that_is_observed_is_not_compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].register_forward_hook(writes)
    nodes = at_random(model, (X,)).traced.module.graph_module.graph.nodes
    options = torch_compile.compile_options({"backend": "eager"}, [torch.device("cpu")])
    assert options is not None
    with pytest.warns(UserWarning, match="runs uncompiled: it runs the forward hook writes of"):
        torch_compile.CompiledTape(step, step, options, list(nodes), "a segment", dynamic=False)


def test_an_observed_model_may_get_a_copy_of_a_parametrized_part() -> None:
    last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), last)
    model[0].register_forward_hook(lambda *seen: SEEN.append(seen))
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    options = {"costs": "estimate", "progress": False, "placer": "round-robin", "guard": False}
    module = baechi.place(model, devices, **options)
    module(X)
    model[2] = copy.deepcopy(model[2])
    expected = copy.deepcopy(model)(X)
    for _ in range(2):
        assert torch.equal(module(X), expected)


class Caller:
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        SEEN.append((module, args, output))

    def method(self, module: nn.Module, args: Any) -> None:
        SEEN.append((module, args))


@torch.no_grad()
def decorated(module: nn.Module, args: Any, output: Any) -> None:
    SEEN.append((module, args, output))


def early(module: nn.Module, args: Any, output: Any) -> None:
    if module.training:
        return
    SEEN.append((args, output))


def transforms(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    if output is not None:
        return output * 2
    return None


LOG = logging.getLogger(__name__)
ROWS: dict[str, list[Any]] = {"a": []}
OBSERVING = [
    *(Caller(), Caller().method, decorated, early, partial(early, None)),
    *(lambda m, a, o: SEEN.append((m, a, o)), lambda m, a, o: print(a, m, o)),  # noqa: T201,
    *(lambda m, a, o: decorated(m, (a, 1), o), lambda _m, _a, o: o.retain_grad()),
    *(lambda _m, _a, o: LOG.info("%s", o), lambda m, a, o, rows=SEEN: rows.append((m, a, o))),
    *(lambda _m, _a, o: ROWS["a"].append(o), lambda m, _a, o: setattr(m, "kept", o)),
    *(lambda _m, _a, _o: None, lambda m, _a, o: logging.info("%s %s", m, o)),
]
TRACED = [
    *(transforms, returns, torch.relu, partial(transforms, None)),
    *(lambda m, _a, o: o if m.training else None, lambda _m, _a, o: SEEN.append(o) or o),
    *(lambda _m, _a, o: o * 2, lambda _m, _a, o: torch.tanh(o), lambda _m, _a, o: o.clone()),
    *(
        lambda m, a, o: transforms(m, a, o + 1),
        lambda m, a: (m(a),),
        lambda _m, _a, o: nn.ReLU()(o),
    ),
]


@pytest.mark.parametrize("hook", OBSERVING)
def test_code_that_returns_nothing_observes(hook: Any) -> None:
    assert observes(hook)


@pytest.mark.parametrize("hook", TRACED)
def test_code_that_may_return_something_is_traced(hook: Any) -> None:
    assert not observes(hook)
