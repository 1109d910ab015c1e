"""Measured costs: each distinct operator alone (`op_benchmark`), in passes, kept in a file.

docs/cost-model.md, "Where the numbers come from", has the reasons. Of an operator

    the time      is the lowest of its passes
    the spread    is how far above that the next pass is: what confirms it

A pass that was held up throughout (`timers`) may lower a time but confirms none.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch

from baechi.costs.held_gradients import held_gradients
from baechi.costs.op_benchmark import Addition, Bench
from baechi.costs.profile_cache import Measured, ProfileStore
from baechi.costs.timers import NO_GRAPH, Clock
from baechi.costs.whole_step import LONGEST_NS, WholeStep, together
from baechi.errors import InputError
from baechi.records.cluster import lane_kind
from baechi.records.op_costs import OpCost, Profile
from baechi.torch_support.torch_devices import (
    device_kind,
    processes_on,
    torch_device,
    torch_threads,
)
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule
from baechi.validation import check_is, check_positive, check_threads

# Passes over an undisturbed machine mostly differ by less than a tenth.
_TOLERANCE: Final = 0.2
# Less than this is not worth measuring again.
_TRIFLE_NS: Final = 1_000
_PASSES: Final = 2
# What may be spent on the unsettled: a share of what the passes took. A few small operators may
# take longer, since a disturbance may be longer than all of their passes.
_MORE_SHARE: Final = 0.5
_MORE_NS: Final = 300_000_000
Job = int | Addition | WholeStep  # an operator is its index
_SHARED: Final = "another process used the GPU meanwhile"  # a remark
_UNCERTAIN: Final = (
    f"uncertain: its times vary by more than {_TOLERANCE:.0%}, or something else held it up"
)


def profile(
    traced: Traced,
    device: str | torch.device = "cpu",
    *,
    threads: int | None = None,
    progress: bool = True,
    cache: bool | str | Path = True,
    lanes: int = 1,
    microbatches: int = 1,
) -> Profile:
    """The measured cost of every operator of a traced model on one device.

    Args:
        traced: From `trace`, in this process.
        device: A torch device; a logical name such as `"cpu:1"` is read as its torch device.
        threads: CPU threads per operator; `None` takes torch's own number.
        progress: Show a bar, and say how much is uncertain.
        cache: Where measured costs are kept for the next time: `True` is a file in the user's
            cache directory, a path is a file of your own, and `False` keeps nothing.
        lanes: On a GPU, the time of every operator is that of so many copies of it at once, on a
            stream each: what it takes on one of several lanes that are all busy (`lane_kind`).
        microbatches: Number of calls like the traced one in a step. Those after the first add their
            gradients of parameters to what is there, and every backward has its share of that.

    Raises:
        InputError: The traced model was loaded from a file, the device is not there, an operator
            can be measured neither alone nor in the model, or `CUDA_LAUNCH_BLOCKING` or a profiler
            of torch would be measured, too.
        FormatError: `cache` names a file that is no store.
    """
    check_is(traced, Traced, "traced")
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no model to measure; "
            "trace the model again in this process."
        )
    place = torch_device(device)
    if check_positive(lanes, "lanes") > 1 and place.type != "cuda":
        raise InputError(f"lanes={lanes} is for a GPU, and {place} is none; leave it out.")
    check_positive(microbatches, "microbatches")
    count = torch.get_num_threads() if threads is None else check_threads(threads, "threads")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch_threads(count))
        stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        stack.enter_context(traced.module.call.autocast.applied())
        torch.manual_seed(0)  # made-up values are the same each time
        store = None
        if cache is not False:
            store = stack.enter_context(ProfileStore(None if cache is True else cache))
        jobs = _jobs(traced, accumulates=microbatches > 1)
        wholes = _wholes(traced, place) if lanes == 1 else []
        jobs |= {whole.key: whole for whole in wholes}
        measured = _measured(jobs, Bench(traced, place, count, lanes), store, progress)
    environment = f"torch {torch.__version__}, {count} threads, {torch.get_default_dtype()}"
    rows = _rows(traced, measured, microbatches)
    alone = rows if microbatches == 1 else _rows(traced, measured, 1)
    found = {whole.gradients: measured[whole.key] for whole in wholes}
    rows = together(rows, alone, *(found.get(way, Measured(0)) for way in (True, False)))
    kind = lane_kind(device_kind(place), lanes)
    return Profile(traced.digest, kind, rows, "measured", environment)


def _measured(
    jobs: dict[str, Job], bench: Bench, store: ProfileStore | None, progress: bool
) -> dict[str, Measured]:
    """The cost of every distinct job by its key: from the store, else measured and stored."""
    costs: dict[str, Measured] = {}
    if store is not None:
        found = {key: store.find(key, bench.conditions) for key in jobs}
        costs = {key: cost for key, cost in found.items() if cost is not None}

    def measure(key: str, before: Measured | None) -> Measured:
        bench.check_settings()
        job = jobs[key]
        if not isinstance(job, WholeStep):
            found = bench.operator(job, before) if isinstance(job, int) else bench.addition(job)
        else:
            alone = _rows(bench.traced, costs, 1)
            short = sum(row.forward_ns + row.backward_ns for row in alone) <= LONGEST_NS
            found = job.measured(bench.timer) if short else Measured(0)
        cost = with_pass(before, found)
        if _SHARED not in cost.remark and processes_on(bench.place) > 1:
            cost = replace(cost, remark="; ".join(filter(None, (cost.remark, _SHARED))))
        if store is not None and _SHARED not in cost.remark:
            store.keep(key, bench.conditions, cost)
        return cost

    def tracked(keys: list[str], number: int) -> Iterator[str]:
        return _tracked(keys, f"profile, pass {number + 1}", progress)

    try:
        measure_all(jobs, costs, measure, tracked)
    except KeyboardInterrupt:
        kept = "nothing is kept" if store is None else f"they are kept in {store.path}"
        sys.stderr.write(f"baechi: {len(costs)} of {len(jobs)} were measured; {kept}.\n")
        raise
    again = "profile again" if store is None else "clear the cache and profile again"
    operators = [cost for key, cost in costs.items() if not isinstance(jobs[key], WholeStep)]
    remarks = [cost.remark for cost in operators]
    said = {
        "could not be repeated as CUDA graphs, so launches may be in their times; their remarks "
        "say why": sum(NO_GRAPH in remark for remark in remarks),
        "were measured beside another process on the GPU, and their costs are not kept. Let it "
        "end; profile again": sum(_SHARED in remark for remark in remarks),
        f"vary by more than {_TOLERANCE:.0%} or were held up. Does other work run on this machine? "
        f"If so, let it end; {again}": sum(not is_settled(cost) for cost in operators),
    }
    for text, count in said.items() if progress else ():
        if count:
            sys.stderr.write(f"baechi: {count} of {len(operators)} distinct operators {text}.\n")
    return costs


def _jobs(traced: Traced, *, accumulates: bool) -> dict[str, Job]:
    """Distinct operators, then additions, by key."""
    jobs: dict[str, Job] = {}
    module: TracedModule = traced.module
    for index, op in enumerate(traced.ops):
        if any(node.op not in ("get_attr", "placeholder") for node in module.nodes[index]):
            jobs.setdefault(op.key, index)
    additions = [addition for row in _additions(traced) for addition in row]
    additions += filter(None, _accumulations(traced)) if accumulates else []
    return jobs | {addition.key: addition for addition in additions}


def _wholes(traced: Traced, place: torch.device) -> list[WholeStep]:
    """The model's own steps, with and without gradients, where they can run."""
    mode = traced.module.gradients
    rows = [WholeStep(traced, gradients=way) for way in (True, False) if mode in (None, way)]
    return [row for row in rows if row.runs_on(place)]


