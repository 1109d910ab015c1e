"""Measured costs: each distinct operator alone, once.

An operator runs on tensors made for it (`op_benchmark`), so the whole model need never fit one
device, and twelve equal layers are measured as one. It is measured in passes, seconds apart, until
two of them agree (`repetition`). Where a tensor has several readers, adding up their gradients is a
part of its producer's backward, as it is in autograd.

What was measured is kept in a file (`profile_cache`), so a second run measures nothing.

Complexity: O(distinct operators), about 0.2 s each; with a full store O(operators).
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from baechi.costs.example_inputs import value_remark
from baechi.costs.op_benchmark import Addition, Bench
from baechi.costs.profile_cache import Measured, ProfileStore
from baechi.costs.repetition import TOLERANCE, is_settled, measure_all, with_pass
from baechi.errors import InputError
from baechi.records.op_costs import OpCost, Profile
from baechi.torch_support.torch_devices import device_kind, torch_device
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule
from baechi.validation import check_is, check_threads

UNCERTAIN: Final = (
    f"uncertain: its times vary by more than {TOLERANCE:.0%}, or something else held it up"
)


def profile(
    traced: Traced,
    device: str | torch.device = "cpu",
    *,
    threads: int | None = None,
    progress: bool = True,
    cache: bool | str | Path = True,
) -> Profile:
    """The measured cost of every operator of a traced model on one device.

    What the passes do not agree on has a remark.

    Args:
        traced: From `trace`, in this process.
        device: A torch device; a logical name such as `"cpu:1"` is read as its torch device.
        threads: CPU threads per operator; `None` takes torch's own number.
        progress: Show a bar with what is being measured, and say how much is uncertain.
        cache: Where measured costs are kept for the next time: `True` is a file in the user's
            cache directory, a path is a file of your own, and `False` keeps nothing.

    Raises:
        InputError: The traced model was loaded from a file, the device is not there, or an
            operator can be measured neither alone nor in the model.
        FormatError: `cache` names a file that is no store.
    """
    check_is(traced, Traced, "traced")
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no model to measure; "
            "trace the model again in this process."
        )
    place = torch_device(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        count = stack.enter_context(_threads(threads))
        stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        stack.enter_context(traced.module.call.autocast.applied())
        torch.manual_seed(0)  # made-up values are the same each time
        store = None
        if cache is not False:
            store = stack.enter_context(ProfileStore(None if cache is True else cache))
        bench = Bench(traced, place, count)
        measured = _measured(traced, bench, store, progress)
    environment = f"torch {torch.__version__}, {count} threads, {torch.get_default_dtype()}"
    rows = _rows(traced, measured)
    return Profile(traced.digest, device_kind(place), rows, "measured", environment)


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    if threads is not None:
        threads = check_threads(threads, "threads")
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield threads or before
    finally:
        torch.set_num_threads(before)


def _measured(
    traced: Traced, bench: Bench, store: ProfileStore | None, progress: bool
) -> dict[str, Measured]:
    """The cost of every distinct job by its key: from the store, else measured and stored."""
    jobs = _jobs(traced)
    costs: dict[str, Measured] = {}
    if store is not None:
        found = {key: store.find(key, bench.conditions) for key in jobs}
        costs = {key: cost for key, cost in found.items() if cost is not None}

    def measure(key: str, before: Measured | None) -> Measured:
        cost = with_pass(before, jobs[key][1](bench, before))
        if store is not None:
            store.keep(key, bench.conditions, cost)
        return cost

    def tracked(keys: list[str], number: int) -> Iterator[str]:
        return _tracked(keys, f"profile, pass {number + 1}", jobs, progress)

    try:
        measure_all(jobs, costs, measure, tracked)
    except KeyboardInterrupt:
        kept = "nothing is kept" if store is None else f"they are kept in {store.path}"
        sys.stderr.write(f"baechi: {len(costs)} of {len(jobs)} were measured; {kept}.\n")
        raise
    uncertain = sum(not is_settled(cost) for cost in costs.values())
    if uncertain and progress:
        again = "profile again" if store is None else "clear the cache and profile again"
        sys.stderr.write(
            f"baechi: {uncertain} of {len(jobs)} distinct operators vary by more than "
            f"{TOLERANCE:.0%} or were held up. Does other work run on this machine? If so, let it "
            f"end; {again}.\n"
        )
    return costs


Job = tuple[str, Callable[[Bench, Measured | None], Measured]]


def _jobs(traced: Traced) -> dict[str, Job]:
    """The work by key, with a name for people: distinct operators, then additions."""
    jobs: dict[str, Job] = {}
    module: TracedModule = traced.module
    for index, op in enumerate(traced.ops):
        if any(node.op not in ("get_attr", "placeholder") for node in module.nodes[index]):
            jobs.setdefault(op.key, (op.name, _pass_over(index)))
    for row in _additions(traced):
        for addition in row:
            name = f"adding up gradients of {addition.nbytes} bytes"
            jobs.setdefault(addition.key, (name, _pass_adding(addition)))
    return jobs


def _pass_over(index: int) -> Callable[[Bench, Measured | None], Measured]:
    return lambda bench, before: bench.operator(index, before)


def _pass_adding(addition: Addition) -> Callable[[Bench, Measured | None], Measured]:
    return lambda bench, _: bench.addition(addition)


def _tracked(keys: list[str], title: str, jobs: dict[str, Job], progress: bool) -> Iterator[str]:
    """The keys, with a progress bar that names each and says how many are left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]} left: {task.fields[op]}"),
    )
    console = Console(stderr=True)
    hidden = not progress or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=len(keys), op="", left=len(keys))
        for done, key in enumerate(keys):
            bar.update(task, op=jobs[key][0], left=len(keys) - done)
            yield key
            bar.advance(task)


