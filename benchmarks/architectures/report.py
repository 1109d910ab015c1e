"""The table of what was placed, and its rows as they are."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.architectures.catalog import family
from benchmarks.architectures.forms import described
from benchmarks.environment import environment

MIN_ACCOUNT = 100_000  # with fewer bytes at the peak, a few small tensors more are some percent


def write_table(
    rows: Sequence[dict[str, Any]], folder: Path, forms: Sequence[str] = (), found: bool = False
) -> None:
    """`table.md` and `rows.json` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(list(rows), indent=1) + "\n")
    (folder / "table.md").write_text("\n".join(_lines(rows, forms, found)) + "\n")


# The calls of an option, and how they are equal.
CALLS = {
    "sizes": "in every bit at four batch sizes",
    "generate": "in every token and bit of the scores: greedy, sampled and with three beams",
}


def write_calls(rows: Sequence[dict[str, Any]], folder: Path, option: str) -> None:
    """`sizes.md` or `generate.md` in the folder: how many plans these calls took."""
    folder.mkdir(parents=True, exist_ok=True)
    tried = [row for row in rows if "unbuilt" not in row and row["plans"]]
    differing = [row for row in tried if _differs(row)]
    equal = [row for row in tried if not row["problems"]]
    two = [row for row in equal if max(row["plans"]) <= 2]
    facts = ", ".join(f"{key} {value}" for key, value in environment().items())
    lines = [
        f"{len(equal)} of {len(tried)} architectures equal {CALLS[option]}, "
        f"{len(two)} of them with at most two plans; {len(differing)} differ. "
        f"{len(rows) - len(tried)} more did not run here.",
        "",
        f"`python3 -m benchmarks.architectures --{option}`; {facts}",
        "",
        "| architecture | plans | result |",
        "|---|---|---|",
    ]
    for row in rows:
        said = [row["unbuilt"]] if "unbuilt" in row else row["problems"] or row["skipped"]
        said = list(dict.fromkeys(said or row["remarks"] or ["equal"]))
        plans = ", ".join(map(str, row.get("plans", [])))
        lines.append(f"| {row['name']} | {plans} | {'; '.join(map(_short, said))} |")
    (folder / f"{option}.md").write_text("\n".join(lines) + "\n")


def _lines(rows: Sequence[dict[str, Any]], forms: Sequence[str], found: bool) -> list[str]:
    tried = [row for row in rows if "unbuilt" not in row]
    equal = [row for row in tried if not row["problems"]]
    differing = [row for row in tried if _differs(row)]
    facts = ", ".join(f"{key} {value}" for key, value in environment().items())
    option = " --found" if found else ""
    option += f" --form {','.join(forms)}" if forms else ""
    return [
        f"{len(equal)} of {len(tried)} architectures placed and equal in every bit; "
        f"{len(tried) - len(equal) - len(differing)} refused with a reason; "
        f"{len(differing)} differ. "
        f"{len(rows) - len(tried)} more did not run here.",
        "",
        *([f"Form: {described(forms)}.", ""] if forms else []),
        f"`python3 -m benchmarks.architectures{option}`; {facts}",
        "",
        "| family | architecture | operators | how it was traced | result | lowest peak |",
        "|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
    ]


def _differs(row: dict[str, Any]) -> bool:
    """True if a problem is more than an error of Baechi's, by whose name it would begin."""
    return not all(re.match(r"\w+Error: ", problem) for problem in row["problems"])


def _line(row: dict[str, Any]) -> str:
    cells = [family(row["name"]), row["name"]]
    if "unbuilt" in row:
        return "| " + " | ".join([*cells, "", "", f"not run: {_short(row['unbuilt'])}", ""]) + " |"
    shares = [was / is_ - 1 for was, is_ in row["peaks"] if is_ > MIN_ACCOUNT]
    lowest = f"{min(shares):+.1%}" if shares else ""
    result = "; ".join(dict.fromkeys(map(_short, row["problems"]))) or "equal"
    rungs = "; ".join(dict.fromkeys(row["rungs"]))
    return "| " + " | ".join([*cells, str(row["ops"]), rungs, result, lowest]) + " |"


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0]
    if len(lines) > 2:
        # A TraceError has what each rung says between its first line and its last, the advice. The
        # first rung says most, after the names of all its attempts that ended alike.
        attempts, colon, said = lines[1].partition(": ")
        reason += f" {attempts.rpartition('; ')[2]}{colon}{said}"
    return reason[:200].replace("|", "/")
