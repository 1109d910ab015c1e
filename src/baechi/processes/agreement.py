"""Agreement of ranks on a plan: all trace and compile the same, and one decides for all.

Where there are none, a process agrees with itself.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn

from baechi.errors import InputError
from baechi.processes.world import Ranks
from baechi.records.graph import OpGraph
from baechi.records.instructions import Program
from baechi.records.op_costs import Profile
from baechi.records.placement import Placement
from baechi.storage.serialization import dumps, loads
from baechi.torch_support.storages import bytes_of
from baechi.traced.traced_model import Traced

_T = TypeVar("_T")
# What does not go with ranks.
_WHY_NOT: Final = {
    "verify": "no rank has the whole model to compare with; verify it in one process",
    "cuda_graphs": "what comes from other ranks has no fixed place in memory",
}


def refuse_for_ranks(options: Mapping[str, Any]) -> None:
    """Raise an error for an option that does not go with ranks."""
    for name, why in _WHY_NOT.items():
        if options[name]:
            raise InputError(f"{name}= does not go with baechi.ranks(): {why}. Leave it out.")


def trace_of_all(ranks: Ranks | None, trace: Callable[[], tuple[_T, Traced]]) -> tuple[_T, Traced]:
    """What each rank traces, which is the same; or the error of one that cannot."""
    if ranks is None:
        return trace()
    failure = ""
    try:
        call, traced = trace()
    except Exception as error:
        failure = str(error) or repr(error)
        raise
    finally:  # the others would wait for this rank
        failures = ranks.exchange("a trace", failure)
    for rank, text in enumerate(failures):
        if text:
            raise InputError(f"rank {rank} cannot plan this call: {text}")
    ranks.compare("the traced model", traced.digest, lambda: [*map(str, traced.ops)])
    return call, traced


def costs_of_kinds(ranks: Ranks, measured: Callable[[], Profile]) -> list[Profile]:
    """The costs on each kind of device, by the first rank that has one."""
    first = {row.kind: rank for rank, row in reversed([*enumerate(ranks.cluster.devices)])}
    found = [
        ranks.decide("costs", lambda: dumps(measured()), rank) for rank in sorted(first.values())
    ]
    return [loads(text, Profile) for text in found]


def placement_for_all(
    ranks: Ranks | None, search: Callable[[], tuple[OpGraph, Placement, Any]]
) -> tuple[OpGraph, Placement, Any]:
    """What the first rank finds: a graph, its placement, and what runs forward again."""
    if ranks is None:
        return search()

    def decided() -> str:
        graph, placement, again = search()
        return json.dumps([dumps(graph), dumps(placement), again])

    graph, placement, again = json.loads(ranks.decide("a placement", decided))
    return loads(graph, OpGraph), loads(placement, Placement), again


def compare_programs(ranks: Ranks, program: Program, step_ns: int) -> None:
    """Raise an error unless all have one program; its step may be the longest so far."""
    text = program.explain()
    digest = hashlib.sha256(text.encode()).hexdigest()
    ranks.compare("the program", digest, text.splitlines)
    ranks.step_ns = max(ranks.step_ns, step_ns)


def compare_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raise an error unless all ranks begin with the same model, by a corner of every tensor."""
    state = [*model.named_parameters(), *model.named_buffers()]
    rows = [
        f"{name} {list(tensor.shape)} {tensor.detach()[(slice(4),) * tensor.dim()].tolist()}"
        for name, tensor in state
        if type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
    ]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    ranks.compare("what parameters and buffers hold", digest, lambda: rows)


def compare_batches(ranks: Ranks, tensors: Iterable[torch.Tensor], random: bool) -> None:
    """Raise an error unless the ranks of a replica were given the same values.

    If they draw random numbers, also unless these are the same.
    """
    digest = hashlib.sha256()
    if random and ranks.device.type == "cpu":
        tensors = [*tensors, torch.get_rng_state()]
    for tensor in tensors:
        dense = tensor.detach().resolve_conj().resolve_neg().to("cpu").to_dense()
        digest.update(bytes_of(dense.contiguous().view(-1)))
    first, *others = ranks.told("a batch", digest.hexdigest())
    other = next((ranks.first + i for i, row in enumerate(others, 1) if row != first), None)
    if other is not None:
        raise InputError(
            f"ranks {ranks.first} and {other} were given different batches, or seeds. The ranks of "
            "a replica run parts of one model, so each is given the same whole batch: take no part "
            "of the data by rank (DistributedSampler), and seed all alike (torch.manual_seed)."
        )


def without_parameters(ranks: Ranks, homes: Mapping[torch.Tensor, int]) -> str:
    """The ranks that have nothing to train, in a sentence; empty if there are none.

    `homes` has the rank of every tensor.
    """
    training = {home for tensor, home in homes.items() if tensor.requires_grad}
    idle = [str(rank) for rank in range(ranks.size) if training and rank not in training]
    if not idle:
        return ""
    return (
        f"no parameter is on rank {', '.join(idle)}, where optimizers will refuse an empty list: "
        "start fewer ranks"
    )
