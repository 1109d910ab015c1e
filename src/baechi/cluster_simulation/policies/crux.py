"""Flows of the jobs that compute most for what they send go first on links: Crux.

The rule (Cao et al., "Crux: GPU-Efficient Communication Scheduling for Deep Learning Training",
SIGCOMM'24): jobs slow each other down on links that they share. GPUs compute most if the flows of
jobs of a high GPU intensity I_j = W_j / t_j go first, where W_j is what all GPUs of a job compute
in an iteration and t_j how long it sends on its slowest link. It leaves the choice of jobs and of
GPUs to another scheduler.

Where we leave it: jobs start in order of arrival, the first that fits, as under `fjf`. W_j counts
GPU-time. The paper multiplies I_j by a factor for how a job's sending overlaps its computing, which
here it does not; chooses paths, of which there is one here; and presses priorities into the few
that switches have. Links are shared only in a simulation with `contention` (`links.py`); without it
nothing differs from `fjf`.
"""

from typing import final

from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policy_support.policy import Policy


@final
class Crux(Policy):
    """The first that fits; on links the highest GPU intensity first."""

    name = "crux"

    def urgency(self, run: JobRun) -> float:
        """The GPU intensity of a job that sends."""
        sends = run.grant.sending
        return len(run.grant.gpus) * (WHOLE - sends) / sends
