"""Writes the environment into every result file."""

from typing import Any

from benchmarks.environment import environment


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:  # noqa: ARG001 (pytest passes by name)
    machine_info["environment"] = environment()
