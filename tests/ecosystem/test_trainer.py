"""Hugging Face's Trainer on a placed model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit, padded, tiny_gpt2, tiny_llama, token_rows


def train(
    place: Place,
    folder: Path,
    *,
    resume: str | None = None,
    model: Any = tiny_gpt2,
    rows: Any = None,
    collate: Any = None,
    **arguments: Any,
) -> Any:
    """Losses of each step and of an evaluation, and the parameters."""
    from transformers import Trainer, TrainingArguments

    rows = rows or token_rows(8)
    network = place(model(), optimizer="adamw")
    trainer = Trainer(
        model=network,
        args=TrainingArguments(
            str(folder),
            **{"num_train_epochs": 1, "per_device_train_batch_size": 2, "logging_steps": 1}
            | {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
            | arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows[:2],
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    traced = getattr(network, "traced", None)  # of the placed one; bf16 decorates its forward
    assert traced is None or not any("autocast" in op.name for op in traced.ops)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    last = None if resume else trainer.evaluate()["eval_loss"]
    return losses, last, {name: one.clone() for name, one in network.state_dict().items()}


@pytest.mark.costly("it places a training, an evaluation and a resumed training")
def test_it_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    def script(place: Place) -> Any:
        folder = tmp_path / ("unsplit" if len(list(tmp_path.iterdir())) == 0 else "split")
        whole = train(place, folder, save_strategy="steps", save_steps=2)
        saved = GPT2LMHeadModel.from_pretrained(folder / "checkpoint-4").state_dict()
        torch.testing.assert_close(saved, whole[2], rtol=0, atol=0)  # and the head stays tied
        resumed = train(place, folder, resume="checkpoint-2")
        torch.testing.assert_close(resumed[2], whole[2], rtol=0, atol=0)
        return whole, resumed[0][-1], saved

    equal_in_every_bit(script)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"bf16": True, "model": tiny_gpt2},
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"optim": "sgd", "max_grad_norm": 0.1},
    ],
    ids=["bf16", "bf16-grouped-heads", "accumulation", "smoothing", "checkpointing", "sgd"],
)
def test_its_arguments(arguments: dict[str, Any], tmp_path: Path) -> None:
    equal_in_every_bit(lambda place: train(place, tmp_path, **{"model": tiny_llama} | arguments))


@pytest.mark.slow
def test_batches_of_many_lengths(tmp_path: Path) -> None:
    rows = token_rows(22, tuple(range(5, 16)))
    found = equal_in_every_bit(
        lambda place: train(
            place, tmp_path, rows=rows, collate=padded, per_device_train_batch_size=1
        )
    )
    assert len(found[0]) == 22


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GemmaForSequenceClassification", "BertForQuestionAnswering"])
def test_labels_of_other_tasks(name: str, tmp_path: Path) -> None:
    from benchmarks.architectures.catalog import example

    _, _, batch = example(name)
    rows = [{key: value[i] for key, value in batch.items()} for i in (0, 1)] * 2
    equal_in_every_bit(
        lambda place: train(place, tmp_path, model=lambda: example(name)[0], rows=rows)
    )
