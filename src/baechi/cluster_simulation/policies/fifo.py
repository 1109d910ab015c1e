"""Jobs in order of arrival, with overtaking and without."""

from typing import final

from baechi.cluster_simulation.policy_support.policy import Policy


class Fifo(Policy):
    """In order of arrival, without overtaking: also longest pending first, and Big Brain's."""

    blocking = True

    def __init__(self, name: str = "fifo") -> None:
        self.name = name


@final
class FitJobFirst(Policy):
    """In order of arrival, but who finds room overtakes: also Gandiva's packing."""

    def __init__(self, name: str = "fjf") -> None:
        self.name = name
