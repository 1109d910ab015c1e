"""What a graph does to memory is the same whether every node is run or every different one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from seeds import some
from steps import case
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import baechi
from baechi.torch_support.symbolic_sizes import Symbols
from baechi.tracing import alias_analysis
from baechi.tracing.alias_analysis import propagate
from baechi.tracing.calling_convention import Call, canonical_call
from baechi.tracing.effect_recorder import EffectRecorder
from baechi.tracing.ladder import trace
from baechi.tracing.lowering import TracedModule
from baechi.tracing.node_facts import Facts

DEEP = ("gpt2", "bert", "llama", "t5", "clip", "vit", "nn_transformer")  # of two layers
KEEPING_FORMS = (
    *(*DEEP, "lstm_lm", "towers", "integers_and_booleans"),
    *("keyword_arguments", "nested_outputs", "plain_dataclass", "inputs_as_outputs"),
    *("parameter_twice", "tied", "dropouts", "recurrent", "detached"),
)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Node]]:
    """The operators that are run on fake tensors inside."""
    ran: list[fx.Node] = []
    own = fx.Interpreter.run_node

    def run_node(self: fx.Interpreter, node: fx.Node) -> object:
        if node.op == "call_function" and isinstance(self, EffectRecorder):
            ran.append(node)
        return own(self, node)

    with monkeypatch.context() as context:
        context.setattr(fx.Interpreter, "run_node", run_node)
        yield ran


def facts_of(module: TracedModule) -> Facts:
    return propagate(module.graph_module, module.call.tensors)


@pytest.mark.parametrize("name", KEEPING_FORMS)
def test_facts_are_those_of_running_every_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case(name).traced.module
    with counted(monkeypatch) as few:
        found = facts_of(module)
    monkeypatch.setattr(alias_analysis, "_keeps_forms", lambda _: False)
    with counted(monkeypatch) as every:
        expected = facts_of(module)
    assert list(found.nodes.items()) == list(expected.nodes.items())
    assert found.storages == expected.storages
    assert not found.real
    assert len(few) < len(every) if name in DEEP else len(few) <= len(every)


def sizes_of(call: Call) -> frozenset[tuple[int, int]]:
    """The batch, and the length of what is no image."""
    rows = enumerate(call.tensors)
    dims = ((i, t, dim) for i, t in rows for dim in range(1 if t.is_floating_point() else t.dim()))
    return frozenset((i, dim) for i, t, dim in dims if t.shape[dim] > 1)


def symbolic(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a family says of its sizes: conditions, and the facts at two of its sizes, as text."""
    found: list[Any] = []
    own = Symbols.conditions

    def conditions(symbols: Symbols, known: Any) -> list[Any]:
        found.append(own(symbols, known))
        return list(found[-1])

    model, args, kwargs = zoo.MODELS[name]()
    places = sizes_of(canonical_call(model, args, kwargs))
    with monkeypatch.context() as context:
        context.setattr(Symbols, "conditions", conditions)
        family = trace(model, args, kwargs, places=places).module.family
    assert family is not None
    for sizes in (family.traced_at, tuple(size + 1 for size in family.traced_at)):
        facts = family.facts(sizes)
        found.append([(node.name, fact) for node, fact in facts.nodes.items()])
        found.append([(str(row.node), row.nbytes, row.attribute) for row in facts.storages])
    return family.symbols, str(found)


@pytest.mark.parametrize("name", some(["llama", "bert", "clip", "gpt2"], 4))
def test_so_are_those_of_a_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = symbolic(name, monkeypatch)
    monkeypatch.setattr(alias_analysis, "_keeps_forms", lambda _: False)
    assert found == symbolic(name, monkeypatch)


class Block(nn.Module):
    """Views, several results, a block without gradients, and one value read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        with torch.no_grad():
            scale = gate.transpose(0, 1).contiguous().mean()
        y = nn.functional.dropout(gate * value.sigmoid(), 0.1)
        return x + self.down(y * y).unflatten(-1, (2, 4)).flatten(-2) * scale


def stack_of(layers: int, *places: tuple[int, int]) -> TracedModule:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    example = (torch.randn(4, 8, requires_grad=True),)
    module: TracedModule = trace(model, example, places=frozenset(places)).module
    return module


@pytest.mark.parametrize("places", [(), ((0, 0),)], ids=["one size", "any size"])
def test_of_equal_layers_the_first_is_run(
    places: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch) as two:
        stack_of(2, *places)
    with counted(monkeypatch) as six:
        stack_of(6, *places)
    assert len(six) == len(two)


def test_equal_layers_have_facts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stack_of(4)
    found = facts_of(module)
    monkeypatch.setattr(alias_analysis, "_keeps_forms", lambda _: False)
    assert found == facts_of(module)


class Filled(nn.Module):
    """The second tensor needs a gradient from when it is written into, the first never does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = torch.zeros_like(x), torch.zeros_like(x)
        first = one * 2
        two[0] = self.weight
        return first + two * 2


def test_a_write_may_let_a_value_need_a_gradient() -> None:
    traced = baechi.trace(Filled(), (torch.randn(2, 3),))
    facts = traced.module.facts.nodes
    graded = {n.name: f.values[0].requires_grad for n, f in facts.items() if "mul" in n.name}
    assert graded == {"mul": False, "mul_1": True}


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = x.clone(), x.clone()
        rows = two[0]
        first = one * 2
        two.t_()
        return first, two * 2, rows * 2


def test_a_tensor_may_be_turned_in_place() -> None:
    traced = baechi.trace(Turned(), (torch.ones(2, 3, dtype=torch.int64),))
    facts = traced.module.facts.nodes
    shapes = {n.name: f.values[0].shape for n, f in facts.items() if "mul" in n.name}
    assert shapes == {"mul": (2, 3), "mul_1": (3, 2), "mul_2": (3,)}


def test_torch_still_keeps_a_norm_turned() -> None:
    """If this fails, torch is mended: `EffectRecorder.call_function` need not turn it back."""
    x, norm = torch.randn(2, 5, 3).mT, torch.nn.BatchNorm1d(3)
    assert norm(x).is_contiguous()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert norm(mode.from_tensor(x)).stride() == x.stride()
