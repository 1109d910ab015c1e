"""Random placements on two to four devices: each is proved, and equals the unsplit model.

A random placement puts every op, or group, on a random device, so it finds a transfer, a wait or a
gradient that is missing. Long: `python3 -m pytest -m slow tests/runtime/test_random_placements.py`.
"""

import copy

import placed
import pytest
import zoo
from seeds import some

from baechi.program.race_proof import check_program
from baechi.tracing.ladder import trace

ALL = {**zoo.MODELS, **zoo.AWKWARD}


def equals_the_unsplit(name: str, n_placements: int) -> None:
    model, args, kwargs = ALL[name]()
    state = copy.deepcopy(model.state_dict())
    traced = trace(model, *copy.deepcopy((args, kwargs)))
    graphs = set()
    with placed.one_thread():
        expected = placed.step(copy.deepcopy(model), args, kwargs)
        for seed in range(n_placements):
            model.load_state_dict(state)
            module = placed.again_at_random(traced, seed=100 + seed, devices=2 + seed % 3)
            check_program(module.program)
            assert len(module.program.phases) == 2
            graphs.add(module.placement.devices)
            actual = placed.step(module, args, kwargs)
            module.unplace()
            wrong = expected.differs_from(actual)
            assert not wrong, seed
    assert len(graphs) > 1 or len(traced.ops) < 5


@pytest.mark.parametrize("name", some(["resnet_train", "awkward", "in_place", "tied"], 2))
def test_a_few_random_placements_of_some_models(name: str) -> None:
    """Few, for `test_transparency` has some of every model."""
    equals_the_unsplit(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_two_hundred_random_placements_of_every_model(name: str) -> None:
    equals_the_unsplit(name, 200)
