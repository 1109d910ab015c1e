"""The public names, and where each is from: `__init__.py` reads this file, as type checkers do.

A line is `from <module> import <name> as <name>`, with further names after commas.
"""

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
from baechi.placers.list_schedulers import METF as METF
from baechi.placers.list_schedulers import HEFT as HEFT, PEFT as PEFT
from baechi.placers.local_search import LocalSearch as LocalSearch
from baechi.placers.metis import Metis as Metis
from baechi.placers.sct import MSCT as MSCT
from baechi.placers.solving import solve as solve
from baechi.placing import place as place
from baechi.probing.cluster_probe import probe as probe
from baechi.probing.rank_probe import ranks as ranks
from baechi.problem.simulation import Timeline as Timeline, simulate as simulate
from baechi.records.cluster import Cluster as Cluster, Device as Device, Link as Link
from baechi.records.cluster import Constraints as Constraints
from baechi.records.device_kinds import Calibration as Calibration
from baechi.records.graph import Op as Op, OpGraph as OpGraph, Tensor as Tensor
from baechi.records.placement import Measurement as Measurement
from baechi.records.op_costs import OpCost as OpCost, Profile as Profile
from baechi.records.placement import Placement as Placement, Schedule as Schedule
from baechi.records.placement import Span as Span, Transfer as Transfer
from baechi.records.cluster import Topology as Topology
from baechi.runtime.placed_module import PlacedModule as PlacedModule, apply as apply
from baechi.runtime.rank_state import clip_grad_norm_ as clip_grad_norm_
from baechi.runtime.weights import skeleton as skeleton
from baechi.storage.serialization import dump as dump, load as load
from baechi.storage.weight_files import stored_weights as stored_weights
from baechi.traced.traced_model import Traced as Traced
from baechi.tracing.ladder import trace as trace
from baechi import scheduling as scheduling
from baechi.problem import bounds as bounds

__version__: str
