"""Every model of the zoo at three more batch sizes: the unsplit model's bits, and two traces."""

import copy
import functools
from typing import Any

import pytest
import torch
from placed import EXACT, assert_same_values, lazily
from seeds import covering
from steps import ALL, assert_same_step, infer, train
from torch.utils import _pytree as pytree
from zoo import Plain

from baechi.tracing import ladder

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["towers", "buffers", "inputs_as_outputs", "plain_dataclass"]
OTHERS = [name for name in ALL if name not in QUICK]
AT_NIGHT = [
    pytest.param(name, training, marks=pytest.mark.slow)
    for name in OTHERS
    for training in (True, False)
]


def resized(value: Any, batch: int, size: int) -> Any:
    """The same arguments with other sizes where the batch is; one tensor remains one."""

    @functools.cache
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[0] != batch:
            return tensor
        rows = tensor.detach().index_select(0, torch.arange(size) % batch)
        return rows.requires_grad_(tensor.requires_grad)

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Plain):
            return Plain(change(leaf.hidden), [change(each) for each in leaf.others])
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(changed, value)


def batch_of(value: Any) -> int:
    """The first size of the first tensor."""
    first = pytree.tree_leaves(value)[0]
    tensor = first.hidden if isinstance(first, Plain) else first
    return int(tensor.shape[0])


@pytest.mark.filterwarnings("ignore:.*stays on one device")
@pytest.mark.parametrize(("name", "training"), [*covering(QUICK, [True, False]), *AT_NIGHT])
def test_at_three_more_sizes_the_bits_are_the_unsplit_model_s(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = 0
    trace = ladder.trace

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal traces
        traces += 1
        return trace(*args, **kwargs)

    monkeypatch.setattr(ladder, "trace", counted)
    model, args, kwargs = ALL[name]()
    unsplit, run = copy.deepcopy(model), train if training else infer
    state = copy.deepcopy(model.state_dict())
    module = lazily(model, training=training)
    batch = batch_of((args, kwargs))
    more = [size for size in (3, 5, 4, 6) if size != batch][:3]
    for size in (batch, *more):
        example = resized((args, kwargs), batch, size)
        steps = []
        for each in (module, unsplit):
            each.zero_grad()
            each.load_state_dict(state)
            torch.manual_seed(size)
            steps.append(run(each, example))
        if training:
            assert_same_step(*steps, **EXACT)
        else:
            assert_same_values(steps[0].outputs, steps[1].outputs, **EXACT)
    assert len(set(module.placement.devices)) == 2
    assert traces <= 2, module.remarks
    assert not any("a plan for each shape" in remark for remark in module.remarks)
    module.unplace()