def _tracked(keys: list[str], title: str, progress: bool) -> Iterator[str]:
    """The keys, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not progress or not console.is_terminal:
        return iter(keys)
    return iter(track(keys, title, console=console, transient=True))


def measure_all(
    keys: Iterable[str],
    costs: MutableMapping[str, Measured],
    measure: Callable[[str, Measured | None], Measured],
    tracked: Callable[[list[str], int], Iterator[str]],
    wall: Clock = time.perf_counter_ns,
) -> None:
    """Measures until two passes agree on everything, or the time for that is spent.

    Args:
        keys: The keys of the operators to measure.
        costs: What was measured before, and, after each pass, what is measured now.
        measure: Makes one more pass over one of them, given what is known of it.
        tracked: The keys of a pass, given these and its number, with reports of progress.
        wall: Nanoseconds that go by.
    """
    order = [key for key in keys if key not in costs or costs[key].passes < _PASSES]
    begin = wall()
    for count in range(_PASSES):
        due = [key for key in order if key not in costs or costs[key].passes <= count]
        for key in tracked(due, count):
            costs[key] = measure(key, costs.get(key))
    now = wall()
    end = now + max(round(_MORE_SHARE * (now - begin)), _MORE_NS)
    count = _PASSES
    while left := [key for key in order if not is_settled(costs[key])]:
        left.sort(key=lambda key: -costs[key].forward_spread_ns - costs[key].backward_spread_ns)
        for key in tracked(left, count):
            if wall() >= end:
                return
            costs[key] = measure(key, costs[key])
        count += 1


def is_settled(measured: Measured) -> bool:
    """True if two passes agree on its forward, and two on its backward."""
    rows = (
        (measured.forward_ns, measured.forward_spread_ns),
        (measured.backward_ns, measured.backward_spread_ns),
    )
    return all(spread <= max(_TOLERANCE * ns, _TRIFLE_NS) for ns, spread in rows)


def with_pass(before: Measured | None, found: Measured) -> Measured:
    """The measurement with one more pass, whose spreads are its times where it was held up, else 0.

    Sizes and remark stay.
    """
    if before is None:
        return replace(
            found, forward_spread_ns=found.forward_ns, backward_spread_ns=found.backward_ns
        )
    changes: dict[str, Any] = {"passes": before.passes + 1}
    for names in (("forward_ns", "forward_spread_ns"), ("backward_ns", "backward_spread_ns")):
        times_of = attrgetter(*names)
        changes |= zip(names, _lowest(times_of(before), times_of(found)), strict=True)
    for name in ("forward_launch_ns", "backward_launch_ns"):
        changes[name] = min(getattr(before, name), getattr(found, name))
    return replace(before, **changes)


def _lowest(before: tuple[int, int], found: tuple[int, int]) -> tuple[int, int]:
    """The lower time, and how far the next is above it as far as that is known."""
    (ns, spread_ns), (next_ns, held_up) = before, found
    if held_up:
        return found if next_ns < ns else before
    if next_ns < ns:
        return next_ns, ns - next_ns
    return ns, min(spread_ns, next_ns - ns)


def _additions(traced: Traced) -> list[Counter[Addition]]:
    """The additions in the backward of every op; the caller's loss is a reader, too."""
    rows: list[Counter[Addition]] = [Counter() for _ in traced.ops]
    for tensor in traced.tensors:
        if tensor.differentiable and tensor.producer in traced.differentiated:
            readers = len(traced.differentiated.intersection(tensor.consumers)) + tensor.kept
            if readers > 1 and tensor.nbytes:
                rows[tensor.producer][Addition(tensor.nbytes)] += readers - 1
    for op in traced.differentiated:
        if traced.ops[op].shared_bytes:
            rows[op][Addition(traced.ops[op].shared_bytes, anew=True)] += 1
    return rows


