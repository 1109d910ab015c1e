"""Recurrent layers have one plan for all lengths, with the memory of each."""

import copy
from typing import Any, Final

import placed
import pytest
import torch
from seeds import covering, some
from torch import Tensor, nn

import baechi
from baechi.tracing.node_facts import Facts

_KINDS: Final = (nn.LSTM, nn.GRU, nn.RNN)  # torch runs the last two step by step
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"batch_first": True, "bidirectional": True},
    {"num_layers": 2, "dropout": 0.3},
    {"batch_first": True, "num_layers": 2, "bidirectional": True, "bias": False},
)


class Reading(nn.Module):
    """A recurrent layer between others."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = options.get("proj_size", 8) * (2 if options.get("bidirectional") else 1)
        self.before, self.layer, self.after = (
            nn.Linear(8, 8),
            kind(8, 8, **options),
            nn.Linear(width, 8),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, state = self.layer(self.before(x))
        return self.after(found), state[0] if isinstance(state, tuple) else state


def saved_bytes(facts: Facts) -> int:
    kept = {storage for node in facts.nodes.values() for storage in node.saved}
    return sum(facts.storages[storage].nbytes for storage in kept)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *covering(_KINDS, _OPTIONS),
        pytest.param(nn.LSTM, {"proj_size": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda row: row.__name__ if isinstance(row, type) else ", ".join(row) or "plain",
)
def test_one_plan_takes_all_lengths_and_batches(
    kind: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    model = Reading(kind, options)
    module = placed.lazily(copy.deepcopy(model), placer=baechi.RandomPlacer(1))
    with placed.one_thread():
        for sizes in ((2, 3), (3, 4), (2, 6)):
            x = torch.randn(*sizes, 8)
            steps = []
            for each in (model, module):
                torch.manual_seed(1)
                steps.append(placed.step(each, (x,), {}))
            assert not steps[0].differs_from(steps[1]), sizes
    assert len(module._specializations) == 1
    family = module.traced.module.family
    static = baechi.trace(copy.deepcopy(model), (torch.randn(6, 8, 8),))
    found = family.facts(family.joined(static.module.call))
    assert saved_bytes(found) == saved_bytes(static.module.facts)
    module.unplace()


@pytest.mark.parametrize("kind", some((nn.GRU, nn.RNN, nn.LSTM), 2))
def test_a_peak_is_that_of_the_largest_call(kind: type[nn.RNNBase]) -> None:
    model = Reading(kind, {"num_layers": 2, "dropout": 0.3})
    module = placed.lazily(model, placer="single", costs="measure")
    for length in (3, 20, 40):
        module(torch.randn(length, 32, 8))[0].sum().backward()
        (seen,), (said,) = (
            [peak for peak in peaks if peak]
            for peaks in (module.measure(1).peak_bytes, module.schedule.peak_bytes)
        )
        assert seen <= said <= 1.03 * seen, length
    module.unplace()
