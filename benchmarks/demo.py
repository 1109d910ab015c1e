"""`baechi demo`: real models that fit no single device are split, trained and compared.

Every placer places the same graph on logical CPU devices whose memory is too small for the whole,
and the model trains on them: predicted step and peaks stand beside measured ones. All results are
compared with the unsplit model's, from the same weights and data, with the threads of one device.

Then GPT-2 trains in micro-batches, which keep two devices at work, beside the loop over them.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

import baechi
from baechi.cli.console import import_file, say
from baechi.cli.console import show as draw
from baechi.errors import ExecutionError, InfeasibleError, InputError
from baechi.records.cluster import Cluster, Link
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement, Schedule
from baechi.reporting import Plan, error_text, write_html, write_trace
from baechi.reporting.figures import require_plotly
from baechi.units import format_bytes, format_ns

PLACERS: Final = ("m-topo", "m-etf", "m-sct", "auto")
STEPS: Final = 5
COSTS: Final = "Step, peak memory of each device, and bytes moved"
FALLBACK: Final = "{} alone found none that fits; this is {}'s."
RESULTS: Final = "The same training: equality with the unsplit model, losses"
BATCHES: Final = "A step of {} micro-batches: {} devices beside the loop on one"
Example = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Job(NamedTuple):
    """A model to show; devices have a share of the memory that the whole needs on one."""

    name: str
    title: str
    build: Callable[[], Example]  # model, args, kwargs
    loss: Callable[[Any], Any]  # of the model's output
    optimizer: str
    learning_rate: float
    devices: int
    share: float = 0.7
    microbatches: int = 1
    steps: int = STEPS

    @property
    def losses(self) -> tuple[str, ...]:
        """The titles of the columns of losses."""
        return tuple(f"loss {step + 1}" for step in range(self.steps))


def demo_jobs(*, quick: bool = False) -> tuple[Job, ...]:
    """The models of the demo; small ones of the same make if `quick`."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"the demo needs {package}: pip install {package}")
    title = "GPT-2, 2 layers, 64 wide" if quick else "GPT-2 small, 12 layers, 768 wide"
    inception = partial(_inception, 96 if quick else 299)
    rows = partial(_gpt2, quick=quick), lambda output: output.loss, "adamw", 3e-4
    alone = Job("gpt2", title, *rows, devices=3)
    return (
        alone,
        Job("inception", "Inception-v3", inception, _cross_entropy, "momentum", 1e-3, devices=2),
        alone._replace(
            name="gpt2-microbatches",
            title=f"{title}, in 4 micro-batches",
            build=partial(_gpt2, 8, quick=quick),
            devices=2,
            share=0.85,  # with less, hardly two of them are under way at once
            microbatches=4,
            steps=2,
        ),
    )


def _gpt2(sequences: int = 2, *, quick: bool) -> Example:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    if quick:
        settings |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
        settings |= {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**settings, use_cache=False)
    ids = torch.randint(0, config.vocab_size, (sequences, 64))
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers warns that it guesses this
    return model, (ids,), {"labels": ids}


def _inception(size: int) -> Example:
    import torch

    models = import_file(Path(__file__).with_name("models") / "inception_v3.py")
    return models.inception_v3(num_classes=1000), (torch.randn(2, 3, size, size),), {}


def _cross_entropy(logits: Any) -> Any:
    """The loss against fixed labels, computed by the caller as in any training loop."""
    import torch

    labels = torch.arange(len(logits)) % logits.shape[1]
    return torch.nn.functional.cross_entropy(logits, labels)


def run(out: Path, *, quick: bool = False) -> None:
    """Shows the models and writes their reports into `out`."""
    jobs = demo_jobs(quick=quick)
    require_plotly()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make folder {out}: {error.strerror}.") from error
    started = time.perf_counter()
    for job in jobs:
        (show if job.microbatches == 1 else show_microbatches)(job, out)
    draw(Rule())
    say(f"Done in {time.perf_counter() - started:.0f} s. What to look at next:\n")
    for job in jobs:
        path = out / job.name
        say(f"  {path}.html: the placement of {job.title}; open it in a browser")
        say(f"  {path}.trace.json: its step; load it at https://ui.perfetto.dev")
    name = jobs[0].name
    say("\nThe same without torch, from the files:\n")
    say(f"  cd {out}")
    say(f"  baechi solve {name}.graph.json {name}.cluster.json --placer m-etf")


