"""The steps, in the order in which they run: what decides most comes first."""

from dataclasses import dataclass, field
from typing import Final, final


@final
@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        name: What `--only` takes.
        module: Has `run(check)`.
        limit_s: What it may take at most. All limits together are above the ten minutes; a step
            that finds too little time left is a row, too.
        timed: Whether its figures are times, so that nothing else may run beside it.
        claim: What `--list` says.
        environment: Variables that its process has beside those of the caller.
    """

    name: str
    module: str
    limit_s: float
    claim: str
    timed: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _step(
    name: str, module: str, limit_s: float, claim: str, *, timed: bool = False, **environment: str
) -> Step:
    return Step(name, f"benchmarks.gpu_check.{module}", limit_s, claim, timed, environment)


# What most steps import: the process that they are forked from has them.
IMPORTED: Final = ("torch._dynamo", "baechi.placing", "pytest")
# The limits are twice what a machine with an H200 and a slow Python took (`benchmarks/results`).
STEPS: Final = (
    _step("environment", "machine", 40, "GPUs, driver, torch, CUDA, settings, other processes"),
    _step(
        *("host", "host", 60, "us of the host per operator, segment, hand-over, graph and call"),
        timed=True,
    ),
    _step("timer", "timer", 60, "the timer's readings against CUPTI's", timed=True),
    _step(
        *("overlap", "overlap", 40, "what two streams gain, by size; how many run side by side"),
        timed=True,
    ),
    _step(
        *("prediction", "prediction", 200, "predicted, measured, allocated, reserved; four models"),
        timed=True,
    ),
    _step(
        *("one-graph", "one_graph", 120, "lanes against eager and against one sequential graph"),
        timed=True,
    ),
    _step("contracts", "tests", 60, "what the runtime relies on in torch holds"),
    _step("layouts", "tests", 60, "a model traced on the CPU runs on the GPU, whatever kernels do"),
    _step("values", "tests", 240, "models on lanes, eager and as graphs, equal the unsplit ones"),
    _step("races", "tests", 90, "no access without a wait, by torch's sanitizer and by spins"),
    _step("captures", "captures", 240, "what torch's operators' captures make of the rules"),
    _step("ranks", "tests", 120, "two processes, on two GPUs or on one, give the loop's values"),
    _step(
        *("expandable", "tests", 90, "values where torch's segments of memory grow"),
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    ),
    _step("ecosystem", "ecosystem", 60, "generate, and transformers' Trainer, on a placed model"),
    _step("compile", "compiled", 120, "compiled segments give the values, and compile once"),
    _step("several", "several", 60, "links, contexts and values of several GPUs", timed=True),
)
