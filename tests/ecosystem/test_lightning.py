"""Lightning's Trainer around a placed model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit
from torch import nn

pytestmark = pytest.mark.slow


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def classifier(net: nn.Module) -> Any:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier(net)


def fit(module: nn.Module, folder: Path, resume: Path | None = None, epochs: int = 2) -> Any:
    import lightning

    draw = torch.Generator().manual_seed(1)
    rows = list(
        zip(
            torch.randn(12, 8, generator=draw),
            torch.randint(4, (12,), generator=draw),
            strict=True,
        )
    )
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
    )
    data = torch.utils.data.DataLoader(rows, batch_size=4)
    trainer.fit(module, data, data, ckpt_path=resume)
    folder.mkdir(exist_ok=True)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return trainer.callback_metrics["val_loss"], {
        k: v.clone() for k, v in module.state_dict().items()
    }


def test_a_network_inside_a_lightning_module(tmp_path: Path) -> None:
    equal_in_every_bit(lambda place: fit(classifier(place(layers(), optimizer="adamw")), tmp_path))


def test_the_lightning_module_itself(tmp_path: Path) -> None:
    equal_in_every_bit(lambda place: fit(place(classifier(layers()), optimizer="adamw"), tmp_path))


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    def script(place: Place) -> Any:
        fit(classifier(place(layers(), optimizer="adamw")), tmp_path, epochs=1)
        module = classifier(place(layers(), optimizer="adamw"))
        return fit(module, tmp_path, resume=tmp_path / "1.ckpt")

    equal_in_every_bit(script)