def show(job: Job, out: Path) -> None:
    """Places, runs, trains and reports one model; raises where the results differ."""
    from baechi.torch_support.torch_devices import torch_threads

    model, args, kwargs, threads = _begin(job)
    with Console().status("tracing"):
        traced = baechi.trace(model.train(), args, kwargs)
    graph, alone, cluster = _problem(job, traced, threads)
    costs = _table(COSTS, "placer", "", "step", *(d.name for d in cluster.devices), "moved")
    results = _table(RESULTS, "placer", "placed in", "equal", *job.losses)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    # By placement, since placers may find the same.
    known: dict[object, tuple[str, Schedule, Training, bool]] = {}
    wrong, remarks = [], []
    with Console().status("training, unsplit") as status, torch_threads(threads):
        reference = _train(job, model, args, kwargs)
        _add(costs, "unsplit", (alone.makespan_ns,), (reference.step_ns,))
        costs.add_row("one device", "refused")
        results.add_row("unsplit", "", "", *reference.losses)
        for placer in PLACERS:
            status.update(f"training, {placer}")
            model.load_state_dict(start)
            before = time.perf_counter()
            placement = baechi.solve(graph, cluster, placer=placer)
            placed_in = f"{(time.perf_counter() - before) * 1e3:.0f} ms"
            key = placement.devices, placement.order
            if key in known:
                equal = f"as {known[key][0]}"
            else:
                placed = baechi.apply(
                    traced, placement, graph=graph, cluster=cluster, threads_per_device=threads
                )
                training = _train(job, placed, args, kwargs)
                placed.unplace()
                equal, is_close = _compare(training.values, reference.values)
                training = training._replace(values={})  # the tensors may go
                schedule = baechi.simulate(graph, cluster, placement)
                known[key] = placer, schedule, training, is_close
            _, schedule, training, is_close = known[key]
            wrong += [] if is_close else [placer]
            moved = sum(graph.tensors[transfer.tensor].nbytes for transfer in schedule.transfers)
            found = training.measured
            _add(
                costs,
                placer,
                (schedule.makespan_ns, *schedule.peak_bytes, moved),
                (found.step_ns, *found.peak_bytes, found.moved_bytes),
            )
            results.add_row(placer, placed_in, equal, *training.losses)
            if "fallback" in placement.stats:
                remarks.append(FALLBACK.format(placer, placement.stats["fallback"]))
    draw(costs)
    draw(results)
    for remark in remarks:
        say(remark)
    _write(job, out, Plan(graph, cluster, placement, schedule, traced, found), placement)
    if wrong:
        raise ExecutionError(
            f"{job.title} placed by {', '.join(wrong)} does not equal the unsplit model."
        )


def show_microbatches(job: Job, out: Path) -> None:
    """Steps of micro-batches over devices, beside the loop over them unsplit; raises as `show`."""
    from baechi.torch_support.torch_devices import torch_threads

    model, args, kwargs, threads = _begin(job)
    first, named = _cut(job, args, kwargs)[0]
    with Console().status("tracing"):
        traced = baechi.trace(model.train(), first, named)
    graph, alone, cluster = _problem(job, traced, threads)
    names = [device.name for device in cluster.devices]
    costs = _table(BATCHES.format(job.microbatches, job.devices), "", "", "step", *names, "moved")
    results = _table(RESULTS, "", "equal", *job.losses)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with Console().status("training, unsplit") as status, torch_threads(threads):
        reference = _train(job, model, args, kwargs)
        _add(costs, "loop", (job.microbatches * alone.makespan_ns,), (reference.step_ns,))
        costs.add_row("one device", "refused")
        results.add_row("loop", "", *reference.losses)
        status.update("training, in micro-batches")
        model.load_state_dict(start)
        placed = baechi.place(
            *(model, cluster),
            optimizer=job.optimizer,
            threads_per_device=threads,
            microbatches=job.microbatches,
            progress=False,
        )
        training = _train(job, placed, args, kwargs)
        graph, schedule, found = placed.graph, placed.schedule, training.measured
        plan = Plan(graph, cluster, placed.placement, schedule, placed.traced, found)
        _add(
            costs,
            "step",
            (schedule.makespan_ns, *schedule.peak_bytes, plan.moved_bytes),
            (found.step_ns, *found.peak_bytes, found.moved_bytes),
        )
        equal, is_close = _compare(training.values, reference.values)
        results.add_row("step", equal, *training.losses)
    draw(costs)
    draw(results)
    ratio = found.step_ns / reference.step_ns
    say(f"Measured, a step takes {ratio:.2f} of the loop's time.")
    _write(job, out, plan, placed.placement)
    if not is_close:
        raise ExecutionError(f"{job.title} does not equal the loop over the unsplit model.")


