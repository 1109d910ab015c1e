"""`generate` of models with an encoder: it is called beside the model, and split, too."""

from typing import Any

import pytest
import torch
from benchmarks.architectures.small import small, tokens
from scripts import Place, equal_in_every_bit, tiny_gpt2, tokenizer

pytestmark = pytest.mark.slow
MODELS: dict[str, Any] = {
    "T5ForConditionalGeneration": {"d_kv": 8},
    "BartForConditionalGeneration": {},
    "WhisperForConditionalGeneration": {"max_source_positions": 32},
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = small(name, {**MODELS[name], "use_cache": True}, {}).eval()
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if "Whisper" in name:
        return model, {"input_features": torch.randn(2, 80, 64)}
    return model, {"input_ids": tokens()}


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"num_beams": 2}],
    ids=lambda one: next(iter(one), "greedy"),
)
@pytest.mark.parametrize("name", MODELS)
def test_it_generates(name: str, options: dict[str, Any]) -> None:
    def script(place: Place) -> Any:
        model, inputs = model_of(name)
        model = place(model, training=False, max_shapes=3)
        return model.generate(**inputs, **{"max_new_tokens": 6, "do_sample": False} | options)

    equal_in_every_bit(script)


@pytest.mark.parametrize("name", MODELS)
def test_the_encoder_is_split_too(name: str) -> None:
    def script(place: Place) -> Any:
        model, inputs = model_of(name)
        model = place(model, training=False)
        with torch.no_grad():
            return model.get_encoder()(*inputs.values()).last_hidden_state

    equal_in_every_bit(script)


def test_a_pipeline_generates_text() -> None:
    from transformers import pipeline

    def script(place: Place) -> Any:
        model = place(tiny_gpt2().eval(), training=False)
        made = pipeline("text-generation", model=model, tokenizer=tokenizer())
        texts = made(["w3 w5 w7", "w2"], max_new_tokens=4, do_sample=False)
        words = " ".join(row[0]["generated_text"] for row in texts)
        return torch.tensor([int(word[1:]) for word in words.split() if word[1:].isdigit()])

    assert len(equal_in_every_bit(script)) > 4
