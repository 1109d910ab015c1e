"""The step `ecosystem`: scripts of users of transformers, on a placed model and on the unsplit one.

On CPUs `make test-ecosystem` runs many more, in every bit; here kernels round in their own order.
"""

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_check.check import Check

import baechi

_LANES = ("cuda:0/a", "cuda:0/b")
_SIZES = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 96}


def run(check: Check) -> None:
    """A row per script."""
    check.case("generate", _generate)
    if not check.quick:
        check.case("autocast and a scaler", _amp)
        check.case("Trainer", _trainer)


def _both(script: Callable[[Any], Any], training: bool) -> tuple[Any, Any]:
    """What a script gives for the unsplit model and for the placed one."""
    from benchmarks.models import hugging_face

    torch.manual_seed(0)
    model = hugging_face.gpt2(dropout=False, bos_token_id=1, eos_token_id=2, **_SIZES).to("cuda:0")
    model.generation_config.pad_token_id = 0
    placed = baechi.place(
        copy.deepcopy(model.train(training)),
        [baechi.Device(lane, "1GiB", kind="A100-SXM-40GB") for lane in _LANES],
        placer=baechi.RandomPlacer(0),
        training=training,
        costs="estimate",  # these are not about times
        progress=False,
    )
    return script(model), script(placed)


def _close(expected: list[torch.Tensor], found: list[torch.Tensor]) -> Mapping[str, Any]:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, check_device=False)
    pairs = zip(expected, found, strict=True)
    return {"worst_error": max(float((a.float() - b.float()).abs().max()) for a, b in pairs)}


def _generate() -> Mapping[str, Any]:
    ids = torch.arange(3, 13, device="cuda:0").reshape(2, 5)

    def script(model: Any) -> Any:
        with torch.no_grad():
            return model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)

    expected, found = _both(script, training=False)
    assert torch.equal(expected, found), f"other tokens: {found.tolist()}"
    return {}


def _amp() -> Mapping[str, Any]:
    ids = torch.randint(3, 96, (2, 16), device="cuda:0")

    def script(model: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        scaler, losses = torch.amp.GradScaler("cuda"), []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach().cpu())
        return losses

    expected, found = _both(script, training=True)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    return {"losses": [round(float(loss), 4) for loss in found]}


def _trainer() -> Mapping[str, Any]:
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 96, (16,), generator=draw) for _ in range(8)]

    def script(folder: str, model: Any) -> list[torch.Tensor]:
        options: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2}
        quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(folder, logging_steps=1, **options, **quiet)
        if arguments.n_gpu > 1:  # of which Trainer gives the unsplit model copies
            arguments._n_gpu = 1
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        )
        trainer.train()
        logged = trainer.state.log_history
        return [torch.tensor(row["loss"]) for row in logged if "loss" in row]

    with tempfile.TemporaryDirectory() as folder:
        return _close(*_both(partial(script, folder), training=True))
