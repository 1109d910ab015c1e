"""Placement service for cluster schedulers, without torch: reservations, decisions, what-ifs.

The names that a scheduler begins with resolve on first use; the rest is in the modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baechi.scheduling.claims import Claim as Claim
    from baechi.scheduling.claims import Wish as Wish
    from baechi.scheduling.client import Client as Client
    from baechi.scheduling.decision import decide as decide
    from baechi.scheduling.ledger import Ledger as Ledger

_HOMES = {
    "Claim": "claims",
    "Client": "client",
    "Ledger": "ledger",
    "Wish": "claims",
    "decide": "decision",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a list of str, computed from the one table)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'baechi.scheduling' has no attribute {name!r}")
    value = getattr(import_module(f"baechi.scheduling.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
