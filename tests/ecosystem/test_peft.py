"""PEFT's adapters in and around a placed model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit, tiny_llama


def adapted(model: torch.nn.Module, **options: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(model, config)


def steps(model: Any, count: int = 2) -> list[torch.Tensor]:
    ids = torch.arange(3, 19).reshape(2, 8)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_an_adapter_is_trained_saved_and_merged(tmp_path: Path) -> None:
    import peft

    def script(place: Place) -> Any:
        model = place(adapted(tiny_llama(), lora_dropout=0.1), optimizer="adamw")
        losses = steps(model)
        model.save_pretrained(tmp_path)
        read = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path)
        own = peft.get_peft_model_state_dict(model)
        torch.testing.assert_close(peft.get_peft_model_state_dict(read), own, rtol=0, atol=0)
        merged = model.merge_and_unload()
        return losses, own, dict(merged.state_dict())

    equal_in_every_bit(script)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["grown", "static"])
def test_an_adapted_model_generates_split(cache: dict[str, Any]) -> None:
    def script(place: Place) -> Any:
        model = place(adapted(tiny_llama()).eval(), training=False)
        ids = torch.arange(3, 13).reshape(2, 5)
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            **cache,
        )

    equal_in_every_bit(script)


@pytest.mark.slow
def test_an_adapter_around_a_placed_model() -> None:
    import peft

    def script(place: Place) -> Any:
        model = adapted(place(tiny_llama(), optimizer="adamw"))
        return steps(model), peft.get_peft_model_state_dict(model)

    equal_in_every_bit(script)


@pytest.mark.slow
def test_a_switched_off_and_a_second_adapter() -> None:
    def script(place: Place) -> Any:
        model = place(adapted(tiny_llama()), optimizer="adamw")
        ids = torch.arange(3, 19).reshape(2, 8)
        losses = steps(model)
        with model.disable_adapter(), torch.no_grad():
            plain = model(input_ids=ids).logits
        model.add_adapter("second", model.peft_config["default"])
        model.set_adapter("second")
        return losses, plain, steps(model)

    equal_in_every_bit(script)
