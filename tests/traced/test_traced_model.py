"""The graph of a training step mirrors the forward graph."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from steps import case
from torch import nn

import baechi
from baechi.traced.step_structure import BACKWARD, LOSS


def traced_of(name: str) -> baechi.Traced:
    return case(name).traced


def costs_of(traced: baechi.Traced) -> baechi.Profile:
    costs = tuple(
        baechi.OpCost(100 + i, 200 + i, workspace_bytes=i) for i in range(len(traced.ops))
    )
    return baechi.Profile(traced.digest, "cpu", costs)


def training_graph(name: str, optimizer: str | None = None) -> baechi.OpGraph:
    traced = traced_of(name)
    return traced.graph(costs_of(traced), training=True, optimizer=optimizer)


def test_the_inference_graph_is_the_forward_alone() -> None:
    traced = traced_of("gpt2")
    graph = traced.graph(costs_of(traced), training=False)
    assert [op.name for op in graph.ops] == [op.name for op in traced.ops]
    assert [op.time_ns for op in graph.ops] == [100 + i for i in range(len(traced.ops))]
    bytes_of_model = sum(op.trained_bytes + op.frozen_bytes for op in traced.ops)
    assert sum(op.persistent_bytes for op in graph.ops) == bytes_of_model


@pytest.mark.parametrize("checkpoint", [None, "transformer.h.*"])
def test_launches_are_those_of_the_forwards_and_backwards(checkpoint: str | None) -> None:
    traced = traced_of("gpt2")
    rows = [
        replace(cost, forward_launch_ns=10 + i, backward_launch_ns=20 + i)
        for i, cost in enumerate(costs_of(traced).costs)
    ]
    profile = replace(costs_of(traced), costs=tuple(rows))
    other = replace(
        profile, kind="slow", costs=tuple(replace(row, backward_launch_ns=5) for row in rows)
    )
    graph = traced.graph([other, profile], checkpoint=checkpoint)
    for index, op in enumerate(graph.ops):
        expected = {
            "forward": 10 + index,
            "loss": 0,
            "backward": 20 + sum(op.forward),
            "recompute": sum(10 + own for own in op.forward),
        }
        assert op.launch_ns == expected[op.phase]
    # Of a profile without launches the graph is what it was.
    plain = traced.graph(costs_of(traced), checkpoint=checkpoint)
    assert all(op.launch_ns == 0 for op in plain.ops)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet_train", "clip"])
def test_every_backward_is_with_its_forward(name: str) -> None:
    graph = training_graph(name)
    by_name = {op.name: op for op in graph.ops}
    backwards = [op for op in graph.ops if op.name.startswith(BACKWARD)]
    assert backwards
    for op in backwards:
        forward = by_name[op.name.removeprefix(BACKWARD)]
        assert op.group == forward.group is not None


@pytest.mark.parametrize(
    "options", [{}, {"training": False}, {"checkpoint": "transformer.h.*"}], ids=str
)
def test_the_structure_is_the_graph_without_costs(options: dict[str, Any]) -> None:
    traced = traced_of("gpt2")
    structure = traced.structure(**options)
    graph = traced.graph(costs_of(traced), **options)
    for one, other in zip(structure.ops, graph.ops, strict=True):
        assert (one.name, one.group) == (other.name, other.group)
        assert (one.phase, one.forward) == (other.phase, other.forward)
    edges = [[(t.producer, t.consumers, t.kept) for t in s.tensors] for s in (structure, graph)]
    assert edges[0] == edges[1]
    assert (structure.twins, structure.units) == (graph.twins, graph.units)
    assert bool(structure.units) == ("checkpoint" in options)


def test_the_models_own_loss_reads_no_other_output() -> None:
    traced, graph = traced_of("gpt2"), training_graph("gpt2")
    loss = graph.op_index[LOSS]
    others = [t for t in traced.tensors if t.kept and t.differentiable and not t.scalar]
    assert others
    read = {t.producer: t.nbytes for t in graph.tensors if loss in t.consumers}
    assert {read[t.producer] for t in others} == {0}
    assert sum(read.values()) == 4  # the loss itself


def test_gradients_mirror_the_tensors_that_have_them() -> None:
    traced = traced_of("gpt2")
    graph = training_graph("gpt2")
    index = {op.name: i for i, op in enumerate(graph.ops)}
    twins = {i: index[BACKWARD + traced.ops[i].name] for i in traced.backward_ops}
    edges = {(t.producer, c, t.nbytes) for t in graph.tensors for c in t.consumers}
    mirrored = 0
    for tensor in traced.tensors:
        for consumer in tensor.consumers:
            if tensor.differentiable and consumer in twins:
                assert (twins[consumer], twins[tensor.producer], tensor.nbytes) in edges
                mirrored += 1
    assert mirrored > 20


def test_the_loss_stands_between_outputs_and_their_gradients() -> None:
    graph = training_graph("vit")
    loss = next(i for i, op in enumerate(graph.ops) if op.name == LOSS)
    assert graph.ops[loss].time_ns == 0
    read = [graph.tensors[t] for t in graph.op_inputs[loss]]
    made = [graph.tensors[t] for t in graph.op_outputs[loss]]
    assert read
    assert all(tensor.kept for tensor in read)
    assert sorted(t.nbytes for t in read) == sorted(t.nbytes for t in made)
    assert graph.ops[loss].group in {graph.ops[t.producer].group for t in read}


@pytest.mark.parametrize(
    ("optimizer", "factor", "scalars"),
    [(None, 2, 0), ("sgd", 2, 0), ("momentum", 3, 0), ("adam", 4, 1), ("AdamW+amsgrad", 5, 1)],
)
def test_persistent_bytes_are_parameters_gradients_and_state(
    optimizer: str | None, factor: int, scalars: int
) -> None:
    traced = traced_of("gpt2")
    graph = training_graph("gpt2", optimizer)
    trained = sum(op.trained_bytes for op in traced.ops)
    frozen = sum(op.frozen_bytes for op in traced.ops)
    count = sum(len(op.trained) for op in traced.ops)
    persistent = sum(op.persistent_bytes for op in graph.ops if op.phase == "forward")
    assert persistent == factor * trained + 4 * scalars * count + frozen


def test_gradients_come_with_the_backward() -> None:
    traced = traced_of("gpt2")
    graph = training_graph("gpt2")
    late = {op.name: op.late_bytes for op in graph.ops if op.late_bytes}
    assert all(name.startswith(BACKWARD) for name in late)
    assert sum(late.values()) == sum(op.trained_bytes for op in traced.ops)
    # The gradient of the tied embedding comes with the first backward of its readers, the head's.
    tied = sum(op.shared_bytes for op in traced.ops)
    (head,) = (name for name in late if name.startswith(f"{BACKWARD}lm_head/"))
    assert late[head] == tied > 0


class Twice(nn.Module):
    """One layer on two inputs, neither of which waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.layer(left) + self.layer(right)


