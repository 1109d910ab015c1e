"""The models of the prediction benchmark: those of `tests/support/zoo.py`, at sizes people use.

Weights are random from a fixed seed, in fp32 and without dropout. Sizes are such that a training
step takes a tenth of a second to a second on two cores.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from benchmarks.models import hugging_face
from benchmarks.models.inception_v3 import inception_v3
from benchmarks.models.lstm_lm import LSTMLanguageModel
from benchmarks.models.resnet import resnet18, resnet50
from benchmarks.models.towers import Towers
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_VOCABULARY: Final = 8192
_SPECIAL_TOKENS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@final
@dataclass(frozen=True)
class Model:
    """A model to predict.

    Attributes:
        build: The model and its example arguments for a batch size.
        batches: The batch sizes of a whole run.
        is_quick: Whether a quick run has it, at the first of its batch sizes.
    """

    build: Callable[[int], Example]
    batches: tuple[int, ...]
    is_quick: bool = False


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, (batch, length))


def gpt2(batch: int) -> Example:
    """GPT-2 small but for a shorter vocabulary: 12 layers, 768 wide."""
    model = hugging_face.gpt2(
        vocab_size=_VOCABULARY,
        **_SPECIAL_TOKENS,
        dropout=False,
    )
    tokens = _tokens(batch, 64)
    return model, (), {"input_ids": tokens, "labels": tokens}


def bert(batch: int) -> Example:
    """BERT of 6 layers (half of base), 768 wide."""
    tokens = _tokens(batch, 64)
    model = hugging_face.bert(
        vocab_size=_VOCABULARY,
        num_hidden_layers=6,
        pad_token_id=0,
        dropout=False,
    )
    return model, (tokens,), {"attention_mask": torch.ones_like(tokens)}


def t5(batch: int) -> Example:
    """T5 small: 6 and 6 layers, 512 wide."""
    kwargs = {"input_ids": _tokens(batch, 64), "labels": _tokens(batch, 32)}
    model = hugging_face.t5(
        vocab_size=_VOCABULARY,
        pad_token_id=0,
        eos_token_id=1,
        dropout=False,
    )
    return model, (), kwargs


def llama(batch: int) -> Example:
    """A Llama of 6 layers, 512 wide, 8 query and 2 key heads."""
    model = hugging_face.llama(
        vocab_size=_VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **_SPECIAL_TOKENS,
    )
    return model, (_tokens(batch, 64),), {}


def mixtral(batch: int) -> Example:
    """A Mixtral of 4 layers, 256 wide, 4 experts of which 2 are used."""
    model = hugging_face.mixtral(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        **_SPECIAL_TOKENS,
    )
    return model, (_tokens(batch, 64),), {}


def vit(batch: int) -> Example:
    """ViT small: 12 layers, 384 wide, images of 224 x 224."""
    model = hugging_face.vit(
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=1000,
        dropout=False,
    )
    return model, (torch.randn(batch, 3, 224, 224),), {}


def transformer(batch: int) -> Example:
    """`nn.Transformer` of 4 and 4 layers, 512 wide."""
    model = nn.Transformer(
        num_encoder_layers=4, num_decoder_layers=4, dropout=0.0, batch_first=True
    )
    source, target = torch.randn(batch, 64, 512), torch.randn(batch, 48, 512)
    mask = nn.Transformer.generate_square_subsequent_mask(48)
    return model, (source, target), {"tgt_mask": mask, "tgt_is_causal": True}


def lstm(batch: int) -> Example:
    """An LSTM language model of 2 layers, 512 wide."""
    return LSTMLanguageModel(_VOCABULARY, 512, 2, tied=True), (_tokens(batch, 32),), {}


def towers(batch: int) -> Example:
    """Two towers of 8 dense layers, 512 wide."""
    return Towers(n_towers=2, depth=8, width=512), (torch.randn(batch, 512),), {}


def _image(build: Callable[[], nn.Module], size: int) -> Callable[[int], Example]:
    return lambda batch: (build(), (torch.randn(batch, 3, size, size),), {})


MODELS: Final[Mapping[str, Model]] = {
    "towers": Model(towers, (256, 1024), is_quick=True),
    "resnet18": Model(_image(resnet18, 224), (2, 8), is_quick=True),
    "vit": Model(vit, (1, 4), is_quick=True),
    "lstm": Model(lstm, (8,), is_quick=True),
    "gpt2": Model(gpt2, (1, 4)),
    "bert": Model(bert, (2,)),
    "t5": Model(t5, (2,)),
    "llama": Model(llama, (2, 8)),
    "mixtral": Model(mixtral, (2,)),
    "transformer": Model(transformer, (2,)),
    "resnet50": Model(_image(resnet50, 224), (2,)),
    "inception": Model(_image(inception_v3, 299), (1,)),
}


def build(name: str, batch: int, *, training: bool) -> Example:
    """The model in its mode, with its example arguments."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name].build(batch)
    return model.train(training), args, kwargs
