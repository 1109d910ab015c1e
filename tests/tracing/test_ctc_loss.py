"""A CTC loss inside a model, with lengths that are tensors."""

import pytest
import torch
from placed import at_random, one_thread, step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional


class Recognizer(nn.Module):
    """Its own loss, with targets in rows or one after another."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        mask = labels > 0
        targets = labels if self.rows else labels.masked_select(mask)
        scores = logits.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, targets, lengths, mask.sum(-1)), logits


@pytest.mark.parametrize("rows", [True, False])
def test_a_model_with_a_ctc_loss_is_split(rows: bool) -> None:
    torch.manual_seed(0)
    model = Recognizer(rows)
    labels = torch.tensor([[1, 2, 0], [3, 4, 2]])
    args = (torch.randn(2, 9, 4), labels, torch.tensor([9, 8]))
    with one_thread():
        wanted = step(model, args, {})
        placed = at_random(model, args)
        assert placed.traced.rung == "torch.export (non-strict)"
        assert not wanted.differs_from(step(placed, args, {}))


def test_torch_still_lacks_the_shapes() -> None:
    """If this fails, torch is mended: `workarounds.ctc_losses_known` may go."""
    with FakeTensorMode():
        scores, targets = torch.zeros(9, 2, 5), torch.ones(2, 3, dtype=torch.int64)
        lengths = torch.tensor([9, 8]), torch.tensor([3, 2])
        with pytest.raises(DynamicOutputShapeException, match="_ctc_loss"):
            functional.ctc_loss(scores, targets, *lengths)
