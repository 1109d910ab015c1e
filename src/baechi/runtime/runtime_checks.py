"""Checks before a placed model runs: of its placement, its state, and a call's arguments."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from baechi.errors import ExecutionError, InputError
from baechi.records.graph import OpGraph, StepStructure
from baechi.records.placement import Placement
from baechi.torch_support.torch_internals import is_checkpointed, state_of
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import Call
from baechi.tracing.guards import HeldObjects
from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute
from baechi.tracing.subgraph import opaque_leaves


def placed_step(traced: Traced, placement: Placement, graph: OpGraph | None) -> StepStructure:
    """The structure of the step that was placed: of the placed graph, where that is known.

    Raises:
        InputError: It is of another graph.
    """
    step = graph or traced.structure(training=len(placement.devices) > len(traced.ops))
    if graph is not None and graph.digest != placement.graph_digest:
        raise InputError(
            f"the placement is of another graph (digest {placement.graph_digest[:12]}...) than "
            f"the one given (digest {graph.digest[:12]}...). Solve the graph of this trace."
        )
    if [op.name for op in step.ops[: step.n_forward]] != [op.name for op in traced.ops]:
        raise InputError(
            f"the graph given is not of this {traced.name}: its forward ops have other names, or "
            "it does not say which ops are not forward (Op.phase). Give the graph of this trace."
        )
    return step


def refuse_meta(model: nn.Module) -> None:
    """Raise an `InputError` for a model on the meta device."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise InputError(
            f"this {type(model).__name__} is on the meta device and has no weights to run with; "
            "give place(..., weights=...) a safetensors file or folder, or load them before "
            "(`model.to_empty(device=...)`, `load_state_dict`). To plan without: trace, estimate, "
            "solve."
        )


@final
class StateGuard:
    """The parameters and buffers that the model's graph reads, under the names they had.

    Of submodules that stay whole these are the parameters; they replace buffers as they like.
    """

    def __init__(self, model: nn.Module, graph: fx.GraphModule) -> None:
        self._model = type(model).__name__
        leaves = opaque_leaves(graph, graph.graph.nodes).values()
        whole = {id(module) for leaf in leaves for module in leaf.modules()}
        named = graph.graph.find_nodes(op="get_attr")
        read = {id(attribute(graph, str(node.target))) for node in named}
        read |= {id(parameter) for leaf in leaves for parameter in leaf.parameters()}
        # (its holder, its name there, itself, its dtype, its name in the model)
        self._rows: list[tuple[dict[str, Any], str, Any, torch.dtype | None, str]] = []
        for path, module in model.named_modules():
            _, parameters, buffers = state_of(module)
            for holder in (parameters,) if id(module) in whole else (parameters, buffers):
                for key, value in holder.items():
                    if value is None or id(value) in read:
                        dtype = None if value is None else value.dtype
                        name = f"{path}.{key}".lstrip(".")
                        self._rows.append((holder, key, value, dtype, name))
        typed = ((value, ("dtype",)) for _, _, value, dtype, _ in self._rows if dtype is not None)
        self._held = HeldObjects((holder for holder, *_ in self._rows), typed)

    def are_same(self) -> bool:
        """True if each is as it was; takes some 30 ns a name."""
        return self._held.are_same()

    def are_exchanged(self) -> bool:
        """True if what came in their places are parameters and buffers, cast or others.

        So it is not while `functional_call` runs, nor of tensors of a class of their own.
        """
        now = [(value, holder.get(key)) for holder, key, value, *_ in self._rows]
        return all(
            new is None
            or type(new) is nn.Parameter
            or (not isinstance(old, nn.Parameter) and type(new) in (torch.Tensor, nn.Buffer))
            for old, new in now
            if new is not old
        )

    def check(self) -> None:
        """Raise an `ExecutionError` if one of them was replaced, or cast to another type."""
        if self.are_same():
            return
        for holder, key, value, dtype, name in self._rows:
            if holder.get(key) is not value:
                raise ExecutionError(
                    f"{name!r} of {self._model} was replaced after the model was placed, by "
                    "functional_call, a tensor that is no parameter, or, of ranks and of what "
                    "`apply` made, by an assignment or load_state_dict(assign=True): what was "
                    "placed would run without it. Write into the tensor that is there "
                    "(load_state_dict does), or call model = placed.unplace(), change the model, "
                    "and place it again."
                )
            if dtype is not None and holder[key].dtype is not dtype:
                raise ExecutionError(
                    f"{name!r} of {self._model} was {dtype} when the model was placed, and is "
                    f"{holder[key].dtype}: .half(), .double() or .to() cast it. Call model = "
                    "placed.unplace(), cast the model, and place it again."
                )


