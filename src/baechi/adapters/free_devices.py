"""Free parts of devices as cluster managers know them, and the topology of these to solve on."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, Final, final

from baechi.errors import InputError
from baechi.records.cluster import Device, Link, Topology
from baechi.records.device_kinds import find
from baechi.scheduling.claims import WHOLE_MILLI, Claim, split_name
from baechi.scheduling.ledger import Ledger
from baechi.storage.codec import codec
from baechi.validation import check_count, check_name

MIB: Final = 2**20
OVER: Final = ("Succeeded", "Failed")  # phases of pods, and of BaechiJobs
CLAIMS: Final = codec(tuple[Claim, ...])
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
_SUFFIXES: Final[dict[str, Fraction]] = {
    **{f"{prefix}i": Fraction(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)},
    **{prefix: Fraction(1000) ** power for power, prefix in enumerate("kMGTPE", start=1)},
    **{prefix: Fraction(1, 1000**power) for power, prefix in enumerate("mun", start=1)},
    "": Fraction(1),
}


@final
@dataclass(frozen=True, slots=True)
class FreeDevice:
    """The free part of a device.

    Attributes:
        node: Its node.
        name: Its name there; of the node and the name is that of the device to solve on.
        memory_bytes: Free memory.
        share_milli: Free compute, in thousandths of the device's kind.
        kind: The hardware, by its name in Baechi's table, or as the manager calls it.
        uid: What the manager calls it in a job's request: a UUID, an index.

    Raises:
        InputError: An empty name, or a number that is negative.
    """

    node: str
    name: str
    memory_bytes: int
    share_milli: int = WHOLE_MILLI
    kind: str = ""
    uid: str = ""

    def __post_init__(self) -> None:
        check_name(self.node, "node of a device")
        check_name(self.name, f"name of a device of node {self.node!r}")
        check_count(self.memory_bytes, f"free memory of {self.full_name!r}")
        check_count(self.share_milli, f"free share of {self.full_name!r}")

    @property
    def full_name(self) -> str:
        """The name of the device to solve on."""
        return f"{self.node}/{self.name}"


def topology(
    free: Iterable[FreeDevice],
    node_link: Link,
    switch_link: Link | None = None,
    site_link: Link | None = None,
    *,
    switches: Mapping[str, str] | None = None,
) -> Topology:
    """The devices that have memory and compute left, to give to `Ledger` or, as a cluster, `solve`.

    Args:
        free: The free parts of all devices.
        node_link: Between two devices of a node.
        switch_link: Between two nodes under one switch; no path if absent.
        site_link: Between two switches; no path if absent.
        switches: The switch of every node; all are under one if absent.

    Raises:
        InputError: Nothing is free, two devices have one name, or a node has no switch.
    """
    rows = [row for row in free if row.memory_bytes and row.share_milli]
    if not rows:
        raise InputError("no device has memory and compute left; wait until a job ends.")
    homeless = sorted({row.node for row in rows} - set(switches or ())) if switches else []
    if homeless:
        raise InputError(f"switches has no entry for node {homeless[0]!r}.")
    return Topology(
        tuple(
            Device(row.full_name, row.memory_bytes, row.share_milli / WHOLE_MILLI, row.kind)
            for row in rows
        ),
        tuple(row.node for row in rows),
        tuple(switches[row.node] if switches else "switch" for row in rows),
        *(node_link, switch_link, site_link),
    )


def kind_named(name: str) -> str:
    """The name in Baechi's table of hardware that somebody calls otherwise, or that other name."""
    for text in (name, f"NVIDIA {name}", name.removeprefix("NVIDIA-")):
        try:
            return find(text).name
        except InputError:
            continue
    return name


def quantity(text: object, what: str, *, up: bool = False) -> int:
    """A quantity of Kubernetes, such as `"80Gi"`, `"1500m"` or `2e9`, rounded down, or up.

    Raises:
        InputError: It cannot be read, or is negative.

    >>> quantity("1.5Ki", "memory")
    1536
    """
    number = str(text).strip()
    suffix = next((s for s in _SUFFIXES if s and number.endswith(s)), "")
    try:
        value = Fraction(number.removesuffix(suffix)) * _SUFFIXES[suffix]
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if value < 0:
        raise InputError(f'{what} is {text!r}, which is no quantity such as "80Gi".')
    return ceil(value) if up else floor(value)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns what a malformed document raises while it is read into one error.

    Raises:
        InputError: A field is absent, or is something else than it must be.
    """
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{what} cannot be read: a field {error} is absent.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be read: {error}.") from error


def items_of(document: Any, kind: str) -> list[dict[str, Any]]:
    """The objects of one kind in what `kubectl get -o json` prints: one, a list, or a Python list.

    Raises:
        InputError: It holds something else.
    """
    rows = document.get("items", [document]) if isinstance(document, dict) else document
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or row.get("kind", kind) != kind:
            seen = row.get("kind") if isinstance(row, dict) else type(row).__name__
            raise InputError(f"a {seen} stands where a {kind} of Kubernetes belongs.")
    return list(rows)


def reservation_of(prefix: str, item: Mapping[str, Any]) -> str:
    """The job of an object of Kubernetes in a ledger: another of the same name is another.

    Raises:
        InputError: It has no name, namespace or UID.
    """
    with reading("an object of Kubernetes"):
        metadata = item["metadata"]
        namespace = metadata.get("namespace") or "default"
        return f"{prefix}{namespace}/{metadata['name']}/{metadata['uid']}"


def runs(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has not ended."""
    return (pod.get("status") or {}).get("phase") not in OVER


def annotation_of(claims: Sequence[Claim]) -> str:
    """A job's claims as its pods carry them."""
    return json.dumps(CLAIMS.write(tuple(claims)), separators=(",", ":"))


def nodes_of(ledger: Ledger, claims: Sequence[Claim]) -> list[str]:
    """The nodes of claims, in their order; of a MIG instance that of its GPU.

    Raises:
        InputError: The ledger's devices have no nodes.
    """
    base, index = ledger.site.base, ledger.site.index
    if not isinstance(base, Topology):
        raise InputError("the ledger is of a cluster without nodes; give it a Topology.")
    names = (claim.device for claim in claims)
    return [base.nodes[index[n] if n in index else index[split_name(n)[0]]] for n in names]
