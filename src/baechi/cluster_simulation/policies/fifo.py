"""Jobs in order of arrival: also longest pending first, and Big Brain's."""

from baechi.cluster_simulation.policy_support.policy import Policy


class Fifo(Policy):
    """In order of arrival, without overtaking: also longest pending first, and Big Brain's."""

    blocking = True

    def __init__(self, name: str = "fifo") -> None:
        self.name = name