@final
class SharingGuard:
    """The arguments of the example that share memory; allows calls that share alike.

    A trace with one tensor for two arguments does not distinguish them, and one that writes into an
    argument covers only the readers that shared its memory then.
    """

    def __init__(self, module: TracedModule) -> None:
        tensors = module.call.tensors
        last = {id(tensor): i for i, tensor in enumerate(tensors)}
        # (i, j): the argument i is the very tensor that j is.
        self._one = [(i, last[id(t)]) for i, t in enumerate(tensors) if last[id(t)] != i]
        facts, written = module.facts.nodes, module.facts.written
        given = [facts[n].values for n in module.graph_module.graph.find_nodes(op="placeholder")]
        storages = [{value.storage for value in values} for values in given]
        # (i, j): i is written, and shares nothing with j.
        self._apart = [
            (i, j)
            for i, mine in enumerate(storages)
            for j, others in enumerate(storages)
            if mine & written and not mine & others
        ]

    def allows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if identical arguments still are, and written memory is not newly shared."""
        if not (self._one or self._apart):
            return True
        if any(tensors[i] is not tensors[j] for i, j in self._one):
            return False
        memory = [
            t.untyped_storage().data_ptr() if t.layout is torch.strided and t.numel() else None
            for t in tensors
        ]
        shared = (memory[i] for i, j in self._apart if memory[i] == memory[j])
        return all(address is None for address in shared)


@final
class GradientGuard:
    """The arguments that forward writes into or returns views of, and loses gradients of."""

    def __init__(self, module: TracedModule) -> None:
        facts, written = module.facts.nodes, module.facts.written
        wrote = {
            value.storage
            for fact in facts.values()
            for value in fact.values
            if value.requires_grad and value.storage in fact.writes
        }
        results = module.graph_module.graph.output_node().all_input_nodes
        made = [n for n in results if n in facts and n.op not in ("placeholder", "get_attr")]
        seen = {v.storage for n in made for v in facts[n].values if v.requires_grad} - written
        self.rewritten = _arguments_in(wrote, module)
        self._viewed = _arguments_in(seen, module)

    def check(self, calls: Sequence[Call]) -> None:
        """Raise an `ExecutionError` if gradients of these calls would be lost."""
        tensors = [tensor for call in calls for tensor in call.tensors]
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):  # type: ignore[no-untyped-call]
            raise ExecutionError(  # it would end at the step's one node, and be lost
                "an argument has a tangent (torch.autograd.forward_ad, torch.func.jvp), and a step "
                "with gradients passes none on. Call the model under torch.no_grad(), or the "
                "unsplit one."
            )
        if self.rewritten:
            raise ExecutionError(
                f"forward writes into its argument {calls[0].names[self.rewritten[0]]!r} in place "
                "and needs the gradient of what it writes: outside of the model there is no graph "
                "of the new values. Let forward write into a copy (x = x.clone())."
            )
        for index in self._viewed:
            if calls[0].tensors[index].requires_grad:
                raise ExecutionError(
                    f"the model returns a view of its argument {calls[0].names[index]!r}, and "
                    "autograd would not know that they share memory, where it needs a gradient. "
                    "Let forward return a copy (x.clone())."
                )
        if is_checkpointed():
            raise ExecutionError(
                "a placed model was called inside torch.utils.checkpoint(use_reentrant=False), "
                "which would run it again for every segment. Call it outside, and let the "
                "placement recompute: baechi.place(model, devices, checkpoint=...)."
            )


def _arguments_in(storages: set[int], module: TracedModule) -> list[int]:
    """The caller's tensors, by index, that are in some storages."""
    facts, given = module.facts.nodes, module.graph_module.graph.find_nodes(op="placeholder")
    return [i for i, n in enumerate(given) if any(v.storage in storages for v in facts[n].values)]
