"""Accelerate's loop around a placed model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from placed import lazily
from scripts import Place, equal_in_every_bit, padded, tiny_gpt2, token_rows


def train(place: Place, folder: Path, mixed_precision: str = "no") -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = place(tiny_gpt2(), optimizer="adamw")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.utils.data.DataLoader(token_rows(4), batch_size=2, collate_fn=padded)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    losses = []

    def epoch() -> None:
        for batch in rows:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())

    epoch()
    accelerator.save_state(str(folder))
    epoch()
    first = {name: one.clone() for name, one in model.state_dict().items()}
    accelerator.load_state(str(folder))  # the generators' states, too
    epoch()
    torch.testing.assert_close(dict(model.state_dict()), first, rtol=0, atol=0)
    accelerator.save_model(model, str(folder / "model"))
    plain = accelerator.unwrap_model(model)
    assert type(plain).__name__ == "GPT2LMHeadModel"
    accelerator.free_memory()
    return losses, first


def test_prepare_clip_save_and_load(tmp_path: Path) -> None:
    equal_in_every_bit(lambda place: train(place, tmp_path))


class Crowded(torch.autograd.Function):
    """Goes backward over small batches only."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return gradient


class Full(torch.nn.Sequential):
    """Runs out of memory in the backward of a large batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Crowded.apply(self[0](x)))


def test_the_largest_batch_with_room_is_found() -> None:
    from accelerate.utils import find_executable_batch_size

    placed = lazily(Full(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))

    @find_executable_batch_size(starting_batch_size=16)
    def run(batch_size: int) -> int:
        placed(torch.ones(batch_size, 4)).sum().backward()
        return batch_size

    assert 2 <= run() <= 5
    placed.unplace()


@pytest.mark.slow
def test_mixed_precision_is_the_autocast_that_prepare_puts_around_forward(tmp_path: Path) -> None:
    losses, _ = equal_in_every_bit(lambda place: train(place, tmp_path, "bf16"))
    assert losses[1].dtype == torch.float32
