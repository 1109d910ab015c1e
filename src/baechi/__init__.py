"""Automatic splitting of PyTorch models over devices.

`place` is the one call; `trace`, `profile` or `estimate`, `probe`, `solve`, `simulate` and `apply`
are its steps.
Importing this package loads neither torch nor numpy: every name resolves on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baechi.checkpointing import choose_checkpoint as choose_checkpoint
    from baechi.checkpointing import within_memory as within_memory
    from baechi.costs.calibration import calibrate as calibrate
    from baechi.costs.estimation import estimate as estimate
    from baechi.costs.profiling import profile as profile
    from baechi.errors import BaechiError as BaechiError
    from baechi.errors import ExecutionError as ExecutionError
    from baechi.errors import FormatError as FormatError
    from baechi.errors import InfeasibleError as InfeasibleError
    from baechi.errors import InputError as InputError
    from baechi.errors import ReservationError as ReservationError
    from baechi.errors import TraceError as TraceError
    from baechi.placers.auto import Auto as Auto
    from baechi.placers.baselines import MTopo as MTopo
    from baechi.placers.baselines import Pinned as Pinned
    from baechi.placers.baselines import RandomPlacer as RandomPlacer
    from baechi.placers.baselines import RoundRobin as RoundRobin
    from baechi.placers.baselines import SingleDevice as SingleDevice
    from baechi.placers.contiguous import Contiguous as Contiguous
    from baechi.placers.etf import METF as METF
    from baechi.placers.heft import HEFT as HEFT
    from baechi.placers.heft import PEFT as PEFT
    from baechi.placers.local_search import LocalSearch as LocalSearch
    from baechi.placers.metis import Metis as Metis
    from baechi.placers.sct import MSCT as MSCT
    from baechi.placers.solving import solve as solve
    from baechi.placing import place as place
    from baechi.probing.cluster_probe import probe as probe
    from baechi.problem.simulation import Timeline as Timeline
    from baechi.problem.simulation import simulate as simulate
    from baechi.records.cluster import Cluster as Cluster
    from baechi.records.cluster import Device as Device
    from baechi.records.cluster import Link as Link
    from baechi.records.cluster import Topology as Topology
    from baechi.records.constraints import Constraints as Constraints
    from baechi.records.device_kinds import Calibration as Calibration
    from baechi.records.graph import Op as Op
    from baechi.records.graph import OpGraph as OpGraph
    from baechi.records.graph import Tensor as Tensor
    from baechi.records.op_costs import OpCost as OpCost
    from baechi.records.op_costs import Profile as Profile
    from baechi.records.placement import Measurement as Measurement
    from baechi.records.placement import Placement as Placement
    from baechi.records.placement import Schedule as Schedule
    from baechi.records.placement import Span as Span
    from baechi.records.placement import Transfer as Transfer
    from baechi.runtime.placed_module import PlacedModule as PlacedModule
    from baechi.runtime.placed_module import apply as apply
    from baechi.storage.serialization import dump as dump
    from baechi.storage.serialization import load as load
    from baechi.traced.traced_model import Traced as Traced
    from baechi.tracing.ladder import trace as trace

__version__ = "0.1.0"

_HOMES = {
    "baechi.costs.calibration": ("calibrate",),
    "baechi.checkpointing": ("choose_checkpoint", "within_memory"),
    "baechi.records.constraints": ("Constraints",),
    "baechi.records.op_costs": ("OpCost", "Profile"),
    "baechi.records.cluster": ("Cluster", "Device", "Link", "Topology"),
    "baechi.records.device_kinds": ("Calibration",),
    "baechi.errors": (
        "BaechiError",
        "ExecutionError",
        "FormatError",
        "InfeasibleError",
        "InputError",
        "ReservationError",
        "TraceError",
    ),
    "baechi.costs.estimation": ("estimate",),
    "baechi.records.graph": ("Op", "OpGraph", "Tensor"),
    "baechi.records.placement": ("Measurement", "Placement", "Schedule", "Span", "Transfer"),
    "baechi.placers.auto": ("Auto",),
    "baechi.placers.baselines": ("MTopo", "Pinned", "RandomPlacer", "RoundRobin", "SingleDevice"),
    "baechi.placers.contiguous": ("Contiguous",),
    "baechi.placers.etf": ("METF",),
    "baechi.placers.heft": ("HEFT", "PEFT"),
    "baechi.placers.metis": ("Metis",),
    "baechi.placers.sct": ("MSCT",),
    "baechi.placers.local_search": ("LocalSearch",),
    "baechi.placing": ("place",),
    "baechi.probing.cluster_probe": ("probe",),
    "baechi.costs.profiling": ("profile",),
    "baechi.runtime.placed_module": ("PlacedModule", "apply"),
    "baechi.storage.serialization": ("dump", "load"),
    "baechi.problem.simulation": ("Timeline", "simulate"),
    "baechi.placers.solving": ("solve",),
    "baechi.traced.traced_model": ("Traced",),
    "baechi.tracing.ladder": ("trace",),
}
_MODULES = {"bounds": "baechi.problem.bounds", "scheduling": "baechi.scheduling"}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 (a list of str, computed from the one table)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
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
