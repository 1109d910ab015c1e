"""How many random cases a test makes: a tenth by default, all in a nightly run."""

from hypothesis import settings


def seeds(nightly: int) -> range:
    """The seeds 0, 1, ... of a run: `nightly` of them, or a tenth where the run is not nightly."""
    nightly_run = settings().max_examples >= settings.get_profile("nightly").max_examples
    return range(nightly if nightly_run else max(1, nightly // 10))
