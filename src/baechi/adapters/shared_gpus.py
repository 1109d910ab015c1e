"""Free parts of GPUs that HAMi and KAI share out, from annotations and labels of nodes and pods."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final, NamedTuple

from baechi.adapters.free_devices import (
    MIB,
    FreeDevice,
    items_of,
    kind_named,
    quantity,
    reading,
    runs,
)
from baechi.errors import InputError
from baechi.scheduling.claims import WHOLE_MILLI

_REGISTER: Final = "hami.io/node-nvidia-register"
_ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_GROUP: Final = "runai-gpu-group"
_GPU: Final = "nvidia.com/gpu"


class _Card(NamedTuple):
    """A GPU as HAMi's device plugin registers it: memory in MiB, compute in hundredths."""

    uid: str
    tasks: int
    memory: int
    compute: int
    kind: str
    healthy: bool


@reading("a node or pod of HAMi's")
def hami_devices(nodes: Any, pods: Any) -> tuple[FreeDevice, ...]:
    """What HAMi has left of the GPUs of all nodes.

    A GPU that holds as many tasks as it may has nothing left.

    Args:
        nodes: Of `kubectl get nodes -o json`.
        pods: Of `kubectl get pods --all-namespaces -o json`.

    Raises:
        InputError: An annotation cannot be read.

    https://project-hami.io/docs/developers/protocol
    """
    memory: Counter[str] = Counter()
    compute: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    for pod in filter(runs, items_of(pods, "Pod")):
        text = _annotations(pod).get(_ALLOCATED, "")
        for part in text.replace(";", ":").split(":"):
            if part.strip():
                uid, _, used_mib, used_percent = _fields(part, 4, _ALLOCATED)[:4]
                uid = uid.partition("[")[0]  # of an instance that of its GPU: GPU-UUID[0-1]
                memory[uid] += int(used_mib)
                compute[uid] += int(used_percent)
                tasks[uid] += 1
    free = []
    for node in filter(_takes_pods, items_of(nodes, "Node")):
        for card in _registered(_annotations(node).get(_REGISTER, "")):
            if not card.healthy or tasks[card.uid] >= card.tasks:
                continue
            left = max(card.memory - memory[card.uid], 0) * MIB
            share = max(card.compute - compute[card.uid], 0) * WHOLE_MILLI // 100
            name = node["metadata"]["name"]
            free.append(FreeDevice(name, card.uid, left, share, card.kind, card.uid))
    return tuple(free)


@reading("a node or pod of KAI's")
def kai_devices(nodes: Any, pods: Any) -> tuple[FreeDevice, ...]:
    """What KAI has left of the GPUs of all nodes: whole ones, and parts of those that are shared.

    A GPU that is shared is known by its group. KAI does not say which index a whole one has.

    Args:
        nodes: Of `kubectl get nodes -o json`, with the labels of NVIDIA's feature discovery.
        pods: Of `kubectl get pods --all-namespaces -o json`, with KAI's reservation pods.

    Raises:
        InputError: A label or an annotation cannot be read.

    https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/gpu-sharing
    """
    whole: Counter[str] = Counter()
    groups: dict[str, dict[str, Fraction]] = defaultdict(dict)
    sizes = {}
    for node in filter(_takes_pods, items_of(nodes, "Node")):
        labels = node["metadata"].get("labels") or {}
        if "nvidia.com/gpu.count" in labels and "nvidia.com/gpu.memory" in labels:
            count = quantity(labels["nvidia.com/gpu.count"], "nvidia.com/gpu.count")
            healthy = (node.get("status") or {}).get("allocatable") or {}
            sizes[node["metadata"]["name"]] = (
                min(count, quantity(healthy.get(_GPU, count), _GPU)),
                quantity(labels["nvidia.com/gpu.memory"], "nvidia.com/gpu.memory"),
                kind_named(labels.get("nvidia.com/gpu.product", "")),
            )
    for pod in filter(runs, items_of(pods, "Pod")):
        node_name = (pod.get("spec") or {}).get("nodeName", "")
        if node_name not in sizes:
            continue
        whole[node_name] += _whole_gpus(pod)
        part = _fraction(pod, sizes[node_name][1])
        for group in _groups(pod):
            used = groups[node_name].setdefault(group, Fraction(0))
            groups[node_name][group] = used + part
    free = []
    for name, (count, mib, kind) in sizes.items():
        free += [
            FreeDevice(name, f"gpu{place}", mib * MIB, WHOLE_MILLI, kind)
            for place in range(count - whole[name])
        ]
        for group, used in sorted(groups[name].items()):
            left = max(1 - used, Fraction(0))
            share = int(left * WHOLE_MILLI)
            free.append(FreeDevice(name, group, int(left * mib * MIB), share, kind, group))
    return tuple(free)


def _takes_pods(node: Mapping[str, Any]) -> bool:
    """Whether a node is ready, and nobody has cordoned it off."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = all(row.get("status") == "True" for row in conditions if row.get("type") == "Ready")
    return ready and not (node.get("spec") or {}).get("unschedulable")


def _annotations(item: Mapping[str, Any]) -> dict[str, str]:
    return (item.get("metadata") or {}).get("annotations") or {}


def _fields(text: str, least: int, what: str) -> list[str]:
    fields = text.strip().split(",")
    if len(fields) < least:
        raise InputError(f"{what} has {text!r}, which has fewer than {least} fields.")
    return fields


def _registered(text: str) -> Iterator[_Card]:
    """GPUs of a node: JSON since HAMi 2.7, before that fields between commas and colons."""
    if text.lstrip().startswith("["):
        for row in json.loads(text):
            # Go leaves out what is zero or false.
            numbers = [int(row.get(field, 0)) for field in ("count", "devmem", "devcore")]
            yield _card(row["id"], numbers, row.get("type", ""), row.get("health", False))
        return
    for part in filter(str.strip, text.split(":")):
        uid, tasks, memory, compute, kind, _, health = _fields(part, 7, _REGISTER)[:7]
        yield _card(uid, [int(n) for n in (tasks, memory, compute)], kind, health == "true")


def _card(uid: str, numbers: list[int], kind: str, healthy: bool) -> _Card:
    tasks, memory, compute = numbers
    return _Card(uid, tasks, memory, compute, kind_named(kind), healthy)


def _whole_gpus(pod: Mapping[str, Any]) -> int:
    containers = (pod.get("spec") or {}).get("containers", ())
    limits = [(row.get("resources") or {}).get("limits") or {} for row in containers]
    return sum(quantity(row.get(_GPU, 0), _GPU) for row in limits)


def _fraction(pod: Mapping[str, Any], mib: int) -> Fraction:
    """The part of each of its GPUs that a pod takes."""
    notes = _annotations(pod)
    if "gpu-memory" in notes:
        return Fraction(int(notes["gpu-memory"]), mib)
    return Fraction(notes.get("gpu-fraction", "0"))


def _groups(pod: Mapping[str, Any]) -> list[str]:
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return [v for key, v in labels.items() if key == _GROUP or key.startswith(f"{_GROUP}/")]
