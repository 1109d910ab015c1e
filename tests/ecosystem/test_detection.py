"""DETR and RT-DETR: the matcher of their loss stays outside the placed model."""

from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit

pytestmark = pytest.mark.slow
MODELS = ["DetrForObjectDetection", "RTDetrForObjectDetection"]
LABELS = [
    {
        "class_labels": torch.tensor([1, 3]),
        "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.1, 0.2]]),
    },
    {"class_labels": torch.tensor([2]), "boxes": torch.tensor([[0.6, 0.4, 0.3, 0.3]])},
]


@pytest.mark.parametrize("name", MODELS)
def test_boxes(name: str) -> None:
    from benchmarks.architectures.catalog import example

    def script(place: Place) -> Any:
        model, _, inputs = example(name)
        model = place(model.eval(), training=False)
        with torch.no_grad():
            found = model(**inputs)
        return found.logits, found.pred_boxes

    equal_in_every_bit(script)


def test_training_with_the_loss_outside() -> None:
    from benchmarks.architectures.catalog import example

    def script(place: Place) -> Any:
        model, _, inputs = example("DetrForObjectDetection")
        model = place(model.train(), optimizer="sgd")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            found = model(**inputs)
            loss = model.loss_function(found.logits, LABELS, "cpu", found.pred_boxes, model.config)[
                0
            ]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, dict(model.state_dict())

    equal_in_every_bit(script)
