"""Policies, schemes and ways of sharing by name, for the command line and for sweeps."""

from collections.abc import Callable, Sequence
from typing import Final

from baechi.cluster_simulation.contention import Exclusive, Sharing, SideBySide, TimeSliced
from baechi.cluster_simulation.placement_schemes import (
    BestFit,
    Consolidated,
    FirstFit,
    LeastLoaded,
    Random,
    Scheme,
)
from baechi.cluster_simulation.policies.policy import (
    FewestGpusFirst,
    Fifo,
    FitJobFirst,
    GandivaPacking,
    LongestPending,
    PackingFactor,
    Policy,
)
from baechi.cluster_simulation.policies.shortest import ShortestGpuTime, ShortestTime
from baechi.cluster_simulation.policies.splitting import Baechi, SplitOrWait
from baechi.cluster_simulation.policies.time_slicing import FinishTimeFairness, TimeSlicing
from baechi.cluster_simulation.policies.tiresias import (
    Gittins,
    LeastAttained,
    LeastAttainedGpuTime,
    PublishedLongestPending,
)
from baechi.errors import InputError

COMPAT: Final = ("tiresias",)

_PLAIN: Final[dict[str, Callable[[], Policy]]] = {
    "fifo": Fifo,
    "fjf": FitJobFirst,
    "sjf": FewestGpusFirst,
    "shortest": ShortestTime,
    "shortest-gpu": ShortestGpuTime,
    "gandiva": TimeSlicing,
    "gandiva-packing": GandivaPacking,
    "big-brain": PackingFactor,
    "split-or-wait": SplitOrWait,
    "themis": FinishTimeFairness,
}
# Those in which the published simulator has defects that its results need.
_COMPATIBLE: Final[dict[str, Callable[[bool], Policy]]] = {
    "lpjf": lambda compat: PublishedLongestPending() if compat else LongestPending(),
    "dlas": lambda compat: LeastAttained(compat=compat),
    "dlas-gpu": lambda compat: LeastAttainedGpuTime(compat=compat),
}

# The nine of the published simulator that have results to compare with, and all.
PUBLISHED: Final = (
    *("fifo", "fjf", "sjf", "lpjf", "shortest", "shortest-gpu"),
    *("dlas", "dlas-gpu", "dlas-gpu-gittins"),
)
POLICIES: Final = (
    *PUBLISHED,
    *("gandiva", "themis", "gandiva-packing", "big-brain", "split-or-wait"),
)
# The scheme and the sharing that a policy is meant for, where it is not `count` and `exclusive`.
DEFAULTS: Final = {
    "gandiva-packing": ("least-loaded", "packed"),
    "big-brain": ("least-loaded", "time-sliced"),
    "split-or-wait": ("baechi", "exclusive"),
}

# How long a job must have waited, in times that it ran, to go back to the first queue.
_PROMOTE: Final = {
    **{"05": 0.5, "1": 1, "2": 2, "4": 4, "8": 8},
    **{"10": 10, "100": 100, "1000": 1000},
}


def policy_named(
    name: str, *, compat: str | None = None, samples: Sequence[int] | None = None
) -> Policy:
    """A policy by its name; `dlas-gpu-4` is `dlas-gpu` with promotion after 4 times its run.

    Args:
        name: One of `POLICIES`, or `dlas-gpu-K` or `dlas-gpu-gittins-K` with K of 05 (a half), 1,
            2, 4, 8, 10, 100, 1000.
        compat: `"tiresias"` repeats the defects of that simulator that its results need: those
            that `policies/tiresias.py` names.
        samples: GPU-times for the Gittins index; those that Tiresias ships if absent.

    Raises:
        InputError: An unknown name or compatibility.
    """
    if compat is not None and compat not in COMPAT:
        raise InputError(f"compatibility {compat!r} is unknown; give {', '.join(COMPAT)} or none.")
    original = compat is not None
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in _COMPATIBLE:
        return _COMPATIBLE[name](original)
    family, _, suffix = name.rpartition("-")
    promote = _PROMOTE.get(suffix, 0)
    if "dlas-gpu-gittins" in {name, family if promote else name}:
        return Gittins(samples=samples, promote=promote, compat=original)
    if promote and family == "dlas-gpu":
        return LeastAttainedGpuTime(promote=promote, compat=original)
    raise InputError(f"policy {name!r} is unknown; give one of {', '.join(POLICIES)}.")


_SCHEMES: Final[dict[str, Callable[[], Scheme | None]]] = {
    "count": lambda: None,
    "first-fit": FirstFit,
    "consolidated": Consolidated,
    "yarn": Consolidated,
    "random": Random,
    "best-fit": BestFit,
    "least-loaded": LeastLoaded,
    "baechi": Baechi,
}
SCHEMES: Final = tuple(_SCHEMES)


def scheme_named(name: str) -> Scheme | None:
    """A scheme by its name; `None` for `count`.

    Raises:
        InputError: The name is unknown.
    """
    if name not in _SCHEMES:
        raise InputError(f"scheme {name!r} is unknown; give one of {', '.join(SCHEMES)}.")
    return _SCHEMES[name]()


SHARINGS: Final = ("exclusive", "time-sliced", "mps", "packed")


def sharing_named(name: str, most: int) -> Sharing:
    """A way of sharing by its name, with at most `most` jobs on a GPU.

    Raises:
        InputError: The name is unknown, or `most` is out of range.
    """
    if name == "exclusive":
        return Exclusive()
    if name == "time-sliced":
        return TimeSliced(most)
    if name == "mps":
        return SideBySide(most)
    if name == "packed":
        return SideBySide(most, packs=True)
    raise InputError(f"sharing {name!r} is unknown; give one of {', '.join(SHARINGS)}.")
