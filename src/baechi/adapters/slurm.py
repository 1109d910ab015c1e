"""Slurm: free GPUs of its nodes, and the batch script of a job that is placed there."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from baechi.adapters.free_devices import FreeDevice
from baechi.errors import InputError
from baechi.records.device_kinds import find

# https://slurm.schedmd.com/scontrol.html and sinfo.html, "NODE STATE CODES": such take no new job.
_CLOSED: Final = frozenset(
    (
        *("BLOCKED", "DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE"),
        *("INVAL", "MAINT", "NOT_RESPONDING", "PERFCTRS", "POWERED_DOWN", "POWERING_DOWN"),
        *("REBOOT_ISSUED", "RESERVED", "UNKNOWN"),
    )
)
_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z]\w*)=(\S*)")
_GRES: Final = re.compile(r"gpu(?::([^:(,]+|\(null\)))?:(\d+)(?:\(([^)]*)\))?")
_PORT: Final = 29500  # where the ranks meet, on the first node


def slurm_devices(text: str, kinds: Mapping[str, str] | None = None) -> tuple[FreeDevice, ...]:
    """The GPUs that no job holds, of nodes that take jobs. Slurm gives GPUs out whole.

    Args:
        text: The output of `scontrol show node -d`.
        kinds: Device kinds by the types of `Gres`: `{"a100": "A100-SXM-80GB"}`, which tells how
            much memory they have. A type that is a kind's own name needs no entry; `""` is for
            GPUs without a type.

    Raises:
        InputError: The output lacks the details, or a type is of no known kind.
    """
    free = []
    for node in _nodes(text):
        name = node["NodeName"]
        if _CLOSED.intersection(re.split(r"[+*~#!%$@^-]+", node.get("State", "UNKNOWN"))):
            continue
        counts: Counter[str] = Counter()
        for kind, number, _ in _GRES.findall(node.get("Gres", "")):
            counts[kind] += int(number)
        if counts and "GresUsed" not in node:
            raise InputError(
                f"node {name!r} has no GresUsed; print the details, too: scontrol show node -d"
            )
        for kind, number, places in _GRES.findall(node.get("GresUsed", "")):
            listed = 0 if "N/A" in places else len(list(_indices(places.removeprefix("IDX:"))))
            counts["" if kind == "(null)" else kind] -= max(int(number), listed)
        for kind, left in counts.items():
            device_kind = find((kinds or {}).get(kind, kind)) if left > 0 else None
            for place in range(left):
                assert device_kind is not None
                nbytes = device_kind.memory_bytes - device_kind.context_bytes
                label = f"{kind or 'gpu'}:{place}"
                free.append(FreeDevice(name, label, nbytes, kind=device_kind.name, uid=kind))
    return tuple(free)


def batch_script(
    job: str,
    devices: Sequence[str],
    command: Sequence[str],
    *,
    options: Sequence[str] = (),
) -> str:
    """An `sbatch` script that starts a rank for every device with `torchrun`.

    The ranks are numbered as the nodes first come among the devices. Nodes with different GPUs are
    components of one heterogeneous job.

    Args:
        job: Its name.
        devices: The names of the devices, `NODE/a100:2`, as `slurm_devices` gives them.
        command: The script and its arguments.
        options: Further `#SBATCH` options, such as `--time=2:00:00`, for every component.

    Raises:
        InputError: There are no devices or no command, or a name is none of a node's GPU.
    """
    if not devices or not command:
        raise InputError("a batch script needs devices, and a command to run on them.")
    nodes: dict[str, Counter[str]] = {}
    for device in devices:
        node, _, label = device.partition("/")
        kind, _, place = label.partition(":")
        if not node or not place.isdigit():
            raise InputError(
                f"{device!r} is no NODE/TYPE:NUMBER, as Slurm's devices are named here."
            )
        nodes.setdefault(node, Counter())["" if kind == "gpu" else kind] += 1
    components: list[tuple[Counter[str], list[str]]] = []
    for node, gpus in nodes.items():  # neighbors that are alike are one component
        if components and components[-1][0] == gpus:
            components[-1][1].append(node)
        else:
            components.append((gpus, [node]))
    lines = ["#!/bin/bash", f"#SBATCH --job-name={job}"]
    for index, (gpus, names) in enumerate(components):
        gres = ",".join(f"gpu:{kind}:{n}".replace("::", ":") for kind, n in sorted(gpus.items()))
        lines += ["#SBATCH hetjob"] if index else []
        lines += [
            f"#SBATCH --nodes={len(names)}",
            f"#SBATCH --nodelist={','.join(names)}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gres={gres}",
            *(f"#SBATCH {option}" for option in options),
        ]
    groups = f" --het-group=0-{len(components) - 1}" if len(components) > 1 else ""
    run = (
        f"exec torchrun --nnodes={len(nodes)} --node-rank=$SLURM_PROCID --nproc-per-node=gpu "
        f"--master-addr={next(iter(nodes))} --master-port={_PORT} {shlex.join(command)}"
    )
    lines += ["", f"srun{groups} bash -c {shlex.quote(run)}", ""]
    return "\n".join(lines)


def _nodes(text: str) -> Iterator[dict[str, str]]:
    """The fields of every node: of a line each with `-o`, of a paragraph without."""
    _, *parts = re.split(r"(?m)^(?=NodeName=)", text)
    if not parts:
        raise InputError("the text is none of scontrol show node -d: it has no NodeName.")
    for part in parts:
        yield dict(reversed(_FIELD.findall(part)))  # the first counts: free text comes last


def _indices(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