def _additions(traced: Traced) -> list[Counter[Addition]]:
    """The additions in the backward of every op.

    Gradients of a tensor's readers, the caller's loss among them, are added up one by one; so are
    those of a parameter that later operators read, too.
    """
    rows: list[Counter[Addition]] = [Counter() for _ in traced.ops]
    differentiated = traced.differentiated
    for tensor in traced.tensors:
        if tensor.differentiable and tensor.producer in differentiated:
            readers = sum(consumer in differentiated for consumer in tensor.consumers)
            readers += tensor.kept
            if readers > 1 and tensor.nbytes:
                rows[tensor.producer][Addition(tensor.nbytes)] += readers - 1
    for op in differentiated:
        if traced.ops[op].shared_bytes:
            rows[op][Addition(traced.ops[op].shared_bytes, anew=True)] += 1
    return rows


def _rows(traced: Traced, measured: dict[str, Measured]) -> tuple[OpCost, ...]:
    """The cost of every op of the model."""
    made = traced.made_bytes
    rows = []
    for index, (op, additions) in enumerate(zip(traced.ops, _additions(traced), strict=True)):
        cost = measured.get(op.key, Measured(0))
        backward_ns = cost.backward_ns if op.differentiable else 0
        for addition, count in additions.items():
            backward_ns += count * measured[addition.key].forward_ns
        parts = [cost, *(measured[addition.key] for addition in additions)]
        uncertain = "" if all(map(is_settled, parts)) else UNCERTAIN
        remarks = [cost.remark, value_remark(traced.module.nodes[index]), uncertain]
        rows.append(
            OpCost(
                forward_ns=cost.forward_ns,
                backward_ns=backward_ns,
                parameter_bytes=op.trained_bytes + op.frozen_bytes,
                output_bytes=made[index],
                saved_bytes=cost.saved_bytes,
                workspace_bytes=cost.workspace_bytes,
                backward_workspace_bytes=cost.backward_workspace_bytes,
                inference_workspace_bytes=cost.inference_workspace_bytes,
                backward_reused_bytes=cost.backward_reused_bytes,
                forward_spread_ns=cost.forward_spread_ns,
                backward_spread_ns=cost.backward_spread_ns if op.differentiable else 0,
                remark="; ".join(filter(None, remarks)),
            )
        )
    return tuple(rows)
