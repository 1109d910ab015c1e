"""Device maps for `from_pretrained`: modules stay whole, and every tensor has an entry."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from placed import made_up_profile
from torch import nn

import baechi


def halves(model: nn.Module, *call: Any) -> dict[str, int]:
    """Two devices, neither of which has room for an inference of the whole."""
    traced = baechi.trace(model, *call)
    graph = traced.graph(made_up_profile(traced), training=False)
    one = baechi.Cluster.connected([baechi.Device("cpu:0", "1GiB")], baechi.Link(1, 10**9))
    (peak,) = baechi.simulate(graph, one, baechi.solve(graph, one)).peak_bytes
    return dict.fromkeys(("cpu:0", "cpu:1"), peak * 4 // 5)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(zoo.llama, id="llama", marks=pytest.mark.slow),
        pytest.param(zoo.gpt2, id="gpt2"),
    ],
)
def test_blocks_of_transformers_stay_whole_and_the_map_loads(
    make: Callable[[], zoo.Example], tmp_path: Path
) -> None:
    model, args, kwargs = make()
    kind, config = type(model), model.config
    model.eval().save_pretrained(tmp_path)
    blank = baechi.skeleton(lambda: kind(config)).eval()
    devices = halves(blank, args, kwargs)
    found = baechi.device_map(blank, devices, example_args=args, example_kwargs=kwargs)
    assert set(found.values()) == {"cpu:0", "cpu:1"}
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    owners = [[path for path in found if f"{name}.".startswith(f"{path}.")] for name in names]
    assert all(len(row) == 1 for row in owners)
    blocks = [path for path in found if path.rpartition(".")[2].isdigit()]
    assert len(blocks) == config.num_hidden_layers
    if config.tie_word_embeddings:
        assert found["lm_head"] == found["transformer.wte"]
    on_cpu = dict.fromkeys(found, "cpu")
    again = kind.from_pretrained(tmp_path, device_map=on_cpu).eval()
    assert torch.equal(again(*args, **kwargs).logits, model(*args, **kwargs).logits)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    """A row of blocks, and a sum of two branches that its own forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(16))
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x + self.shift)
        return self.left(x) + self.right(x)


def test_what_a_forward_adds_up_is_on_one_device_and_residuals_are_not_cut() -> None:
    model = Net()
    args = (torch.ones(2, 16),)
    found = baechi.device_map(model, halves(model, args), example_args=args)
    blocks = [f"blocks.{i}" for i in range(4)]
    assert list(found) == ["shift", *blocks, "left", "right", "unused"]
    assert found["left"] == found["right"] == found["unused"]
    assert len({found[path] for path in [*blocks, "left"]}) == 2
    devices = [found[path] for path in ["shift", *blocks, "left"]]
    assert sum(one != other for one, other in pairwise(devices)) == 1


def test_a_block_that_fits_nowhere_is_named() -> None:
    small = {"cpu:0": 1500, "cpu:1": 2000}
    with pytest.raises(baechi.InfeasibleError, match="cannot place"):
        baechi.device_map(Net(), small, example_args=(torch.ones(2, 16),))