def _begin(job: Job) -> tuple[Any, tuple[Any, ...], dict[str, Any], int]:
    """The model, arguments of its whole batch, and the threads of a device."""
    import torch

    draw(Rule(f"[bold]{job.title}"))
    torch.manual_seed(0)
    return *job.build(), max(1, torch.get_num_threads() // job.devices)


def _cut(
    job: Job, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every micro-batch."""
    if job.microbatches == 1:
        return [(args, kwargs)]  # ids that are labels, too, stay one tensor
    rows = [value.chunk(job.microbatches) for value in (*args, *kwargs.values())]
    return [
        (row[: len(args)], dict(zip(kwargs, row[len(args) :], strict=True)))
        for row in zip(*rows, strict=True)
    ]


def _problem(job: Job, traced: Any, threads: int) -> tuple[OpGraph, Schedule, Cluster]:
    """A measured step, its schedule on one device without a limit, and devices too small for it."""
    say(f"Traced by {traced.rung}: {len(traced.ops)} operators.")
    profile = baechi.profile(traced, device="cpu", threads=threads)
    graph: OpGraph = traced.graph(profile, training=True, optimizer=job.optimizer)
    ample = Cluster.uniform(1, 2**62, Link(latency_ns=0, bytes_per_s=10**9))
    alone = baechi.simulate(graph, ample, baechi.solve(graph, ample, placer="single"))
    share_bytes = int(alone.peak_bytes[0] * job.share)
    cluster: Cluster = baechi.probe({f"cpu:{index}": share_bytes for index in range(job.devices)})
    needed, limit = format_bytes(alone.peak_bytes[0]), format_bytes(share_bytes)
    names = ", ".join(device.name for device in cluster.devices)
    have = f"{names} have {limit} each."
    say(f"Training it with {job.optimizer} needs {needed} on one device; {have}")
    try:
        baechi.solve(graph, cluster, placer="single", microbatches=job.microbatches)
    except InfeasibleError as error:
        say(f"One device: {error}", style="yellow")
    return graph, alone, cluster


class Training(NamedTuple):
    """All losses, and the first step's outputs and gradients."""

    losses: list[str]
    values: dict[str, Any]
    step_ns: int
    measured: Any  # by `PlacedModule.measure`


def _train(job: Job, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Training:
    """Steps from the model's present weights; a placed model's are measured afterwards."""
    import torch

    if job.optimizer == "momentum":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    losses, times = [], []
    values: dict[str, Any] = {}
    for _ in range(job.steps):
        optimizer.zero_grad()
        before = time.perf_counter_ns()
        output, loss = _step(job, model, args, kwargs)
        times.append(time.perf_counter_ns() - before)
        losses.append(f"{loss.item():.4f}")
        if not values:
            named = output.items() if isinstance(output, dict) else [("output", output)]
            values = {name: value.detach().clone() for name, value in named}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    values[f"gradient of {name}"] = parameter.grad.clone()
            del named
        del output, loss
        optimizer.step()
    optimizer.zero_grad()
    measured = model.measure(job.steps, optimizer=optimizer) if hasattr(model, "measure") else None
    return Training(losses, values, int(statistics.median(times)), measured)


def _step(job: Job, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward and backward of the batch, or of its micro-batches: the output and the loss."""
    if job.microbatches > 1 and hasattr(model, "step"):
        loss = model.step(*args, **kwargs)
        return {"loss": loss}, loss
    parts = []
    for some, named in _cut(job, args, kwargs):
        output = model(*some, **named)
        loss = job.loss(output) / job.microbatches
        loss.backward()
        parts.append(loss)
    loss = sum(parts[1:], parts[0])
    return ({"loss": loss} if len(parts) > 1 else output), loss


def _compare(placed: dict[str, Any], reference: dict[str, Any]) -> tuple[str, bool]:
    """The largest difference of any output or gradient, and whether all are close."""
    import torch

    if placed.keys() != reference.keys():
        return "[red]off by inf", False
    difference = max(float((placed[name] - reference[name]).abs().max()) for name in placed)
    try:
        torch.testing.assert_close(placed, reference)
    except AssertionError:
        return f"[red]off by {difference:.0e}", False
    return f"to {difference:.0e}" if difference else "bitwise", True


def _add(table: Table, name: str, predicted: Sequence[int], measured: Sequence[int]) -> None:
    """Three rows: what was predicted, what was measured, and the error in percent."""
    rows = ((name, "predicted", predicted), ("", "measured", measured))
    for first, what, (step_ns, *sizes) in rows:
        table.add_row(first, what, format_ns(step_ns), *map(format_bytes, sizes))
    table.add_row("", "error", *map(error_text, predicted, measured))


def _write(job: Job, out: Path, plan: Plan, placement: Placement) -> None:
    """The page, the trace and the files of one placement."""
    path = str(out / job.name)
    write_html(f"{path}.html", plan, title=f"{job.title} on {job.devices} devices")
    write_trace(f"{path}.trace.json", plan)
    for value in (plan.one.graph, plan.cluster, placement):
        baechi.dump(value, f"{path}.{type(value).__name__.removeprefix('Op').lower()}.json")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False  # three devices in 80 columns
    for column in columns:
        justify: Any = "left" if column in {"placer", ""} else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    return table
