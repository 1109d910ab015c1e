"""State of a model whose parameters are at several ranks: each real at its home, elsewhere on meta.

    rank 0    blocks.0.weight   real      blocks.1.weight   meta
    rank 1    blocks.0.weight   meta      blocks.1.weight   real

So every name is that of the model, and what a rank saves is disjoint from what the others do: a
checkpoint of `torch.distributed.checkpoint` is that of the whole model, for any number of ranks.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from baechi.processes.tensor_messages import Message, receive, send
from baechi.processes.world import Ranks
from baechi.runtime.placed_state import KEY, PlacedState
from baechi.validation import check_is


def own_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a state that this rank has."""
    return {
        name: value
        for name, value in rows.items()
        if not (isinstance(value, torch.Tensor) and value.is_meta)
    }


def gathered(ranks: Ranks, rows: Mapping[str, Any]) -> dict[str, Any]:
    """All of a state, on the CPU of rank 0; empty elsewhere. Every rank calls this."""
    mine = own_rows(rows)
    lists = ranks.told("a whole state", list(mine))
    owner: dict[str, int] = {}
    for rank, names in reversed([*enumerate(lists)]):
        owner.update(dict.fromkeys(names, rank))
    found: dict[str, Any] = {}
    for name in rows:  # one after the other: no rank holds two copies
        rank = owner[name]
        if rank == ranks.rank and rank:
            send(ranks.senders[0], Message((ranks.key(),), [mine[name]]))
        elif rank and ranks.rank == 0:
            (found[name],), _ = receive(ranks.receivers[rank], (ranks.key(),), torch.device("cpu"))
        else:
            ranks.key()
            value = mine.get(name)
            found[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return found if ranks.rank == 0 else {}


def loadable(own: Mapping[str, Any], given: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state of the whole model, or of this rank alone, as one that this rank can load.

    What other ranks have is what is there already: a tensor on meta.
    """
    mine = own_rows(own)
    elsewhere = {name: value for name, value in own.items() if name not in mine}
    found = OrderedDict({**given, **elsewhere})
    found._metadata = getattr(given, "_metadata", None)  # type: ignore[attr-defined]
    return found


def clip_grad_norm_(
    placed: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of a placed model, on all ranks, to a norm of at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` of the whole model, in every bit: norms of parameters are
    put together in the model's order. Every rank calls this, and gets the norm before.

    Args:
        placed: The placed model.
        max_norm: The largest norm.
        norm_type: Which norm; infinity for the largest entry.
        error_if_nonfinite: Whether a norm that is no finite number is an error.

    Raises:
        RuntimeError: It is none, and that is one.
    """
    check_is(placed, nn.Module, "placed")
    state: PlacedState | None = vars(placed).get(KEY)
    if state is None or state.ranks is None:
        return nn.utils.clip_grad_norm_(
            placed.parameters(), max_norm, norm_type, error_if_nonfinite
        )
    ranks = state.ranks
    named = list(state.every_parameter())
    places = {id(p): i for i, p in enumerate(named)}
    mine = [p for p in named if not p.is_meta and p.grad is not None]
    grads = [p.grad.detach() for p in mine if p.grad is not None]
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
    numbers = torch.tensor([places[id(p)] for p in mine], dtype=torch.int64)
    rows: list[tuple[int, torch.Tensor]] = []
    for rank in range(ranks.size):
        (found, *values), _ = ranks.share(rank, [numbers, *norms])
        assert found is not None
        rows += zip(found.tolist(), (value for value in values if value is not None), strict=True)
    if not rows:
        return torch.tensor(0.0)
    rows.sort(key=lambda row: row[0])
    kinds = dict.fromkeys(value.dtype for _, value in rows)
    ordered = [value for kind in kinds for _, value in rows if value.dtype == kind]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped; to scale them by it nevertheless give error_if_nonfinite=False."
        )
    nn.utils.clip_grads_with_norm_(mine, max_norm, total)
    return total