def _accumulations(traced: Traced) -> list[Addition | None]:
    """What adds the gradients of every op's parameters to those of earlier micro-batches."""
    return [
        Addition(op.trained_bytes, earlier=True)
        if op.trained_bytes and index in traced.differentiated
        else None
        for index, op in enumerate(traced.ops)
    ]


def _rows(traced: Traced, measured: dict[str, Measured], microbatches: int) -> tuple[OpCost, ...]:
    """The cost of every op of the model."""
    rows = []
    alone = [measured.get(op.key, Measured(0)) for op in traced.ops]
    held = held_gradients(traced, [cost.backward_workspace_bytes for cost in alone])
    accumulations = _accumulations(traced)
    for index, (op, additions) in enumerate(zip(traced.ops, _additions(traced), strict=True)):
        cost = alone[index]
        backward_ns = cost.backward_ns if op.differentiable else 0
        launch_ns = cost.backward_launch_ns if op.differentiable else 0
        for addition, count in additions.items():
            backward_ns += count * measured[addition.key].forward_ns
            launch_ns += count * measured[addition.key].forward_launch_ns
        parts = [cost, *(measured[addition.key] for addition in additions)]
        if microbatches > 1 and (accumulation := accumulations[index]) is not None:
            parts.append(measured[accumulation.key])
            backward_ns += (microbatches - 1) * parts[-1].forward_ns // microbatches
            launch_ns += (microbatches - 1) * parts[-1].forward_launch_ns // microbatches
        uncertain = "" if all(map(is_settled, parts)) else _UNCERTAIN
        remarks = filter(None, (cost.remark, uncertain))
        known = asdict(cost) | {
            "backward_ns": max(backward_ns, held[index].least_ns),
            "backward_spread_ns": cost.backward_spread_ns if op.differentiable else 0,
            "parameter_bytes": op.trained_bytes + op.frozen_bytes,
            "output_bytes": traced.made_bytes[index],
            "backward_workspace_bytes": held[index].workspace_bytes,
            "backward_beside": held[index].beside,
            "backward_launch_ns": launch_ns,
            "remark": "; ".join(remarks),
        }
        del known["passes"]
        rows.append(OpCost(**known))
    return tuple(rows)
