"""Claim: `import baechi` takes under 100 ms and loads neither torch nor scipy nor numpy.

Each round starts a bare interpreter, and then one that imports baechi; the figure is the difference
of the medians. The time is told, not asserted; what is loaded is asserted.
"""

import statistics
import subprocess
import sys
import time
from typing import Any

ROUNDS = 15
HEAVY = ("torch", "scipy", "numpy", "networkx", "highspy", "rich", "typer")


def run(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def test_import_is_light(benchmark: Any) -> None:
    bare: list[float] = []
    code = f"import baechi, sys; assert not set({HEAVY!r}) & set(sys.modules)"
    benchmark.pedantic(
        run, (code,), setup=lambda: bare.append(run("pass")), rounds=ROUNDS, warmup_rounds=2
    )
    bare_s = statistics.median(bare[-ROUNDS:])
    import_ms = 1e3 * (benchmark.stats.stats.median - bare_s)
    benchmark.extra_info.update(bare_interpreter_s=bare_s, import_ms=import_ms)
    print(f"import baechi: {import_ms:.1f} ms beyond a bare interpreter ({1e3 * bare_s:.1f} ms)")
