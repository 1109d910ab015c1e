"""timm's models, trained for a step."""

from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision", reason="timm imports torchvision, which fits one torch alone")


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "mobilenetv3_small_050",
        "vit_tiny_patch16_224",
        "convnext_atto",
        "efficientnet_lite0",
    ],
)
def test_a_step_of_training(name: str) -> None:
    import timm
    from timm.optim import create_optimizer_v2

    size: Any = {"img_size": 32} if "vit" in name else {}

    def script(place: Place) -> Any:
        torch.manual_seed(0)
        model = place(timm.create_model(name, num_classes=4, **size).train(), optimizer="adamw")
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
        torch.manual_seed(1)
        loss = torch.nn.functional.cross_entropy(
            model(torch.randn(2, 3, 32, 32)), torch.tensor([0, 3])
        )
        loss.backward()
        optimizer.step()
        return loss.detach(), dict(model.state_dict())

    equal_in_every_bit(script)


def test_features_of_a_placed_backbone() -> None:
    import timm

    def script(place: Place) -> Any:
        torch.manual_seed(0)
        model = place(timm.create_model("resnet18", features_only=True).eval(), training=False)
        with torch.no_grad():
            return model(torch.ones(1, 3, 32, 32))

    equal_in_every_bit(script)


def test_a_head_apart_from_its_features() -> None:
    import timm

    def script(place: Place) -> Any:
        torch.manual_seed(0)
        model = place(timm.create_model("resnet18", num_classes=4).eval(), training=False)
        with torch.no_grad():
            features = model.forward_features(torch.ones(1, 3, 32, 32))
            return features, model.forward_head(features), model(torch.ones(1, 3, 32, 32))

    equal_in_every_bit(script)
