"""TRL's supervised fine-tuning of a placed model."""

from pathlib import Path
from typing import Any

import pytest
from scripts import Place, equal_in_every_bit, tiny_llama, tokenizer

pytestmark = pytest.mark.slow


def tune(place: Place, folder: Path, peft_config: Any = None, **arguments: Any) -> Any:
    import trl
    from datasets import Dataset

    texts = [" ".join(f"w{(i * 7 + j) % 60}" for j in range(6 + i)) for i in range(6)]
    model = place(tiny_llama(), optimizer="adamw")
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            str(folder),
            **{"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1}
            | {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
            | {"bf16": False, "gradient_checkpointing": False, "max_length": 16}
            | arguments,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: one.clone() for name, one in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_checkpointing": True},
        {"packing": True},
        {"bf16": True},
    ],
    ids=lambda one: next(iter(one), "plain"),
)
def test_it_fine_tunes(arguments: dict[str, Any], tmp_path: Path) -> None:
    losses, _ = equal_in_every_bit(lambda place: tune(place, tmp_path, **arguments))
    assert losses


def test_it_fine_tunes_an_adapter(tmp_path: Path) -> None:
    import peft

    def script(place: Place) -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return tune(place, tmp_path, peft_config=config)

    equal_in_every_bit(script)
