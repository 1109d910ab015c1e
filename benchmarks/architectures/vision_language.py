"""Models of `transformers` that read images, or sounds, in a text: sizes, and their arguments."""

from collections.abc import Mapping
from typing import Any

import torch
from benchmarks.architectures.small import Row, plain_images

_IMAGE = 96  # the token that stands for a part of an image
_TOKENS = {"image_token_id": _IMAGE, "image_token_index": _IMAGE}
_QWEN_TOKENS = {**_TOKENS, "video_token_id": 95, "vision_start_token_id": 94}
_LLAMA, _QWEN = {"model_type": "llama"}, {"model_type": "qwen2"}
_CLIP, _SIGLIP = {"model_type": "clip_vision_model"}, {"model_type": "siglip_vision_model"}
_PATCHES = {"depth": 2, "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 32}
_LINEAR = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_TILES = {"image_grid_pinpoints": [[32, 64], [64, 32]], "vision_feature_layer": -1}
_RESAMPLER = {
    **{"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4},
    **{"resampler_head_dim": 8, "num_key_value_heads": 2},
}


def _rope() -> dict[str, Any]:
    """Rotary positions in three parts; a configuration writes into its own."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    return {"rope_parameters": sections}


def _text(count: int, batch: int = 2) -> dict[str, Any]:
    """Texts that begin with an image of so many tokens."""
    words = torch.randint(5, 80, (batch, 8))
    ids = torch.cat([torch.full((batch, count), _IMAGE), words], 1)
    labels = torch.randint(5, 80, ids.shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _pictures(count: int, size: int = 32, **more: Any) -> dict[str, Any]:
    return {**_text(count), **plain_images(size), **more}


def _tiles(count: int) -> dict[str, Any]:
    """Images of two tiles, and the whole of them."""
    sizes = torch.tensor([[32, 64], [32, 64]])
    return {**_text(count), "pixel_values": torch.randn(2, 3, 3, 32, 32), "image_sizes": sizes}


def _several(padded: bool = False) -> dict[str, Any]:
    """Two images for each text, the second of which may be padding."""
    pixels = torch.randn(2, 2, 3, 32, 32)
    seen = torch.ones(2, 2, 32, 32, dtype=torch.int64)
    if padded:
        pixels[:, 1] = seen[:, 1] = 0
    return {**_text(4 if padded else 8), "pixel_values": pixels, "pixel_attention_mask": seen}


def _grid(kinds: bool = True, **more: Any) -> dict[str, Any]:
    """Patches of an image, as many as a grid says."""
    text = _text(4, batch=1)
    kind = {"mm_token_type_ids": (text["input_ids"] == _IMAGE).long()} if kinds else {}
    pixels = {"pixel_values": torch.randn(16, 384), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return {**text, **kind, **pixels, **more}


def _marked(name: str, count: int = 4) -> dict[str, Any]:
    """Images, and where their tokens are."""
    found = _pictures(count)
    return {**found, name: (found["input_ids"] == _IMAGE).long()}


def _sounds(count: int, frames: int = 64, **more: Any) -> dict[str, Any]:
    return {**_text(count), "input_features": torch.randn(2, 16, frames), **more}


def _parts(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {"vision_config": vision, "text_config": text}


VISION_LANGUAGE: dict[str, Row] = {
    "LlavaNextForConditionalGeneration": (
        {**_TOKENS, **_TILES},
        lambda: _tiles(52),
        _parts(_CLIP, _LLAMA),
    ),
    "LlavaOnevisionForConditionalGeneration": (
        {**_TOKENS, **_TILES, "vision_aspect_ratio": "anyres_max_9"},
        lambda: _tiles(52),
        _parts(_SIGLIP, _QWEN),
    ),
    "VipLlavaForConditionalGeneration": (
        {**_TOKENS, "vision_feature_layers": [-1, 0]},
        lambda: _pictures(16),
        _parts(_CLIP, _LLAMA),
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        _QWEN_TOKENS,
        _grid,
        _parts({**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]}, _rope()),
    ),
    "Qwen3VLForConditionalGeneration": (
        _QWEN_TOKENS,
        _grid,
        _parts(
            {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, _rope()
        ),
    ),
    "Qwen3_5ForConditionalGeneration": (
        _QWEN_TOKENS,
        _grid,
        _parts({**_PATCHES, "num_position_embeddings": 64}, {**_rope(), **_LINEAR}),
    ),
    "Glm4vForConditionalGeneration": (
        {**_TOKENS, "video_token_id": 95, "image_start_token_id": 94, "image_end_token_id": 93},
        _grid,
        _parts(_PATCHES, _rope()),
    ),
    "VideoLlama3ForConditionalGeneration": (
        {**_TOKENS, "video_token_id": 95},
        lambda: _grid(
            kinds=False,
            pixel_values=torch.randn(16, 192),
            image_merge_sizes=torch.tensor([2]),
        ),
        _parts({}, _QWEN),
    ),
    "InternVLForConditionalGeneration": (
        {**_TOKENS, "downsample_ratio": 0.5, "image_seq_length": 4},
        lambda: _pictures(4),
        _parts({"image_size": [32, 32], "patch_size": [8, 8]}, _QWEN),
    ),
    "Idefics2ForConditionalGeneration": (
        _TOKENS,
        _several,
        {**_parts({}, {"model_type": "mistral"}), "perceiver_config": _RESAMPLER},
    ),
    "Idefics3ForConditionalGeneration": (
        {**_TOKENS, "scale_factor": 2},
        _several,
        _parts({}, _LLAMA),
    ),
    "SmolVLMForConditionalGeneration": (
        {**_TOKENS, "scale_factor": 2},
        lambda: _several(padded=True),
        _parts({}, _LLAMA),
    ),
    "Mistral3ForConditionalGeneration": (
        {**_TOKENS, "spatial_merge_size": 2, "vision_feature_layer": -1},
        lambda: _pictures(4, image_sizes=torch.tensor([[32, 32], [32, 32]])),
        _parts({"model_type": "pixtral"}, {"model_type": "mistral"}),
    ),
    "Gemma3ForConditionalGeneration": (
        {**_TOKENS, "mm_tokens_per_image": 4},
        lambda: _marked("token_type_ids"),
        _parts(_SIGLIP, {"sliding_window": 8}),
    ),
    "MllamaForConditionalGeneration": (
        _TOKENS,
        lambda: {
            **_text(4),
            "pixel_values": torch.randn(2, 1, 2, 3, 32, 32),
            "aspect_ratio_ids": torch.tensor([[1], [2]]),
            "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        },
        _parts(
            {
                "num_global_layers": 1,
                "attention_heads": 4,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            {"cross_attention_layers": [1], "pad_token_id": 0},
        ),
    ),
    "AyaVisionForConditionalGeneration": (
        {
            **{**_TOKENS, "downsample_factor": 2, "vision_feature_layer": -1},
            "vision_feature_select_strategy": "full",
        },
        lambda: _pictures(4),
        _parts(_SIGLIP, {"model_type": "cohere2"}),
    ),
    "Cohere2VisionForConditionalGeneration": (
        {**_TOKENS, "downsample_factor": 2, "alignment_intermediate_size": 32},
        lambda: _pictures(4),
        _parts(_SIGLIP, {"model_type": "cohere2"}),
    ),
    "AriaForConditionalGeneration": (
        {**_TOKENS, "projector_patch_to_query_dict": {16: 4}},
        lambda: _pictures(4),
        _parts(
            {"model_type": "idefics3_vision"},
            {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        ),
    ),
    "GotOcr2ForConditionalGeneration": (
        _TOKENS,
        lambda: _pictures(1),
        _parts(
            {"output_channels": 16, "global_attn_indexes": [1], "window_size": 2, "mlp_dim": 64},
            _QWEN,
        ),
    ),
    "Ovis2ForConditionalGeneration": (
        {**_TOKENS, "visual_indicator_token_ids": [91, 92, 93, 94, 95], "hidden_size": 32},
        lambda: _pictures(4),
        _parts({"hidden_stride": 2, "num_visual_indicator_tokens": 5, "vocab_size": 64}, _QWEN),
    ),
    "InstructBlipForConditionalGeneration": (
        {**_TOKENS, "num_query_tokens": 4},
        lambda: _pictures(4, qformer_input_ids=torch.randint(5, 80, (2, 6))),
        {
            **_parts({}, {"model_type": "opt", "word_embed_proj_dim": 32}),
            "qformer_config": {"encoder_hidden_size": 32},
        },
    ),
    "Lfm2VlForConditionalGeneration": (
        {**_TOKENS, "downsample_factor": 2, "projector_hidden_size": 32},
        lambda: _pictures(
            4,
            pixel_values=torch.randn(2, 16, 192),
            spatial_shapes=torch.tensor([[4, 4], [4, 4]]),
            pixel_attention_mask=torch.ones(2, 16, dtype=torch.int64),
        ),
        _parts(
            {"model_type": "siglip2_vision_model", "num_patches": 16},
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        ),
    ),
    "ChameleonForConditionalGeneration": (
        {
            "vocabulary_map": {
                "<image>": _IMAGE,
                **{f"IMGIMGA{letter}Z": 80 + i for i, letter in enumerate("ABCDEFGH")},
            },
            "vq_config": {
                **{"embed_dim": 16, "num_embeddings": 8, "latent_channels": 16, "resolution": 16},
                **{"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1},
            },
        },
        lambda: _pictures(64, 16),
    ),
    "Kosmos2ForConditionalGeneration": (
        {"latent_query_num": 4},
        lambda: _marked("image_embeds_position_mask"),
        _parts({}, {"embed_dim": 32, "ffn_dim": 64, "layers": 2, "attention_heads": 4}),
    ),
    "FuyuForCausalLM": (
        {"image_token_id": _IMAGE},
        lambda: {**_text(16), "image_patches": torch.randn(2, 16, 192)},
        {"text_config": {"model_type": "persimmon"}},
    ),
    "Qwen2AudioForConditionalGeneration": (
        {"audio_token_index": _IMAGE, "audio_token_id": _IMAGE},
        lambda: _sounds(16, feature_attention_mask=torch.ones(2, 64, dtype=torch.int64)),
        {"audio_config": {"num_mel_bins": 16, "max_source_positions": 32}, "text_config": _QWEN},
    ),
    "VoxtralForConditionalGeneration": (
        {"audio_token_id": _IMAGE},
        lambda: _sounds(16),
        {"audio_config": {"num_mel_bins": 16, "max_source_positions": 32}, "text_config": _LLAMA},
    ),
    "GraniteSpeechForConditionalGeneration": (
        {
            **{"audio_token_index": _IMAGE, "audio_token_id": _IMAGE, "has_lora_adapter": False},
            **{"window_size": 4, "downsample_rate": 2},
        },
        lambda: _sounds(8, 16, input_features_mask=torch.ones(2, 8, dtype=torch.bool)),
        {
            "encoder_config": {
                **{"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 4},
                **{"dim_head": 8, "context_size": 8, "max_pos_emb": 16, "output_dim": 12},
            },
            "projector_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 32},
            "text_config": {"model_type": "granite"},
        },
    ),
}
