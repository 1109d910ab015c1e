"""Checks that a placement belongs to a traced model, and has enough torch devices."""

from collections.abc import Sequence

import torch
from torch import nn

from baechi.errors import InputError
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.records.step_structure import StepStructure
from baechi.traced.traced_model import Traced


def placed_step(traced: Traced, placement: Placement, graph: OpGraph | None) -> StepStructure:
    """The structure of the step that was placed.

    Args:
        traced: The model.
        placement: Of it.
        graph: The placed graph, where known.

    Raises:
        InputError: It is of another graph, parts a group, or is in no topological order.
    """
    n = len(traced.ops)
    step = graph or traced.structure(training=len(placement.devices) > n)
    again = len(step.units)
    sizes = (n, n + 1 + len(traced.backward_ops) + again)
    if len(placement.devices) not in sizes:
        raise InputError(
            f"the placement is of another graph: it has {len(placement.devices)} ops, and "
            f"{traced.name} has {' or '.join(map(str, sizes))} (inference or training). "
            "Solve the graph of this trace; and give graph=..., if it was made with checkpoint=..."
        )
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
    place = {op: i for i, op in enumerate(placement.order)}
    for tensor in traced.tensors:
        for consumer in tensor.consumers:
            if place[consumer] < place[tensor.producer]:
                raise InputError(
                    f"the placement's order runs {traced.ops[consumer].name!r} before "
                    f"{traced.ops[tensor.producer].name!r}, whose result it reads; "
                    "it is of another graph."
                )
    device_of: dict[str, int] = {}
    for op, device in zip(traced.ops, placement.devices[:n], strict=True):
        if op.group is not None and device_of.setdefault(op.group, device) != device:
            raise InputError(f"the placement parts group {op.group!r}; it is of another graph.")
    return step


def check_places(n_devices: int, places: Sequence[torch.device]) -> None:
    """Refuse a list of torch devices that is too short for the placement.

    Raises:
        InputError: There are fewer torch devices than logical ones.
    """
    if len(places) < n_devices:
        raise InputError(
            f"the placement uses {n_devices} logical devices, but {len(places)} torch devices "
            "were given; name one for each, the same one several times if they share it."
        )


def refuse_meta(model: nn.Module) -> None:
    """Passes a model that has weights to run with."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise InputError(
            f"this {type(model).__name__} is on the meta device and has no weights to run with; "
            "load them (`model.to_empty(device=...)`, `load_state_dict`), then place it, or trace "
            "and apply it. To plan without weights: trace, estimate, solve."
        )
