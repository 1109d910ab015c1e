"""Scheduling policies; and policies, schemes and ways of sharing by name."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from baechi.cluster_simulation import placement_schemes as schemes
from baechi.cluster_simulation.jobs import Exclusive, Sharing, SideBySide, TimeSliced
from baechi.cluster_simulation.policies.allox import AlloX
from baechi.cluster_simulation.policies.antman import AntMan, Opportunistic
from baechi.cluster_simulation.policies.backfill import Backfill
from baechi.cluster_simulation.policies.clockwork import Clockwork
from baechi.cluster_simulation.policies.crux import Crux
from baechi.cluster_simulation.policies.dally import Dally
from baechi.cluster_simulation.policies.delay_relaxation import DelayRelaxation
from baechi.cluster_simulation.policies.elastic_srjf import ElasticSrjf
from baechi.cluster_simulation.policies.fair_share import FairShare
from baechi.cluster_simulation.policies.fewest_gpus import FewestGpusFirst, ShortestGpuTime
from baechi.cluster_simulation.policies.fifo import Fifo, FitJobFirst
from baechi.cluster_simulation.policies.finish_time_fairness import FinishTimeFairness
from baechi.cluster_simulation.policies.gandiva_fair import GandivaFair
from baechi.cluster_simulation.policies.gavel import Gavel
from baechi.cluster_simulation.policies.heet import Heet
from baechi.cluster_simulation.policies.hived import HiveD
from baechi.cluster_simulation.policies.iadeep import IADeep
from baechi.cluster_simulation.policies.lyra import Lyra
from baechi.cluster_simulation.policies.miger import Miger
from baechi.cluster_simulation.policies.muri import Muri
from baechi.cluster_simulation.policies.muxflow import MuxFlow
from baechi.cluster_simulation.policies.ones import Ones
from baechi.cluster_simulation.policies.optimus import Optimus
from baechi.cluster_simulation.policies.pal import Pal
from baechi.cluster_simulation.policies.pollux import Pollux
from baechi.cluster_simulation.policies.powerflow import PowerFlow
from baechi.cluster_simulation.policies.priority import Priority
from baechi.cluster_simulation.policies.shortest_time import ShortestTime
from baechi.cluster_simulation.policies.sjf_bsbf import SjfBsbf
from baechi.cluster_simulation.policies.split_or_wait import SplitOrWait
from baechi.cluster_simulation.policies.time_slicing import TimeSlicing
from baechi.cluster_simulation.policies.tiresias import LeastAttained
from baechi.cluster_simulation.policies.tiresias_skew import TiresiasSkew
from baechi.cluster_simulation.policy_support.gittins import sampled_gpu_times
from baechi.cluster_simulation.policy_support.interleaving import Interleaved
from baechi.cluster_simulation.policy_support.policy import Policy
from baechi.cluster_simulation.policy_support.published_simulator import PublishedLongestPending
from baechi.validation import check_choice

COMPAT: Final = ("tiresias",)

_POLICIES: Final[dict[str, Callable[..., Policy]]] = {
    "fifo": Fifo,
    "fjf": FitJobFirst,
    "sjf": FewestGpusFirst,
    "lpjf": partial(Fifo, "lpjf"),
    "shortest": ShortestTime,
    "shortest-gpu": ShortestGpuTime,
    "dlas": LeastAttained,
    "dlas-gpu": partial(LeastAttained, "dlas-gpu", by_gpus=True),
    "dlas-gpu-gittins": partial(LeastAttained, "dlas-gpu-gittins", by_gpus=True),
    "gandiva": TimeSlicing,
    "themis": FinishTimeFairness,
    "gandiva-packing": partial(FitJobFirst, "gandiva-packing"),
    "big-brain": partial(Fifo, "big-brain"),
    "split-or-wait": SplitOrWait,
    "priority": Priority,
    "fair-share": FairShare,
    "backfill": Backfill,
    "pack": partial(FitJobFirst, "pack"),
    "spread": partial(FitJobFirst, "spread"),
    "delay-relaxation": DelayRelaxation,
    "gavel-max-min": partial(Gavel, "gavel-max-min"),
    "gavel-makespan": partial(Gavel, "gavel-makespan"),
    "gavel-ftf": partial(Gavel, "gavel-ftf"),
    "gavel-packed": partial(Gavel, "gavel-packed"),
    "allox": AlloX,
    "gandiva-fair": GandivaFair,
    "optimus": Optimus,
    "pollux": Pollux,
    "elastic-srjf": ElasticSrjf,
    "muri-s": partial(Muri, "muri-s"),
    "muri-l": partial(Muri, "muri-l"),
    "sjf-bsbf": SjfBsbf,
    "antman": AntMan,
    "hived": HiveD,
    "tiresias-skew": TiresiasSkew,
    "dally": Dally,
    "pal": Pal,
    "lyra": Lyra,
    "muxflow": MuxFlow,
    "miger": Miger,
    "iadeep": IADeep,
    "clockwork": Clockwork,
    "heet": Heet,
    "ones": Ones,
    "powerflow": PowerFlow,
    "crux": Crux,
}
POLICIES: Final = tuple(_POLICIES)
# Those of the published simulator that have results to compare with.
PUBLISHED: Final = POLICIES[:9]
# The scheme and the sharing that a policy is meant for, where it is not `count` and `exclusive`.
DEFAULTS: Final = {
    "gandiva-packing": ("least-loaded", "packed"),
    "big-brain": ("least-loaded", "time-sliced"),
    "split-or-wait": ("baechi", "exclusive"),
    "pack": ("best-fit", "exclusive"),
    "spread": ("spread", "exclusive"),
    "delay-relaxation": ("best-fit", "exclusive"),
    **dict.fromkeys(
        (
            *("gavel-max-min", "gavel-makespan", "gavel-ftf", "allox", "gandiva-fair"),
            *("optimus", "pollux", "elastic-srjf"),
            *("hived", "tiresias-skew", "dally", "pal", "lyra", "clockwork"),
            *("heet", "ones", "powerflow", "crux"),
        ),
        ("best-fit", "exclusive"),
    ),
    "gavel-packed": ("best-fit", "mps"),
    "sjf-bsbf": ("best-fit", "mps"),
    "iadeep": ("best-fit", "mps"),
    **dict.fromkeys(("antman", "muxflow", "miger"), ("best-fit", "opportunistic")),
    **dict.fromkeys(("muri-s", "muri-l"), ("consolidated", "interleaved")),
}
# How long a job must have waited, in times that it ran, to go back to the first queue.
_PROMOTE: Final = {"05": 0.5, **{str(times): times for times in (1, 2, 4, 8, 10, 100, 1000)}}

_SCHEMES: Final[dict[str, Callable[[], schemes.Scheme | None]]] = {
    "count": lambda: None,
    "first-fit": schemes.FirstFit,
    "consolidated": schemes.Consolidated,
    "yarn": schemes.Consolidated,
    "random": schemes.Random,
    "best-fit": schemes.BestFit,
    "spread": schemes.Spread,
    "least-loaded": schemes.LeastLoaded,
    "baechi": schemes.Baechi,
}
SCHEMES: Final = tuple(_SCHEMES)

_SHARINGS: Final[dict[str, Callable[[int], Sharing]]] = {
    "exclusive": lambda _: Exclusive(),
    "time-sliced": TimeSliced,
    "mps": SideBySide,
    "packed": partial(SideBySide, packs=True),
    "interleaved": lambda _: Interleaved(),
    "opportunistic": lambda _: Opportunistic(),
}
SHARINGS: Final = tuple(_SHARINGS)


def policy_named(
    name: str,
    *,
    compat: str | None = None,
    samples: Sequence[int] | None = None,
    budget_w: int | None = None,
) -> Policy:
    """A policy by its name; `dlas-gpu-4` is `dlas-gpu` with promotion after 4 times its run.

    Args:
        name: One of `POLICIES`, or `dlas-gpu-K` or `dlas-gpu-gittins-K` with K of 05 (a half), 1,
            2, 4, 8, 10, 100, 1000.
        compat: `"tiresias"` repeats the defects of that simulator that its results need: those
            that `policies/tiresias.py` and `policy_support/published_simulator.py` have.
        samples: GPU-times for the Gittins index; those that Tiresias ships if absent.
        budget_w: What `powerflow` lets all GPUs draw, in watts.

    Raises:
        InputError: An unknown name or compatibility.
    """
    if compat is not None:
        check_choice(compat, COMPAT, "compatibility")
    family, _, suffix = name.rpartition("-")
    promotes = suffix in _PROMOTE and family in {"dlas-gpu", "dlas-gpu-gittins"}
    base = family if promotes else name
    if not promotes:
        check_choice(name, POLICIES, "policy")
    if base == "lpjf" and compat:
        return PublishedLongestPending()
    options: dict[str, object] = {}
    if base.startswith("dlas"):
        options = {"promote": _PROMOTE[suffix] if promotes else 0, "compat": compat is not None}
    if base == "dlas-gpu-gittins":
        options["samples"] = sampled_gpu_times() if samples is None else samples
    if base == "powerflow":
        options["budget_w"] = budget_w
    return _POLICIES[base](**options)


def scheme_named(name: str) -> schemes.Scheme | None:
    """A scheme by its name; `None` for `count`."""
    check_choice(name, SCHEMES, "scheme")
    return _SCHEMES[name]()


def sharing_named(name: str, most: int) -> Sharing:
    """A way of sharing by its name, with at most `most` jobs on a GPU."""
    check_choice(name, SHARINGS, "sharing")
    return _SHARINGS[name](most)
