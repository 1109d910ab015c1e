"""Baechi splits PyTorch models over devices by itself.

`place` is the one call; `trace`, `profile` or `estimate`, `probe`, `solve`, `simulate` and `apply`
are its steps.
Importing this package loads neither torch nor numpy: every name resolves on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baechi.calibration import calibrate as calibrate
    from baechi.checkpointing import choose_checkpoint as choose_checkpoint
    from baechi.checkpointing import within_memory as within_memory
    from baechi.constraints import Constraints as Constraints
    from baechi.costs import OpCost as OpCost
    from baechi.costs import Profile as Profile
    from baechi.devices import Cluster as Cluster
    from baechi.devices import Device as Device
    from baechi.devices import Link as Link
    from baechi.efficiency import Calibration as Calibration
    from baechi.errors import BaechiError as BaechiError
    from baechi.errors import ExecutionError as ExecutionError
    from baechi.errors import FormatError as FormatError
    from baechi.errors import InfeasibleError as InfeasibleError
    from baechi.errors import InputError as InputError
    from baechi.errors import ReservationError as ReservationError
    from baechi.errors import TraceError as TraceError
    from baechi.estimation import estimate as estimate
    from baechi.graph import Op as Op
    from baechi.graph import OpGraph as OpGraph
    from baechi.graph import Tensor as Tensor
    from baechi.measurement import Measurement as Measurement
    from baechi.placement import Placement as Placement
    from baechi.placement import Schedule as Schedule
    from baechi.placement import Span as Span
    from baechi.placement import Transfer as Transfer
    from baechi.placers.auto import Auto as Auto
    from baechi.placers.baselines import Pinned as Pinned
    from baechi.placers.baselines import RandomPlacer as RandomPlacer
    from baechi.placers.baselines import RoundRobin as RoundRobin
    from baechi.placers.baselines import SingleDevice as SingleDevice
    from baechi.placers.contiguous import Contiguous as Contiguous
    from baechi.placers.etf import METF as METF
    from baechi.placers.heft import HEFT as HEFT
    from baechi.placers.mincut import Metis as Metis
    from baechi.placers.peft import PEFT as PEFT
    from baechi.placers.sct import MSCT as MSCT
    from baechi.placers.search import LocalSearch as LocalSearch
    from baechi.placers.topo import MTopo as MTopo
    from baechi.placing import place as place
    from baechi.probing import probe as probe
    from baechi.profiling import profile as profile
    from baechi.runtime.module import PlacedModule as PlacedModule
    from baechi.runtime.module import apply as apply
    from baechi.serialization import dump as dump
    from baechi.serialization import load as load
    from baechi.simulation import Timeline as Timeline
    from baechi.simulation import simulate as simulate
    from baechi.solving import solve as solve
    from baechi.topology import Topology as Topology
    from baechi.traced import Traced as Traced
    from baechi.tracing import trace as trace

__version__ = "0.1.0"

_HOMES = {
    "baechi.calibration": ("calibrate",),
    "baechi.checkpointing": ("choose_checkpoint", "within_memory"),
    "baechi.constraints": ("Constraints",),
    "baechi.costs": ("OpCost", "Profile"),
    "baechi.devices": ("Cluster", "Device", "Link"),
    "baechi.efficiency": ("Calibration",),
    "baechi.errors": (
        "BaechiError",
        "ExecutionError",
        "FormatError",
        "InfeasibleError",
        "InputError",
        "ReservationError",
        "TraceError",
    ),
    "baechi.estimation": ("estimate",),
    "baechi.graph": ("Op", "OpGraph", "Tensor"),
    "baechi.measurement": ("Measurement",),
    "baechi.placement": ("Placement", "Schedule", "Span", "Transfer"),
    "baechi.placers.auto": ("Auto",),
    "baechi.placers.baselines": ("Pinned", "RandomPlacer", "RoundRobin", "SingleDevice"),
    "baechi.placers.contiguous": ("Contiguous",),
    "baechi.placers.etf": ("METF",),
    "baechi.placers.heft": ("HEFT",),
    "baechi.placers.mincut": ("Metis",),
    "baechi.placers.peft": ("PEFT",),
    "baechi.placers.sct": ("MSCT",),
    "baechi.placers.search": ("LocalSearch",),
    "baechi.placers.topo": ("MTopo",),
    "baechi.placing": ("place",),
    "baechi.probing": ("probe",),
    "baechi.profiling": ("profile",),
    "baechi.runtime.module": ("PlacedModule", "apply"),
    "baechi.serialization": ("dump", "load"),
    "baechi.simulation": ("Timeline", "simulate"),
    "baechi.solving": ("solve",),
    "baechi.topology": ("Topology",),
    "baechi.traced": ("Traced",),
    "baechi.tracing": ("trace",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 (a list of str, computed from the one table)


def __getattr__(name: str) -> Any:
    if name == "scheduling":
        return import_module("baechi.scheduling")
    if name not in _HOME:
        raise AttributeError(f"module 'baechi' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"baechi.{name} needs torch 2.11 or later, which is not installed here: "
            "pip install 'baechi[torch]'. Solving, simulating and reporting do without.",
            name="torch",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
