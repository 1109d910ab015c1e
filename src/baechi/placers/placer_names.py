"""The placers by name, as `solve` and the command line take them."""

from typing import Final

from baechi.errors import InputError
from baechi.placers.auto import Auto
from baechi.placers.baselines import RandomPlacer, RoundRobin, SingleDevice
from baechi.placers.contiguous import Contiguous
from baechi.placers.etf import METF
from baechi.placers.heft import HEFT, PEFT
from baechi.placers.local_search import LocalSearch
from baechi.placers.metis import Metis
from baechi.placers.placer import Placer
from baechi.placers.sct import MSCT
from baechi.placers.topo import MTopo

PLACERS: Final[dict[str, Placer]] = {
    placer.name: placer
    for placer in (
        Auto(),
        MTopo(),
        METF(),
        MSCT(),
        HEFT(),
        PEFT(),
        Contiguous(),
        Metis(),
        LocalSearch(),
        SingleDevice(),
        RoundRobin(),
        RandomPlacer(),
    )
}


def placer_of(placer: str | Placer) -> Placer:
    """The placer of that name, in any case.

    Raises:
        InputError: There is none.
    """
    if isinstance(placer, Placer):
        return placer
    known = PLACERS.get(placer.lower()) if isinstance(placer, str) else None
    if known is None:
        names = ", ".join(repr(name) for name in PLACERS)
        raise InputError(f"placer {placer!r} is unknown; it must be one of {names}, or a Placer.")
    return known
