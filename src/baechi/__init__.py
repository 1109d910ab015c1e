"""Automatic splitting of PyTorch models over devices.

`place` is the one call; `trace`, `profile` or `estimate`, `probe`, `solve`, `simulate` and `apply`
are its steps.
Importing this package loads neither torch nor numpy: every name resolves on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The names of every module, for type checkers and, below, for Python.
if TYPE_CHECKING:
    # isort: off
    from baechi.checkpointing import choose_checkpoint as choose_checkpoint
    from baechi.checkpointing import within_memory as within_memory
    from baechi.costs.calibration import calibrate as calibrate
    from baechi.costs.estimation import estimate as estimate
    from baechi.costs.profiling import profile as profile
    from baechi.device_maps import device_map as device_map
    from baechi.errors import BaechiError as BaechiError, ExecutionError as ExecutionError
    from baechi.errors import FormatError as FormatError, InfeasibleError as InfeasibleError
    from baechi.errors import InputError as InputError, ReservationError as ReservationError
    from baechi.errors import TraceError as TraceError
    from baechi.placers.auto import Auto as Auto
    from baechi.placers.baselines import MTopo as MTopo
    from baechi.placers.baselines import Pinned as Pinned, RandomPlacer as RandomPlacer
    from baechi.placers.baselines import RoundRobin as RoundRobin, SingleDevice as SingleDevice
    from baechi.placers.contiguous import Contiguous as Contiguous
    from baechi.placers.etf import METF as METF
    from baechi.placers.heft import HEFT as HEFT, PEFT as PEFT
    from baechi.placers.local_search import LocalSearch as LocalSearch
    from baechi.placers.metis import Metis as Metis
    from baechi.placers.sct import MSCT as MSCT
    from baechi.placers.solving import solve as solve
    from baechi.placing import place as place
    from baechi.probing.cluster_probe import probe as probe
    from baechi.problem.simulation import Timeline as Timeline, simulate as simulate
    from baechi.records.cluster import Cluster as Cluster, Device as Device, Link as Link
    from baechi.records.constraints import Constraints as Constraints
    from baechi.records.device_kinds import Calibration as Calibration
    from baechi.records.graph import Op as Op, OpGraph as OpGraph, Tensor as Tensor
    from baechi.records.placement import Measurement as Measurement
    from baechi.records.op_costs import OpCost as OpCost, Profile as Profile
    from baechi.records.placement import Placement as Placement, Schedule as Schedule
    from baechi.records.placement import Span as Span, Transfer as Transfer
    from baechi.records.cluster import Topology as Topology
    from baechi.runtime.placed_module import PlacedModule as PlacedModule, apply as apply
    from baechi.runtime.weights import skeleton as skeleton
    from baechi.storage.serialization import dump as dump, load as load
    from baechi.storage.weight_files import stored_weights as stored_weights
    from baechi.traced.traced_model import Traced as Traced
    from baechi.tracing.ladder import trace as trace

__version__ = "0.1.0"

_MODULES = {"bounds": "baechi.problem.bounds", "scheduling": "baechi.scheduling"}
_NAMES = {
    "checkpointing": "choose_checkpoint within_memory",
    "costs.calibration": "calibrate",
    "costs.estimation": "estimate",
    "costs.profiling": "profile",
    "device_maps": "device_map",
    "errors": "BaechiError ExecutionError FormatError InfeasibleError InputError "
    "ReservationError TraceError",
    "placers.auto": "Auto",
    "placers.baselines": "MTopo Pinned RandomPlacer RoundRobin SingleDevice",
    "placers.contiguous": "Contiguous",
    "placers.etf": "METF",
    "placers.heft": "HEFT PEFT",
    "placers.local_search": "LocalSearch",
    "placers.metis": "Metis",
    "placers.sct": "MSCT",
    "placers.solving": "solve",
    "placing": "place",
    "probing.cluster_probe": "probe",
    "problem.simulation": "Timeline simulate",
    "records.cluster": "Cluster Device Link Topology",
    "records.constraints": "Constraints",
    "records.device_kinds": "Calibration",
    "records.graph": "Op OpGraph Tensor",
    "records.op_costs": "OpCost Profile",
    "records.placement": "Measurement Placement Schedule Span Transfer",
    "runtime.placed_module": "PlacedModule apply",
    "runtime.weights": "skeleton",
    "storage.serialization": "dump load",
    "storage.weight_files": "stored_weights",
    "traced.traced_model": "Traced",
    "tracing.ladder": "trace",
}
_HOMES = {name: f"baechi.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a list of str, computed from the one table)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'baechi' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
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
