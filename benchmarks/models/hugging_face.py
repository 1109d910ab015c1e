"""Models of Hugging Face's transformers by their sizes, with random weights.

Arguments are those of each model's configuration. With `dropout=False` nothing is dropped; no model
keeps keys and values for a next call.
"""

from typing import Any

from torch import nn


def gpt2(*, dropout: bool = True, **sizes: Any) -> nn.Module:
    """A decoder with tied embeddings and its own loss; GPT-2 small where no size is given."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {} if dropout else {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **off, **sizes))
    model.loss_type = "ForCausalLM"  # else transformers warns that it guesses this
    return model


def bert(*, dropout: bool = True, **sizes: Any) -> nn.Module:
    """An encoder with a masked-token head tied to its embedding; BERT base."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_hidden(dropout), **sizes))


def t5(*, dropout: bool = True, **sizes: Any) -> nn.Module:
    """An encoder and a decoder that share their embedding; T5 small."""
    from transformers import T5Config, T5ForConditionalGeneration

    off = {} if dropout else {"dropout_rate": 0.0}
    config = T5Config(use_cache=False, decoder_start_token_id=0, **off, **sizes)
    return T5ForConditionalGeneration(config)


def llama(**sizes: Any) -> nn.Module:
    """A decoder with rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))


def mixtral(**sizes: Any) -> nn.Module:
    """A mixture of experts: which expert runs depends on the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(use_cache=False, **sizes))


def vit(*, dropout: bool = True, **sizes: Any) -> nn.Module:
    """A vision transformer; ViT base."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_hidden(dropout), **sizes))


def _hidden(dropout: bool) -> dict[str, Any]:
    return {} if dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