def test_a_gradient_that_either_of_two_backwards_may_begin_is_there_for_the_whole_step() -> None:
    traced = baechi.trace(Twice(), (torch.randn(2, 3), torch.randn(2, 3)))
    graph = traced.graph(costs_of(traced))
    assert sum(op.persistent_bytes for op in graph.ops) == 2 * 12 * 4
    assert not any(op.late_bytes for op in graph.ops)


def test_where_the_model_returns_a_loss_that_alone_has_a_gradient_from_the_caller() -> None:
    traced = baechi.trace(zoo.OwnLoss(), (torch.randn(64, 8), torch.arange(64)))
    graph = traced.graph(costs_of(traced))
    loss = graph.op_index[LOSS]
    sent = {graph.ops[t.consumers[0]].name: t.nbytes for t in graph.tensors if t.producer == loss}
    assert sorted(sent.values()) == [0, 4]
    assert sent[f"{BACKWARD}cross_entropy_loss"] == 4


def test_a_trace_of_an_older_file_has_as_much_state_as_vectors_would() -> None:
    traced = traced_of("towers")
    old = replace(traced, ops=tuple(replace(op, trained=()) for op in traced.ops))
    new, before = (t.graph(costs_of(t), optimizer="adamw") for t in (traced, old))
    for now, then in zip(new.ops, before.ops, strict=True):
        assert now.persistent_bytes - 8 <= then.persistent_bytes <= now.persistent_bytes


def test_a_frozen_branch_has_no_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    traced = baechi.trace(model, (torch.randn(2, 4),))
    graph = traced.graph(costs_of(traced), training=True)
    backwards = [op.name for op in graph.ops if op.name.startswith(BACKWARD)]
    assert len(backwards) == 1
    assert backwards[0].startswith(BACKWARD + "2/")


