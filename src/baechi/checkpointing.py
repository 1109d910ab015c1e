"""Choice of submodules to checkpoint, so that a model trains in the available memory.

1. Cut the tree of submodules: one that keeps more than a quarter of all that autograd keeps is
   split into its submodules, else it is a candidate. If not even all candidates make the step fit,
   the cut is an eighth, then a sixteenth; then a half, for models of a few large parts.
2. Sort the candidates by recomputation time per byte saved.
3. Take as many of them, in order, as are needed: by bisection, with a placement for each step.

This is a greedy choice along one order; the optimal set would be a knapsack problem with a
scheduling problem inside. Complexity: O(log candidates) placements of the graph for each cut.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Final

from baechi.errors import InfeasibleError, InputError
from baechi.placers.placer import Placer, smallest
from baechi.placers.searching import find
from baechi.placers.solving import solve
from baechi.problem.problem_arrays import Problem
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.op_costs import Profile
from baechi.traced.checkpoint_units import Unit, units_of
from baechi.traced.traced_model import Traced
from baechi.units import parse_bytes
from baechi.validation import INT64_MAX, check_is

# One unit may keep at most 1 / share of all saved tensors. A step holds about that much more than
# the tensors between units, so there is almost nothing to gain below a sixteenth.
_SHARES: Final = (4, 8, 16, 2)

# A number and letters: `4GiB`, but not `0.linear`, which a `Sequential` may hold.
_SIZE: Final = re.compile(r"\d+(\.\d+)?\s*[A-Za-z]+")

Checkpoint = bool | int | str | Iterable[str] | None


def memory_target(checkpoint: Checkpoint) -> int | None:
    """The memory limit of every device; `None` if `checkpoint` has names instead.

    `True` is all memory of the devices. A string is a size if it is a number and a unit.
    """
    if isinstance(checkpoint, bool):
        return INT64_MAX if checkpoint else None
    if isinstance(checkpoint, int) or (isinstance(checkpoint, str) and _SIZE.fullmatch(checkpoint)):
        return parse_bytes(checkpoint, what="checkpoint")
    return None


def checked(checkpoint: Checkpoint) -> bool | int | str | tuple[str, ...] | None:
    """The same as a reusable value; `False` and an empty list become `None`."""
    if isinstance(checkpoint, bool | int | str) or checkpoint is None:
        return None if checkpoint is False else checkpoint
    if not isinstance(checkpoint, Iterable):
        raise InputError(
            f"checkpoint is {checkpoint!r}, a {type(checkpoint).__name__}; give names of "
            'submodules, a size such as "4GiB", or True.'
        )
    return tuple(checkpoint) or None


def within_memory(cluster: Cluster, memory: int | str) -> Cluster:
    """The cluster with at most that much memory on every device."""
    check_is(cluster, Cluster, "cluster")
    limit = parse_bytes(memory, what="memory")
    rows = (replace(d, memory_bytes=min(d.memory_bytes, limit)) for d in cluster.devices)
    return replace(cluster, devices=tuple(rows))


def checkpointed_by_the_model(traced: Traced) -> tuple[str, ...]:
    """The submodules whose own gradient checkpointing is on, the innermost ones.

    That of transformers and diffusers (`model.gradient_checkpointing_enable()`). A trace does not
    keep what `torch.utils.checkpoint` does, but as units they run forward again as requested.
    """
    modules = traced.module.model.named_modules()
    flags = (
        (name, module, getattr(module, "gradient_checkpointing", False)) for name, module in modules
    )
    on = [name for name, module, flag in flags if name and flag is True and module.training]
    inner = [name for name in on if not any(other.startswith(f"{name}.") for other in on)]
    names = tuple(name for name in inner if units_of(traced, {name}))
    if names:
        with suppress(InputError):  # units that need each other's gradients
            traced.structure(checkpoint=names)
            return names
    return ()


def choose_checkpoint(
    traced: Traced,
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    *,
    optimizer: str | None = None,
    placer: str | Placer = "auto",
    constraints: Constraints | None = None,
) -> tuple[str, ...]:
    """Submodules for `Traced.graph(checkpoint=...)` with which a training step fits the cluster.

    None, if it fits without.

    Args:
        traced: The model.
        profile: Its costs, as for `Traced.graph`.
        cluster: The devices; `within_memory` gives a cluster with less memory.
        optimizer: The optimizer, whose state must fit too.
        placer: The placer that decides whether it fits, as in `solve`.
        constraints: Constraints besides memory.

    Raises:
        InfeasibleError: It does not fit, whatever runs again; the text names the missing memory.
        InputError: As `Traced.graph` and `solve` do.
    """
    check_is(traced, Traced, "traced")

    def graph_of(names: Sequence[str]) -> OpGraph:
        return traced.graph(profile, optimizer=optimizer, checkpoint=names or None)

    def problem_of(names: Sequence[str]) -> Problem:
        return Problem(graph_of(names), cluster, constraints)

    def fits(names: Sequence[str]) -> bool:
        return find(problem_of(names), placer=placer) is not None

    if fits(()):
        return ()
    every: list[tuple[str, ...]] = []
    first = profile if isinstance(profile, Profile) else profile[0]
    for share in _SHARES:
        names = _joinable(_candidates(traced, first, share), problem_of)
        if not names or names in every:
            continue
        every.append(names)
        if fits(names):
            return names[: smallest(lambda n: fits(every[-1][:n]), len(names))]
    most = every[0] if every else ()
    try:
        solve(graph_of(most), cluster, placer, constraints=constraints)
    except InfeasibleError as error:
        what = f"with {len(most)} submodules that run forward again" if most else "as it is"
        text = f"a training step of {traced.name} was not placed {what}: {error}"
        raise InfeasibleError(text, *error.args[1:]) from None
    return most


def _joinable(
    names: Sequence[str], problem_of: Callable[[Sequence[str]], Problem]
) -> tuple[str, ...]:
    """The names without those that depend on earlier ones both ways.

    Also without those that the constraints would separate.
    """
    with suppress(InputError):
        problem_of(names)
        return tuple(names)
    joined: list[str] = []
    for name in names:
        with suppress(InputError):
            problem_of([*joined, name])
            joined.append(name)
    return tuple(joined)


def _candidates(traced: Traced, profile: Profile, share: int) -> tuple[str, ...]:
    """The submodules of a cut, by ascending recomputation time per byte saved."""
    savers: dict[int, set[int]] = {}
    for op in traced.backward_ops:
        for tensor in traced.ops[op].saves:
            savers.setdefault(tensor, set()).add(op)
    # Bytes that autograd saves, by the operator that makes them.
    kept = [0] * len(traced.ops)
    for op in traced.backward_ops:
        kept[op] += profile.costs[op].saved_bytes
    for saved in savers:
        kept[traced.tensors[saved].producer] += traced.tensors[saved].nbytes
    total = sum(kept)
    under: dict[str, int] = {}
    for op, row in enumerate(traced.ops):
        for path in row.modules:
            under[path] = under.get(path, 0) + kept[op]
    parent = {path: path.rpartition(".")[0] for path in under}
    opened = {path for path in parent.values() if not path or under[path] * share > total}
    chosen = [
        path for path in under if under[path] > 0 and path not in opened and parent[path] in opened
    ]
    rows = []
    for at, path in enumerate(chosen):
        units = units_of(traced, {path})  # none where no gradient reaches it
        freed = sum(_freed_bytes(traced, profile, unit, savers) for unit in units)
        time = sum(profile.costs[op].forward_ns for unit in units for op in unit.ops)
        if freed > 0:
            rows.append((Fraction(time, freed), at, path))
    return tuple(path for *_, path in sorted(rows))


def _freed_bytes(
    traced: Traced, profile: Profile, unit: Unit, savers: Mapping[int, set[int]]
) -> int:
    """Bytes no longer saved if only this unit runs again, less the inputs that it keeps.

    `savers` has the operators with a backward that save each tensor.
    """
    inside = set(unit.ops)
    total = sum(profile.costs[op].saved_bytes for op in inside & traced.differentiated)
    for index, tensor in enumerate(traced.tensors):
        if tensor.kept:
            continue
        mine = savers.get(index, set())
        if tensor.producer in inside:
            total += tensor.nbytes if mine and mine <= inside else 0
        elif not mine and inside.intersection(tensor.consumers):
            total -= tensor.nbytes
    return total
