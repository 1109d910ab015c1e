"""Jobs in order of arrival that overtake those that find no room: also Gandiva's packing."""

from typing import final

from baechi.cluster_simulation.policy_support.policy import Policy


@final
class FitJobFirst(Policy):
    """In order of arrival, but a job that finds room overtakes those that do not."""

    def __init__(self, name: str = "fjf") -> None:
        self.name = name
