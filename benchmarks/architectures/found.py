"""Models that are found: of any folder of the installed `transformers`, as small as it allows.

Nobody wrote a row for them. The first of a folder's classes is taken whose configuration takes
small sizes, and whose forward and backward take one of the usual arguments.
"""

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.architectures import small
from benchmarks.architectures.small import Example, padding, tokens
from torch import nn
from torch.utils._pytree import tree_leaves

PREFIX: Final = "found/"
MOST_PARAMETERS: Final = 60_000_000

_CLASSES: Final = (
    *("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM"),
    *("ForImageClassification", "ForObjectDetection", "ForSemanticSegmentation"),
    *("ForDepthEstimation", "ForCTC", "ForAudioClassification", "ForSequenceClassification"),
    *("ForPrediction", "ForKeypointDetection", "ForPreTraining", "Decoder", "Encoder", "Model"),
)
_MORE: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "index_topk"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_chunk_size", "ssm_state_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("index_head_dim", "sliding_window", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_mel_bins", "num_mels"), 16),
    **dict.fromkeys(("projection_dim", "encoder_hidden_size", "decoder_hidden_size"), 32),
    **dict.fromkeys(("image_token_id", "image_token_index"), small.VOCABULARY - 6),
    "linear_num_key_heads": 2,
    "vocab_size_per_layer_input": small.VOCABULARY,
    "depths": [1, 1, 1, 1],
    "num_queries": 10,
    "use_cache": False,
}
_WIDE: Final = re.compile("hidden|dim|size|d_model|ffn|channel|embed|width|d_ff|d_inner|filters")
_NOT_WIDE: Final = re.compile(
    "image_size|vocab|kernel|patch|window|stride|head_dim|merge|num_|max_|position|chunk|block"
    "|input_size|conv_|token|n_mel|sampling|hop"
)


def folders() -> list[str]:
    """Those of `transformers` that have models."""
    import transformers

    found = Path(transformers.__file__).parent / "models"
    return sorted({path.parent.name for path in found.glob("*/modeling_*.py")} - {"auto"})


def found(folder: str) -> Example:
    """A model in training mode with arguments for it.

    Raises:
        LookupError: None of its classes could be made small, or called; with what each said.
    """
    said: dict[str, None] = {}
    for kind in _classes(folder)[:3]:
        for model in _models(kind, said):
            names = inspect.signature(kind.forward).parameters
            for make in _ARGUMENTS:
                torch.manual_seed(1)
                kwargs = make()
                if kwargs.keys() <= names.keys() and kind.main_input_name in kwargs:
                    try:
                        _run(model, kwargs)
                    except Exception as error:  # whatever a model's code raises
                        said[f"{kind.__name__} of {', '.join(kwargs)}: {error}"[:200]] = None
                    else:
                        return model, (), kwargs
    raise LookupError("; ".join([*said][:4]) or "no class")


def _classes(folder: str) -> list[Any]:
    import transformers

    rows = []
    path = Path(transformers.__file__).parent / "models" / folder
    for file in sorted(path.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{file.stem}")
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and issubclass(kind, transformers.PreTrainedModel) and kind.config_class:
                ranks = [i for i, end in enumerate(_CLASSES) if name.endswith(end)]
                if ranks and not name.endswith("PreTrainedModel"):
                    rows.append((ranks[0], len(name), name, kind))
    return [kind for *_, kind in sorted(rows, key=lambda row: row[:3])]


def _models(kind: Any, said: dict[str, None]) -> Iterator[nn.Module]:
    known = {**small.SIZES, **_MORE}
    ways: list[Callable[[], Any]] = [
        lambda: _sized(kind.config_class, known),
        lambda: _sized(kind.config_class, {**known, "num_key_value_heads": 4}),
        *(lambda by=by: _divided(kind.config_class, by) for by in (16, 8, 4)),
        lambda: _sized(kind.config_class, small.SIZES),
    ]
    for way in ways:
        try:
            config = way()
            small.undropped(config)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(0)
            model = kind(config)
        except Exception as error:  # whatever a configuration or a constructor raises
            said[f"{kind.__name__}: {error}"[:200]] = None
            continue
        for module in model.modules():
            if isinstance(getattr(module, "p", None), float):
                module.p = 0.0
        yield model.train()


def _sized(config: Any, known: Mapping[str, Any]) -> Any:
    """With the small sizes that it and the configurations inside it know."""
    inner = {}
    for name, kind in (getattr(config, "sub_configs", None) or {}).items():
        own = kind if "AutoConfig" not in str(kind) else type(getattr(config(), name, None))
        if own is not type(None):
            inner[name] = _sized(own, known).to_dict()
    sizes = small.sizes_of(config, known)
    sizes.pop("num_labels")
    return config(**sizes, **inner)


def _divided(config: Any, by: int) -> Any:
    """The default configuration with two layers, and widths divided by a number."""

    def change(value: Any, name: str) -> Any:
        wide = bool(_WIDE.search(name)) and not _NOT_WIDE.search(name)
        if isinstance(value, dict):
            return {key: change(inner, str(key).lower()) for key, inner in value.items()}
        if type(value) is int:
            if not wide and re.search("layers|depth|n_layer|num_blocks", name):
                return min(value, 2)
            least, part = (small.VOCABULARY, 64) if "vocab_size" in name else (8, by)
            smaller = "vocab_size" in name or (wide and value >= 64)
            return max(least, value // part) if smaller else value
        if isinstance(value, list) and value and type(value[0]) is int:
            few = re.search("depths|num_blocks|layers", name)
            return [min(n, 2) if few else max(8, n // by) if wide and n > 31 else n for n in value]
        of_layers = name in ("layer_types", "mlp_layer_types", "layers_block_type")
        return [value[0], value[-1]] if of_layers and value else value

    sizes = change(config().to_dict(), "")
    sizes.pop("architectures", None)
    return config.from_dict({**sizes, **({"use_cache": False} if "use_cache" in sizes else {})})


def _run(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """A training step and an inference."""
    own = copy.deepcopy(model)
    leaves = tree_leaves(dict(own(**copy.deepcopy(kwargs))))
    roots = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.stack([root.float().square().mean() for root in roots]).sum().backward()
    with torch.no_grad():
        own.eval()(**copy.deepcopy(kwargs))


def _unmasked() -> dict[str, Any]:
    return {"input_ids": tokens()}


_ARGUMENTS: Final[tuple[Callable[[], dict[str, Any]], ...]] = (
    small.masked_lm,
    small.unmasked_lm,
    lambda: {"input_ids": tokens(), "attention_mask": padding()},
    _unmasked,
    small.sequences,
    lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()},
    small.images,
    small.plain_images,
    lambda: small.plain_images(64),
    lambda: small.plain_images(224),
    lambda: {**_unmasked(), **small.plain_images()},
    small.waves,
    lambda: {"input_values": torch.randn(2, 2000)},
    lambda: {"input_values": torch.randn(2, 1, 2000)},
    lambda: {"input_features": torch.randn(2, 16, 128)},
    lambda: {"input_features": torch.randn(2, 128, 16)},
    lambda: {"pixel_values_videos": torch.randn(1, 4, 3, 32, 32)},
    lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
    lambda: {"inputs_embeds": torch.randn(2, 16, 32)},
    lambda: {"past_values": torch.randn(2, 64)},
)
