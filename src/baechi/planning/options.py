"""Options of `place`, checked, and the devices that they are for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from baechi.checkpointing import Checkpoint
from baechi.probing.cluster_probe import ReplayHost
from baechi.processes.world import Ranks
from baechi.records.cluster import Cluster, Constraints
from baechi.records.op_costs import Profile
from baechi.runtime.executors.capture_rules import CudaGraphs
from baechi.torch_support.torch_devices import gpus_of


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """What a plan is made for; the same for all calls of a placed model."""

    cluster: Cluster
    places: Sequence[torch.device]
    placer: Any
    training: bool
    optimizer: str | None
    costs: str | Profile
    verify: bool
    progress: bool
    threads: int | None
    constraints: Constraints | None
    effort: str | None
    guard: bool
    compile: bool | Mapping[str, Any]
    cuda_graphs: CudaGraphs
    replay: ReplayHost  # the host's part in a step that is CUDA graphs
    checkpoint: Checkpoint
    microbatches: int
    objective: str
    ranks: Ranks | None
    say: Callable[[str], None]

    @property
    def replayed(self) -> bool:
        """True if work may run as CUDA graphs."""
        return self.cuda_graphs is not False

    @property
    def gpus(self) -> list[str | None]:
        """The GPU of every device, `None` for a CPU."""
        return list(gpus_of(self.places))

    @property
    def needs_runtime(self) -> bool:
        """True if an option asks for what only the runtime does."""
        cut = self.microbatches != 1 or self.ranks is not None
        wishes = (self.compile, self.cuda_graphs, self.checkpoint, self.threads, cut)
        return any(wish not in (False, None) for wish in wishes)
