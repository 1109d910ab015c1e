"""Small models of `transformers` with random weights, by their class's name.

A configuration gets every name that some family uses for the same size, without dropout and caches
unless they are asked for; what one family needs besides is in its row.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Row = tuple[Any, ...]  # `own` of `small`, a function that makes arguments, and `parts` if any

VOCABULARY = 97
LENGTH = 16

_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "d_embed", "emb_dim")
_FEED_FORWARD = (
    *("intermediate_size", "ffn_dim", "d_inner", "hidden_dim", "d_ff", "n_inner"),
    *("ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"),
)
_LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "num_decoder_blocks"),
)
_HEADS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    **dict.fromkeys(_WIDTH, 32),
    **dict.fromkeys(_FEED_FORWARD, 64),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
}


def small(
    name: str,
    own: Mapping[str, Any],
    parts: Mapping[str, Mapping[str, Any]],
    *,
    dropout: bool = False,
    cache: bool = False,
) -> nn.Module:
    """The class of this name with small sizes.

    Args:
        name: Of a class of `transformers`.
        own: What its configuration has otherwise.
        parts: The same for configurations inside it, by name, such as `text_config`.
        dropout: With the dropout of the configuration's defaults.
        cache: With `use_cache` as the configuration's default has it.
    """
    import transformers

    kind = getattr(transformers, name)
    common = SIZES if cache else {**SIZES, "use_cache": False}
    known = sizes_of(kind.config_class, common)
    inner = {part: {**common, **sizes} for part, sizes in parts.items()}
    config = kind.config_class(**{**known, **own, **inner})
    if dropout:
        return kind(config)
    undropped(config)
    model = kind(config)
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.0
    return model


def sizes_of(config_class: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """The small sizes that a configuration knows by these names."""
    known = inspect.signature(config_class.__init__).parameters
    renamed = getattr(config_class, "attribute_map", {})
    sizes = {name: size for name, size in common.items() if name in known and name not in renamed}
    return {**sizes, "num_labels": 5}


def undropped(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            undropped(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Random tokens, none special."""
    return torch.randint(5, VOCABULARY, (batch, length))


def padding(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """A mask whose first row ends early."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - 3 :] = 0
    return mask


def masked_lm() -> dict[str, Any]:
    """Tokens, a mask and labels."""
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding(), "labels": ids.clone()}


def unmasked_lm() -> dict[str, Any]:
    """Tokens and labels."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def sequences() -> dict[str, Any]:
    """Tokens in and out."""
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens(length=8)}


def classified() -> dict[str, Any]:
    """Tokens with a label for each sequence."""
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": torch.tensor([1, 3])}


def images(size: int = 32) -> dict[str, Any]:
    """Images with a class each."""
    return {**plain_images(size), "labels": torch.tensor([1, 3])}


def plain_images(size: int = 32) -> dict[str, Any]:
    """Images alone."""
    return {"pixel_values": torch.randn(2, 3, size, size)}


def waves(length: int = 2000) -> dict[str, Any]:
    """Waveforms with texts."""
    return {"input_values": torch.randn(2, length), "labels": torch.randint(5, 20, (2, 3))}
