"""A user's script, run with the unsplit model and with one line more: the call of `place`."""

from collections.abc import Callable
from typing import Any

import torch
from placed import EXACT, lazily, one_thread
from torch import nn

import baechi

# What a script is given to call on its model: the identity, or a `place` that splits.
Place = Callable[..., Any]
TOKENS: Any = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def equal_in_every_bit(script: Callable[[Place], Any], **options: Any) -> Any:
    """What a script returns, which is the same with its models unsplit and split.

    Every model is on two logical CPU devices, its operators dealt out in turn.

    Args:
        script: Calls what it is given on each model that is to be placed, and returns tensors and
            numbers. It seeds what it draws.
        options: Further ones of `baechi.place`.
    """
    placed: list[baechi.PlacedModule] = []

    def place(model: nn.Module, **own: Any) -> Any:
        placed.append(lazily(model, **options | own))
        return placed[-1]

    with one_thread():
        expected = script(lambda model, **_: model)
        found = script(place)
    torch.testing.assert_close(found, expected, **EXACT, equal_nan=True)
    assert placed
    for module in placed:
        assert set(module.placement.devices) == {0, 1}
        module.unplace()
    return found


def tiny_gpt2(**options: Any) -> nn.Module:
    """A decoder of one layer, whose embedding is its head, too; it drops out in training."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: Any = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, **TOKENS, **options))


def tiny_llama(**options: Any) -> nn.Module:
    """A decoder of one layer with rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **TOKENS, **options))


def token_rows(count: int, lengths: tuple[int, ...] = (8,)) -> list[dict[str, torch.Tensor]]:
    """Rows of a dataset of random tokens, whose lengths go round."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        ids = torch.randint(3, 64, (lengths[index % len(lengths)],), generator=draw)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return rows


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        name: pad([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def tokenizer() -> Any:
    """A tokenizer of sixty words, made in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)