def test_what_is_saved_lives_until_its_backward() -> None:
    traced = traced_of("gpt2")
    graph = training_graph("gpt2")
    index = {op.name: i for i, op in enumerate(graph.ops)}
    for op in traced.backward_ops:
        twin = index[BACKWARD + traced.ops[op].name]
        consumed = {graph.tensors[t] for t in graph.op_inputs[twin]}
        for tensor in traced.ops[op].saves:
            kept = traced.tensors[tensor]
            assert any(t.producer == kept.producer and t.nbytes == kept.nbytes for t in consumed)


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(baechi.InputError, match="another model"):
        traced_of("gpt2").graph(costs_of(traced_of("bert")))


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(baechi.InputError, match=r"'lion'.*adamw"):
        training_graph("gpt2", "lion")


def test_gradients_of_a_tied_parameter_have_room_until_they_are_added_up() -> None:
    traced = traced_of("gpt2")
    graph = training_graph("gpt2")
    tied = [op for op in traced.ops if op.shared_bytes]
    assert [op.parameters for op in tied] == [("transformer.wte.weight",)]
    assert tied[0].shared_bytes == tied[0].trained_bytes
    (backward,) = [op for op in graph.ops if op.name == BACKWARD + tied[0].name]
    assert backward.workspace_bytes >= 2 * tied[0].shared_bytes


def test_gradients_through_views_of_parameters_and_of_inputs_are_ordered_by_the_graph() -> None:
    """What is a view of a parameter, or of the caller's tensor, goes backward after its readers."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned, rows = self.weight.t(), x.view(-1, 4)
            return (rows @ turned).tanh() @ turned + rows

    traced = baechi.trace(Views(), (torch.randn(2, 1, 4, requires_grad=True),))
    graph = traced.graph(costs_of(traced), training=True)
    index = {op.name: i for i, op in enumerate(graph.ops)}
    back = {i: index.get(BACKWARD + op.name) for i, op in enumerate(traced.ops)}
    by_node = {node: i for i, op in enumerate(traced.ops) for node in op.nodes}
    module = traced.module
    edges = {(t.producer, c) for t in graph.tensors for c in t.consumers}
    found = 0
    for node, op in by_node.items():
        fx_node = next(n for n in module.graph_module.graph.nodes if n.name == node)
        if fx_node.op in ("placeholder", "get_attr"):
            continue
        if not any(value.requires_grad for value in module.facts.nodes[fx_node].values):
            continue
        for user in fx_node.users:
            ends = op, by_node.get(user.name)
            if ends[1] is not None and ends[0] != ends[1]:
                assert (back[ends[1]], back[ends[0]]) in edges, (node, user)
                found += 1
    assert found >= 5


class Halves(nn.Module):
    """One parameter that two products read a half of each, or one that reads all of it turned."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return torch.mm(x, self.weight.t()).relu()
        first, second = self.weight.chunk(2)
        return torch.mm(x.relu(), first.t()) + torch.mm(x.tanh(), second.t())


def test_a_parameter_that_is_read_in_parts_has_gradients_of_the_parts() -> None:
    traced = baechi.trace(Halves(whole=False), (torch.randn(2, 4),), {})
    graph = traced.graph(costs_of(traced))
    state = next(op.name for op in graph.ops if op.name.startswith(f"{BACKWARD}state:"))
    inputs = graph.op_inputs[graph.op_index[state]]
    gradients = [graph.tensors[t].nbytes for t in inputs if graph.tensors[t].nbytes]
    assert gradients == [48, 48]
    assert graph.ops[graph.op_index[state]].late_bytes == 96


def test_a_whole_parameter_that_is_only_turned_has_one_gradient() -> None:
    traced = baechi.trace(Halves(whole=True), (torch.randn(2, 4),), {})
    graph = traced.graph(costs_of(traced))
    state = next(op.name for op in graph.ops if op.name.startswith(f"{BACKWARD}state:"))
    index = graph.op_index[state]
    assert sum(graph.tensors[tensor].nbytes for tensor in graph.op_inputs[index]) == 0
    reader = next(op for op in graph.ops if op.name.startswith(BACKWARD) and "mm" in op.name)
    assert (reader.late_bytes, graph.ops[index].late_bytes) == (96, 0)
