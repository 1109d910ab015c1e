"""Packing: several jobs on a GPU. Which jobs go there is the sharing model's matter.

The policies are orders that stand elsewhere; their names stand for what they are used with, which
`catalog.DEFAULTS` has: Gandiva packs a second job on a GPU while the compute of both fits; Big
Brain's packing factor puts up to k jobs on each, on the GPUs with the fewest, and lets them take
turns.
"""

from typing import final

from baechi.cluster_simulation.policies.policy import Policy


@final
class GandivaPacking(Policy):
    """Whoever finds room goes, in order of arrival."""

    name = "gandiva-packing"


@final
class PackingFactor(Policy):
    """In order of arrival; nobody overtakes."""

    name = "big-brain"
    blocking = True
