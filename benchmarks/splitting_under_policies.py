"""What splitting adds to every policy, and where it loses.

    python3 -m benchmarks.splitting_under_policies --seeds 10

The cluster and the jobs are those of `benchmarks/residual`: 16 GPUs of which others hold parts, and
training jobs of 21 models that arrive at random. Jobs have one of four owners, and a third of them
no guarantee. A restart costs ten seconds. Every policy runs three times:

- whole: on the GPUs that nobody else holds a part of, split as users split their models;
- parts: on all GPUs, one job on each besides those others, split as users split their models;
- split: the same, but a model is split anew over what is left, where it fits no single GPU.

Policies that put two jobs on a GPU do so in all three. Those that choose sizes have a choice in the
third only: without splitting, a model runs on as many GPUs as its user asks for. Three are left
out: `muri-s` and `muri-l` interleave stages, which these models do not have, and `miger` chooses
among slices, which these GPUs do not have.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final, final
from xml.sax.saxutils import escape

from benchmarks.environment import environment
from benchmarks.residual.__main__ import RESULTS as RESIDUAL
from benchmarks.residual.__main__ import kinds_of
from benchmarks.residual.names import KIND
from benchmarks.residual.statistics import interval
from benchmarks.residual.workload import TENANTS, fleet_of, jobs_of
from rich.progress import Progress

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import Exclusive, Grant, Job, Sharing, TimeSliced
from baechi.cluster_simulation.placement_schemes import (
    LISTED,
    AsPlaced,
    Baechi,
    FirstFit,
    Scheme,
)
from baechi.cluster_simulation.policies import (
    DEFAULTS,
    POLICIES,
    policy_named,
    scheme_named,
    sharing_named,
)
from baechi.cluster_simulation.policy_support.allocation import AllocatingPolicy
from baechi.cluster_simulation.results import summary
from baechi.cluster_simulation.simulator import simulate_cluster

RESULTS = Path(__file__).parent / "results" / "splitting-under-policies"
LOADS: Final = {"light": 0.3, "at capacity": 0.9, "over": 1.2}
ARMS: Final = ("whole", "parts", "split")
RESTART_S: Final = 10
FIRST: Final = "fjf"  # the first that fits, which all are compared with
OWNERS: Final = 4
LEFT_OUT: Final = ("muri-s", "muri-l", "miger")
# They choose how many GPUs a job has; a user's own split is for as many as the user asks for.
SIZES: Final = ("optimus", "pollux", "elastic-srjf", "lyra", "heet", "ones", "powerflow")


@final
@dataclass(frozen=True)
class Row:
    """What one simulation tells. Times are seconds."""

    policy: str
    arm: str
    load: str
    seed: int
    mean_s: float
    p99_s: float
    makespan_s: float
    preemptions: int
    refused: int
    split: int


def whole_gpus(fleet: Fleet) -> Fleet:
    """Those that nobody else holds a part of."""
    free = [gpu for gpu in fleet.gpus if not gpu.held_bytes]
    nodes = {node: rank for rank, node in enumerate(dict.fromkeys(gpu.node for gpu in free))}
    return Fleet(tuple(replace(gpu, node=nodes[gpu.node]) for gpu in free))


def with_owners(jobs: Iterable[Job], seed: int) -> list[Job]:
    """The jobs, with owners and classes."""
    draw = Random(f"owners {seed}")
    return [
        replace(job, owner=f"owner{draw.randrange(OWNERS)}", priority=draw.choice((-1, 0, 0)))
        for job in jobs
    ]


def arm_of(policy: str, arm: str) -> tuple[Scheme, Sharing]:
    """How a policy places jobs, and how they share GPUs."""
    where, how = DEFAULTS.get(policy, ("first-fit", "exclusive"))
    scheme = FirstFit() if where == "baechi" else scheme_named(where)
    assert scheme is not None
    sharing = sharing_named(how, 2)
    if arm != "whole" and isinstance(sharing, Exclusive):
        sharing = TimeSliced(1)  # alone among ours, besides what others hold
    return Baechi(effort=LISTED) if arm == "split" else AsPlaced(scheme), sharing


def row_of(
    policy: str,
    arm: str,
    load: str,
    seed: int,
    jobs: Sequence[Job],
    fleet: Fleet,
    memo: dict[object, Grant | None],
) -> Row:
    """Simulates."""
    scheme, sharing = arm_of(policy, arm)
    chosen = policy_named(policy)
    pairs = isinstance(chosen, AllocatingPolicy) and sharing.most > 1
    if arm != "split" and (pairs or policy in SIZES):
        # A job without a graph takes as many GPUs as it asks for, or half of a pair.
        jobs = [replace(job, graph=None, placement=None) for job in jobs]
    result = simulate_cluster(
        jobs,
        whole_gpus(fleet) if arm == "whole" else fleet,
        chosen,
        scheme,
        sharing=sharing,
        restart_cost=RESTART_S,
        memo=memo,
    )
    told = summary(result)
    return Row(
        policy,
        arm,
        load,
        seed,
        told["mean_jct"],
        told["p99_jct"],
        told["makespan"],
        told["preemptions"],
        len(result.refused),
        sum(len(row.gpus) > row.job.gpus for row in result.outcomes),
    )


def cell(rows: Sequence[Row], policy: str, arm: str, load: str) -> list[float]:
    """The mean completion times of some simulations, by seed."""
    found = [row for row in rows if (row.policy, row.arm, row.load) == (policy, arm, load)]
    return [row.mean_s for row in sorted(found, key=lambda row: row.seed)]


def change(rows: Sequence[Row], policy: str, base: str, load: str) -> tuple[float, float]:
    """By how much splitting changes the mean completion time, in %, seed by seed."""
    pairs = zip(cell(rows, policy, "split", load), cell(rows, policy, base, load), strict=True)
    return interval([100 * (mine / theirs - 1) for mine, theirs in pairs])


def beside(rows: Sequence[Row], policy: str, other: str, load: str) -> tuple[float, float]:
    """By how much longer jobs take than under another policy, both with splitting, in %."""
    pairs = zip(cell(rows, policy, "split", load), cell(rows, other, "split", load), strict=True)
    return interval([100 * (mine / theirs - 1) for mine, theirs in pairs])


def verdict(mean: float, half: float) -> str:
    """Whether splitting pays, as far as the seeds can tell."""
    if mean + half < 0:
        return "pays"
    return "loses" if mean - half > 0 else "no difference"


def table(rows: Sequence[Row], policies: Sequence[str]) -> str:
    """A table per load, the least mean completion time with splitting first."""
    lines = []
    for load, value in LOADS.items():
        lines += [
            "",
            f"{load}, load {value:g}: mean completion time in minutes",
            "",
            "| policy | whole | parts | split | split against whole | against parts | it |",
            "|---|---|---|---|---|---|---|",
        ]
        for policy in sorted(policies, key=lambda name: fmean(cell(rows, name, "split", load))):
            told = [interval([s / 60 for s in cell(rows, policy, arm, load)]) for arm in ARMS]
            changes = [change(rows, policy, base, load) for base in ARMS[:2]]
            shown = [
                *(f"{mean:.0f} ± {half:.0f}" for mean, half in told),
                *(f"{mean:+.0f} ± {half:.0f} %" for mean, half in changes),
            ]
            lines.append(f"| `{policy}` | {' | '.join(shown)} | {verdict(*changes[1])} |")
    return "\n".join(lines)


def overview(rows: Sequence[Row], policies: Sequence[str]) -> str:
    """A row per policy: its minutes with splitting, and by how much that changes those on parts."""
    lines = [
        f"| policy | {' | '.join(LOADS)} | splitting when over | beside `{FIRST}` when over |",
        f"|---|{'---|' * len(LOADS)}---|---|",
    ]
    for policy in sorted(policies, key=lambda name: fmean(cell(rows, name, "split", "over"))):
        cells = []
        for load in LOADS:
            mean, half = change(rows, policy, "parts", load)
            minutes = fmean(cell(rows, policy, "split", load)) / 60
            cells.append(f"{minutes:.0f} min, {mean:+.0f} ± {half:.0f} %")
        cells.append(verdict(*change(rows, policy, "parts", "over")))
        mean, half = beside(rows, policy, FIRST, "over")
        cells.append("" if policy == FIRST else f"{mean:+.0f} ± {half:.0f} %")
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


_WIDE, _LEFT, _TOP, _LINE, _GAP = 250, 150, 80, 19, 30


def svg(rows: Sequence[Row], policies: Sequence[str]) -> str:
    """By how much splitting changes the mean completion time, policy by policy and load by load."""
    order = sorted(policies, key=lambda name: change(rows, name, "parts", "at capacity")[0])
    width = _LEFT + len(LOADS) * (_WIDE + _GAP)
    high = _TOP + _LINE * len(order) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{high}" fill="white"/>',
        '<text x="10" y="24" font-size="15">Change of the mean completion time by splitting, % '
        "(bars: 95 % intervals over seeds)</text>",
        '<text x="10" y="44" fill="#d55e00">against jobs of whole GPUs</text>',
        '<text x="190" y="44" fill="#0072b2">against jobs on parts of GPUs, not split</text>',
    ]
    for number, policy in enumerate(order):
        y = _TOP + _LINE * number + 14
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(policy)}</text>')
    for panel, (load, value) in enumerate(LOADS.items()):
        left = _LEFT + panel * (_WIDE + _GAP)
        low, top = -100.0, 75.0

        def x(percent: float, left: int = left, low: float = low, top: float = top) -> float:
            return left + _WIDE * (min(top, max(low, percent)) - low) / (top - low)

        bottom = _TOP + _LINE * len(order) + 6
        parts.append(f'<text x="{left}" y="{_TOP - 12}">{escape(load)}, load {value:g}</text>')
        for tick in (-100, -50, 0, 50):
            color = "#666" if not tick else "#ddd"
            parts.append(f'<path d="M{x(tick):.1f} {_TOP}V{bottom}" stroke="{color}"/>')
            parts.append(
                f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:+d}</text>'
            )
        for number, policy in enumerate(order):
            for base, color, down in (("whole", "#d55e00", 6), ("parts", "#0072b2", 12)):
                mean, half = change(rows, policy, base, load)
                y = _TOP + _LINE * number + down
                parts.append(
                    f'<path d="M{x(mean - half):.1f} {y}H{x(mean + half):.1f}" stroke="{color}"/>'
                )
                parts.append(f'<circle cx="{x(mean):.1f}" cy="{y}" r="3" fill="{color}"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Simulates, prints the tables, and writes them, every simulation and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--policies", default="all")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.policies.split(",")
    policies = [name for name in POLICIES if name not in LEFT_OUT]
    policies = policies if names == ["all"] else list(dict.fromkeys([FIRST, *names]))
    with Progress(disable=not sys.stderr.isatty()) as progress:
        kinds = kinds_of(RESIDUAL / "graphs", options.quick, progress)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "simulations.csv"
    rows = _read(path)
    for seed in range(options.first, options.first + options.seeds):
        known = {(row.policy, row.arm, row.load) for row in rows if row.seed == seed}
        fleet = fleet_of(seed, TENANTS, KIND)
        memo: dict[object, Grant | None] = {}
        for load, value in LOADS.items():
            jobs = with_owners(jobs_of(kinds, fleet, seed, options.jobs, value), seed)
            for policy in policies:
                for arm in ARMS:
                    if (policy, arm, load) not in known:
                        rows.append(row_of(policy, arm, load, seed, jobs, fleet, memo))
            _write(path, rows)
    text = "\n".join(
        [
            f"$ python3 -m benchmarks.splitting_under_policies {' '.join(sys.argv[1:])}",
            json.dumps(environment()),
            f"{len({row.seed for row in rows})} seeds, {options.jobs} jobs each; mean over seeds",
            "and half its 95 % interval; changes are seed by seed.",
            f"refused: {sum(row.refused for row in rows)}",
            "",
            overview(rows, policies),
            table(rows, policies),
            "",
        ]
    )
    print(text)
    (options.out / "tables.txt").write_text(text)
    (options.out / "changes.svg").write_text(svg(rows, policies))


def _read(path: Path) -> list[Row]:
    """The simulations of an earlier call that was cut short."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Row)}
    with path.open() as file:
        return [
            Row(**{name: kinds[name](text) for name, text in line.items()})  # type: ignore[operator]
            for line in csv.DictReader(file)
        ]


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


if __name__ == "__main__":
    main()
