"""What a graph does to memory is the same whether every node is run or every different one."""

import pytest
import torch
from steps import case
from torch import fx, nn

import baechi
from baechi.tracing import alias_analysis
from baechi.tracing.alias_analysis import Facts, propagate
from baechi.tracing.lowering import TracedModule

DEEP = ("gpt2", "bert", "llama", "t5", "clip", "vit", "nn_transformer")  # of two layers
KEEPING_FORMS = (
    *(*DEEP, "lstm_lm", "towers", "integers_and_booleans"),
    *("keyword_arguments", "nested_outputs", "plain_dataclass", "inputs_as_outputs"),
    *("parameter_twice", "tied", "dropouts", "recurrent", "detached"),
)


def facts_of(module: TracedModule, monkeypatch: pytest.MonkeyPatch) -> tuple[Facts, int]:
    """The facts of a traced model, and how many nodes were run for them."""
    ran: list[fx.Node] = []

    def run_node(self: fx.Interpreter, node: fx.Node) -> object:
        ran.append(node)
        return own(self, node)

    own = fx.Interpreter.run_node
    with monkeypatch.context() as context:
        context.setattr(fx.Interpreter, "run_node", run_node)
        facts = propagate(module.graph_module, module.call.tensors)
    return facts, sum(node.op == "call_function" for node in ran)


@pytest.mark.parametrize("name", KEEPING_FORMS)
def test_facts_are_those_of_running_every_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = case(name).traced.module
    found, few = facts_of(module, monkeypatch)
    monkeypatch.setattr(alias_analysis, "_keeps_forms", lambda _: False)
    expected, all_of_them = facts_of(module, monkeypatch)
    assert list(found.nodes.items()) == list(expected.nodes.items())
    assert found.storages == expected.storages
    assert not found.real
    assert few < all_of_them if name in DEEP else few <= all_of_them


class Block(nn.Module):
    """Views, several results, a region without gradients, and one value read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        with torch.no_grad():
            scale = gate.transpose(0, 1).contiguous().mean()
        y = nn.functional.dropout(gate * value.sigmoid(), 0.1)
        return x + self.down(y * y).unflatten(-1, (2, 4)).flatten(-2) * scale


def stack_of(layers: int) -> TracedModule:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    return baechi.trace(model, (torch.randn(4, 8, requires_grad=True),)).module


def test_of_equal_layers_the_first_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    two, six = (facts_of(stack_of(layers), monkeypatch)[1] for layers in (2, 6))
    regions = 4  # without gradients: these are graphs of their own, and are run
    assert six == two + regions


def test_equal_layers_have_facts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stack_of(4)
    found, _ = facts_of(module, monkeypatch)
    monkeypatch.setattr(alias_analysis, "_keeps_forms", lambda _: False)
    expected, _ = facts_of(module, monkeypatch)
    assert found == expected


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
