"""The models whose training steps are the jobs, at published sizes, on the meta device.

No weight is allocated: shapes are traced, and `baechi.estimate` computes what each operator costs
on a device that need not be here. Weights, gradients and the optimizer's state are of `dtype`;
batches are such that a step fits one to four GPUs of 40 GiB.
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
from benchmarks.residual.names import KIND, MEMORY_BYTES, MOST_GPUS
from torch import Tensor, nn

import baechi
from baechi import Cluster, OpGraph
from baechi.cluster_simulation.placement_schemes import NEAR
from baechi.problem.coarsening import coarsen
from baechi.problem.problem_arrays import Problem

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

OPTIMIZER: Final = "adamw"
# Graphs of more ops are coarsened as `solve` does: a question then takes milliseconds.
MANY_OPS: Final = 600


@final
@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        build: The model and its example arguments.
        dtype: Of its weights and activations.
    """

    build: Callable[[], Example]
    dtype: torch.dtype = torch.float32


def _tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _gpt2(layers: int, width: int, heads: int, batch: int) -> Callable[[], Example]:
    def build() -> Example:
        model = hugging_face.gpt2(n_layer=layers, n_embd=width, n_head=heads)
        tokens = _tokens(batch, 1024)
        return model, (), {"input_ids": tokens, "labels": tokens}

    return build


def _encoder(layers: int, width: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def _bert(layers: int, width: int, heads: int, batch: int) -> Callable[[], Example]:
    def build() -> Example:
        tokens = _tokens(batch, 512)
        model = hugging_face.bert(**_encoder(layers, width, heads))
        return model, (tokens,), {"attention_mask": torch.ones_like(tokens)}

    return build


def _t5(width: int, layers: int, heads: int, inner: int, batch: int) -> Callable[[], Example]:
    def build() -> Example:
        model = hugging_face.t5(d_model=width, num_layers=layers, num_heads=heads, d_ff=inner)
        return model, (), {"input_ids": _tokens(batch, 512), "labels": _tokens(batch, 128)}

    return build


def _llama(
    layers: int, width: int, inner: int, heads: int, key_heads: int, words: int, batch: int
) -> Callable[[], Example]:
    def build() -> Example:
        model = hugging_face.llama(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=2048,
        )
        return model, (_tokens(batch, 1024),), {}

    return build


def _vit(layers: int, width: int, heads: int, batch: int) -> Callable[[], Example]:
    def build() -> Example:
        model = hugging_face.vit(**_encoder(layers, width, heads), num_labels=1000)
        return model, (torch.empty(batch, 3, 224, 224),), {}

    return build


def _image(build: Callable[[], nn.Module], batch: int, size: int) -> Callable[[], Example]:
    return lambda: (build(), (torch.empty(batch, 3, size, size),), {})


def _lstm() -> Example:
    return LSTMLanguageModel(33_278, 1500, 2, tied=True), (_tokens(64, 35),), {}


def _towers() -> Example:
    return Towers(n_towers=4, depth=12, width=8192), (torch.empty(4096, 8192),), {}


_HALF: Final = torch.bfloat16
MODELS: Final[Mapping[str, Model]] = {
    "resnet18": Model(_image(resnet18, 128, 224)),
    "resnet50": Model(_image(resnet50, 128, 224)),
    "inception_v3": Model(_image(inception_v3, 96, 299)),
    "vit-base": Model(_vit(12, 768, 12, 64)),
    "vit-large": Model(_vit(24, 1024, 16, 64)),
    "vit-huge": Model(_vit(32, 1280, 16, 48)),
    "lstm": Model(_lstm),
    "towers": Model(_towers),
    "bert-base": Model(_bert(12, 768, 12, 8)),
    "bert-large": Model(_bert(24, 1024, 16, 16)),
    "gpt2": Model(_gpt2(12, 768, 12, 4)),
    "gpt2-medium": Model(_gpt2(24, 1024, 16, 4)),
    "gpt2-large": Model(_gpt2(36, 1280, 20, 4)),
    "gpt2-xl": Model(_gpt2(48, 1600, 25, 4)),
    "t5-base": Model(_t5(768, 12, 12, 3072, 16)),
    "t5-large": Model(_t5(1024, 24, 16, 4096, 16)),
    "t5-3b": Model(_t5(1024, 24, 32, 16384, 8)),
    "llama-1b": Model(_llama(16, 2048, 8192, 32, 8, 128_256, 2), _HALF),
    "llama-3b": Model(_llama(28, 3072, 8192, 24, 8, 128_256, 2), _HALF),
    "llama-7b": Model(_llama(32, 4096, 11_008, 32, 32, 32_000, 2), _HALF),
    "llama-13b": Model(_llama(40, 5120, 13_824, 40, 40, 32_000, 1), _HALF),
}


def graph_of(name: str) -> OpGraph:
    """The operator graph of a training step of the model, estimated for `KIND`."""
    model = MODELS[name]
    with torch.device("meta"):
        module, args, kwargs = model.build()
        module = module.to(model.dtype).train()
        args = tuple(arg.to(model.dtype) if arg.is_floating_point() else arg for arg in args)
    traced = baechi.trace(module, args, kwargs)
    graph = traced.graph(baechi.estimate(traced, KIND), training=True, optimizer=OPTIMIZER)
    if len(graph.ops) <= MANY_OPS:
        return graph
    cluster = Cluster.uniform(MOST_GPUS, MEMORY_BYTES, NEAR, kind=KIND)
    return coarsen(Problem(graph, cluster)).graph
