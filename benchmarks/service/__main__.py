"""Prints how fast decisions and answers are: `python3 -m benchmarks.service`."""

import argparse
import os

from benchmarks.environment import environment
from benchmarks.service.decisions import SIZES, TARGETS, extended, percentile, rows, step_ratios
from benchmarks.service.load import CLIENTS, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    quick = parser.parse_args().quick
    print(environment())
    print(f"load average {os.getloadavg()[0]:.1f} when it began\n")
    print("| GPUs | memory | wish | placed | p50 ms | p99 ms | p50 cpu ms | p99 cpu ms |")
    print("|---|---|---|---|---|---|---|---|")
    slowest: dict[int, list[float]] = {size: [] for size in SIZES}
    busy: dict[int, list[float]] = {size: [] for size in SIZES}
    for row in rows(10 if quick else 40):
        wall = [percentile(row.wall_ms, part) for part in (0.5, 0.99)]
        cpu = [percentile(row.cpu_ms, part) for part in (0.5, 0.99)]
        placed = f"{row.placed}/{len(row.wall_ms)}"
        cells = " | ".join(f"{value:.0f}" for value in (*wall, *cpu))
        print(f"| {row.devices} | {row.memory} | {row.wish} | {placed} | {cells} |", flush=True)
        slowest[row.devices] += row.wall_ms
        busy[row.devices] += row.cpu_ms
    print()
    for devices, times in slowest.items():
        p99, cpu99 = percentile(times, 0.99), percentile(busy[devices], 0.99)
        says = f"{devices} GPUs, all wishes: p99 {p99:.0f} ms, {cpu99:.0f} ms of processor time"
        if target := TARGETS.get(devices):
            met = ["met" if value < target else "not met" for value in (p99, cpu99)]
            says += f"; target {target} ms: {met[0]}, by processor time {met[1]}"
        print(says)
    for devices in (8, 64):
        ratios = step_ratios(6 if quick else 20, devices)
        print(
            f"{devices} GPUs: step of a fast decision over solve(effort='fast') on all that is "
            f"left: median {percentile(ratios, 0.5):.3f}, worst {ratios[-1]:.3f}"
        )
    print("\n| extender, 64 GPUs | answers | p50 ms | p99 ms |")
    print("|---|---|---|---|")
    for name, times in extended(25 if quick else 100).items():
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        print(f"| {name} | {len(times)} | {p50:.1f} | {p99:.1f} |", flush=True)
    print(f"\n| request, {CLIENTS} clients, 2 workers, 64 GPUs | per second | p50 ms | p99 ms |")
    print("|---|---|---|---|")
    for load in loads(1 if quick else 8):
        p50, p99 = (percentile(load.ms, part) for part in (0.5, 0.99))
        rate = len(load.ms) / load.seconds
        print(f"| {load.what} | {rate:.0f} | {p50:.1f} | {p99:.1f} |", flush=True)


if __name__ == "__main__":
    main()
