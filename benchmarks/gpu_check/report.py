"""The page at the end of a run: environment, a table of all rows, and ten tracked numbers.

The numbers are those to compare from run to run, and from one GPU to another. Two of them stand for
guesses in the clock, which are beside them.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

Row = dict[str, Any]

_FACTS: Final = ("torch", "cuda", "cudnn", "allocator", "python", "system", "cores", "commit")
# Figures that the table does not show: they are the JSON's.
_WIDE: Final = ("gpus", "versions", "settings", "driver", "processes", "text")
_COMMON: Final = ("step", "case", "status", "seconds", "error")
# In `records/cluster.py` and `probing/graph_launches.py`; not imported, since a run whose
# steps all fail, because Baechi is not installed, has a page, too.


def unusable(rows: Sequence[Row]) -> bool:
    """Whether the environment has been looked at, and no GPU can be used."""
    return any(
        (row["step"], row["case"]) == ("environment", "torch") and row["status"] != "ok"
        for row in rows
    )


def page(rows: Sequence[Row], seconds: float) -> str:
    """The whole page as text."""
    steps = list(dict.fromkeys(row["step"] for row in rows))  # some run together
    rows = sorted(rows, key=lambda row: steps.index(row["step"]))
    parts = [*_environment(rows), "", *_table(rows), "", *_counts(rows)]
    if not unusable(rows):
        parts += ["", "Ten tracked numbers", *_tracked(rows)]
    return "\n".join([*parts, "", f"{len(rows)} rows in {seconds:.0f} s", ""])


def _environment(rows: Iterable[Row]) -> list[str]:
    found: Row = {}
    for row in rows:
        if row["step"] == "environment":
            found |= {key: value for key, value in row.items() if key not in _COMMON}
    gpus = [
        f"{gpu['name']}, {gpu['sms']} SMs, {gpu['free_bytes'] / 2**30:.1f} of "
        f"{gpu['total_bytes'] / 2**30:.1f} GiB free, peers {gpu['peers']}"
        for gpu in found.get("gpus", ())
    ]
    return [
        f"gpu-check on {found.get('gpu', 'no GPU')}"
        + (" (emulated: times mean nothing)" if found.get("emulated") else ""),
        *(f"  cuda:{index}  {text}" for index, text in enumerate(gpus)),
        *(f"  driver  {row}" for row in found.get("driver", ())),
        *(f"  {key}  {found[key]}" for key in _FACTS if key in found),
        *(f"  {name}  {version}" for name, version in found.get("versions", {}).items()),
        *(f"  {name}={value}" for name, value in found.get("settings", {}).items()),
        *(f"  other process on a GPU  {row}" for row in found.get("processes", ())),
        *(f"  {line}" for line in str(found.get("text", "")).splitlines()),
    ]


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [f"{'step':12} {'status':8} {'s':>6}  case"]
    for row in rows:
        figures = "  ".join(
            f"{key} {_shown(value)}"
            for key, value in row.items()
            if key not in _COMMON and key not in _WIDE
        )
        text = "  ".join(filter(None, (row["case"], figures, row.get("error"))))
        lines.append(f"{row['step']:12} {row['status']:8} {row['seconds']:6.1f}  {text}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)


def _counts(rows: Iterable[Row]) -> list[str]:
    """A line per step: how many rows of each status."""
    steps: dict[str, Counter[str]] = {}
    for row in rows:
        steps.setdefault(row["step"], Counter())[row["status"]] += 1
    return [
        f"{step:12} " + ", ".join(f"{n} {status}" for status, n in counts.most_common())
        for step, counts in steps.items()
    ]


def _tracked(rows: Sequence[Row]) -> list[str]:
    def figures(step: str, key: str) -> list[float]:
        return [float(row[key]) for row in rows if row["step"] == step and row.get(key) is not None]

    def one(step: str, key: str) -> str:
        found = figures(step, key)
        return f"{found[0]:.1f} us" if found else "-"

    def spread(values: Sequence[float]) -> str:
        if not values:
            return "-"
        return f"median {statistics.median(values):.1%}, worst {max(values):.1%}"

    errors = [abs(error) for error in figures("prediction", "graphs_error")]
    eager = figures("prediction", "eager_measured_over_predicted")
    reserved = figures("prediction", "reserved_over_room")
    ratios = figures("one-graph", "best_lanes_over_one_graph")
    wrong = sum(
        row["status"] not in ("ok", "skip")
        for row in rows
        if row["step"] in ("contracts", "layouts", "values", "races", "ecosystem", "compile")
    )
    pair = f"{one('host', 'segment_forward_us')}, {one('host', 'segment_backward_us')}"
    return [
        f" 1  host, an operator                     {one('host', 'operator_us')}",
        f" 2  host, a segment, forward, backward    {pair}",
        f" 3  host, a hand-over, to another GPU      {one('host', 'handover_us')},"
        f" {one('several', 'crossing_us')} (probe: {one('host', 'probed_us')})",
        f" 4  host, a CUDA graph                    {one('host', 'graph_launch_us')}",
        f" 5  timer against CUPTI                   {spread(figures('timer', 'off_by'))}",
        f" 6  prediction as graphs                  {spread(errors)}",
        " 7  eager, measured over predicted        "
        + (f"{min(eager):.2f} to {max(eager):.2f}" if eager else "-"),
        " 8  memory held over what is left for it  "
        + (f"{max(reserved):.2f}" if reserved else "-"),
        " 9  lanes over one graph with copies      "
        + (f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"),
        f"10  rows of values that are not right     {wrong}",
    ]
