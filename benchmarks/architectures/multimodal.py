"""Models of several senses, of `transformers`: what makes each small, and its arguments."""

from typing import Any

import torch
from benchmarks.architectures.small import Row, padding, plain_images, tokens


def _pairs() -> dict[str, Any]:
    ids = tokens()
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": padding().fill_(1), **plain_images()}


def _contrasted() -> dict[str, Any]:
    return {**_pairs(), "return_loss": True}


def _masked_pairs() -> dict[str, Any]:
    return {**_pairs(), "pixel_mask": torch.ones(2, 32, 32, dtype=torch.int64)}


def _words(batch: int) -> torch.Tensor:
    return tokens(batch, 8).clamp(max=79)


def _image_first(count: int) -> torch.Tensor:
    """Tokens, the first `count` of which stand for an image."""
    return torch.cat([torch.full((2, count), 96), tokens(2, 8).clamp(max=90)], 1)


_PARTS = {"text_config": {}, "vision_config": {}}
_BLIP_PARTS = {"text_config": {"encoder_hidden_size": 32}, "vision_config": {}}

MULTIMODAL: dict[str, Row] = {
    "CLIPModel": ({"projection_dim": 16}, _contrasted, _PARTS),
    "SiglipModel": ({}, _contrasted, _PARTS),
    "ChineseCLIPModel": ({"projection_dim": 16}, _contrasted, _PARTS),
    "AltCLIPModel": (
        {"projection_dim": 16},
        _contrasted,
        {"text_config": {"project_dim": 32, "max_position_embeddings": 66}, "vision_config": {}},
    ),
    "CLIPSegForImageSegmentation": (
        {
            "projection_dim": 16,
            "reduce_dim": 16,
            "extract_layers": [0, 1],
            "decoder_intermediate_size": 32,
        },
        _pairs,
        _PARTS,
    ),
    "BlipForConditionalGeneration": (
        {"projection_dim": 16},
        lambda: {**_pairs(), "labels": tokens()},
        _BLIP_PARTS,
    ),
    "BlipForImageTextRetrieval": (
        {"projection_dim": 16, "image_text_hidden_size": 16},
        _pairs,
        _BLIP_PARTS,
    ),
    "Blip2ForConditionalGeneration": (
        {"num_query_tokens": 4, "image_token_index": 96},
        lambda: {**plain_images(), "input_ids": _image_first(4), "labels": tokens(2, 12)},
        {
            "vision_config": {},
            "qformer_config": {"encoder_hidden_size": 32},
            "text_config": {"model_type": "opt", "word_embed_proj_dim": 32},
        },
    ),
    "LlavaForConditionalGeneration": (
        {
            "image_token_index": 96,
            "image_token_id": 96,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
        },
        lambda: {**plain_images(), "input_ids": _image_first(16), "labels": tokens(2, 24)},
        {
            "vision_config": {"model_type": "clip_vision_model"},
            "text_config": {"model_type": "llama"},
        },
    ),
    "PaliGemmaForConditionalGeneration": (
        {"image_token_index": 96, "image_token_id": 96, "projection_dim": 32},
        lambda: {
            **plain_images(),
            "input_ids": _image_first(16),
            "attention_mask": torch.ones(2, 24, dtype=torch.int64),
            "token_type_ids": torch.zeros(2, 24, dtype=torch.int64),
            "labels": tokens(2, 24),
        },
        {
            "vision_config": {"model_type": "siglip_vision_model", "projection_dim": 32},
            "text_config": {"model_type": "gemma"},
        },
    ),
    "FlavaModel": (
        {"projection_dim": 16},
        lambda: {**_pairs(), "skip_multimodal_encoder": False},
        {"text_config": {}, "image_config": {}, "multimodal_config": {}},
    ),
    "ViltForQuestionAnswering": (
        {"max_image_length": -1},
        lambda: {**_masked_pairs(), "labels": torch.rand(2, 5)},
    ),
    "OwlViTForObjectDetection": (
        {"projection_dim": 32},
        lambda: {
            "input_ids": tokens(4, 16),
            "attention_mask": padding(4),
            **plain_images(),
        },
        {"text_config": {"max_position_embeddings": 16}, "vision_config": {}},
    ),
    "Owlv2ForObjectDetection": (
        {"projection_dim": 32},
        lambda: {"input_ids": tokens(4, 16), "attention_mask": padding(4), **plain_images()},
        {"text_config": {"max_position_embeddings": 16}, "vision_config": {}},
    ),
    "ClapModel": (
        {"projection_dim": 16, "num_hidden_layers": 2},
        lambda: {
            "input_ids": tokens(),
            "attention_mask": padding(),
            "input_features": torch.randn(2, 1, 64, 64),
            "is_longer": torch.tensor([[False], [False]]),
            "return_loss": True,
        },
        {
            "text_config": {"max_position_embeddings": 66},
            "audio_config": {
                "spec_size": 64,
                "num_mel_bins": 64,
                "depths": [1, 1],
                "patch_embeds_hidden_size": 16,
                "num_attention_heads": [2, 2],
                "window_size": 4,
                "patch_size": 4,
                "patch_stride": [4, 4],
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "enable_fusion": False,
            },
        },
    ),
    "BridgeTowerModel": (
        {"hidden_size": 64, "num_hidden_layers": 2},
        _masked_pairs,
        {
            "text_config": {"max_position_embeddings": 66, "hidden_size": 64},
            "vision_config": {"hidden_size": 64},
        },
    ),
    "GitForCausalLM": ({}, lambda: {**_pairs(), "labels": tokens()}, {"vision_config": {}}),
    "Pix2StructForConditionalGeneration": (
        {},
        lambda: {
            "flattened_patches": torch.randn(2, 12, 194).abs(),
            "attention_mask": torch.ones(2, 12, dtype=torch.int64),
            "labels": tokens(length=8),
        },
        {
            "text_config": {"d_kv": 8},
            "vision_config": {"d_kv": 8, "patch_embed_hidden_size": 192, "seq_len": 64},
        },
    ),
    "LxmertModel": (
        {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16},
        lambda: {
            "input_ids": tokens(),
            "visual_feats": torch.randn(2, 4, 16),
            "visual_pos": torch.rand(2, 4, 4),
            "attention_mask": padding(),
        },
    ),
    "VisualBertModel": (
        {"visual_embedding_dim": 16},
        lambda: {
            "input_ids": tokens(),
            "attention_mask": padding(),
            "visual_embeds": torch.randn(2, 4, 16),
            "visual_attention_mask": torch.ones(2, 4),
            "visual_token_type_ids": torch.ones(2, 4, dtype=torch.int64),
        },
    ),
    "LayoutLMv3ForTokenClassification": (
        {"input_size": 32, "coordinate_size": 4, "shape_size": 8, "max_position_embeddings": 66},
        lambda: {
            "input_ids": tokens(),
            "bbox": torch.randint(0, 100, (2, 16, 1)).expand(2, 16, 4).contiguous(),
            **plain_images(),
            "labels": torch.randint(0, 5, (2, 16)),
        },
    ),
    "GroupViTModel": (
        {"projection_dim": 16, "projection_intermediate_dim": 32},
        _contrasted,
        {
            "text_config": {},
            "vision_config": {
                "depths": [1, 1, 1],
                "num_group_tokens": [4, 2, 0],
                "num_output_groups": [4, 2, 0],
            },
        },
    ),
    "Qwen2VLForConditionalGeneration": (
        {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94},
        lambda: {
            "input_ids": torch.cat(
                [torch.full((1, 1), 94), torch.full((1, 4), 96), tokens(1, 8).clamp(max=90)], 1
            ),
            "pixel_values": torch.randn(16, 3 * 2 * 8 * 8),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": torch.tensor([[0] + [1] * 4 + [0] * 8]),
            "labels": tokens(1, 13),
        },
        {
            "vision_config": {
                "embed_dim": 32,
                "depth": 2,
                "spatial_merge_size": 2,
                "in_channels": 3,
            },
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1, 2],
                }
            },
        },
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        {
            "audio_token_index": 96,
            "image_token_index": 95,
            "video_token_index": 94,
            "vision_start_token_id": 93,
            "audio_start_token_id": 92,
        },
        lambda: {
            "input_ids": torch.cat(
                [torch.tensor([[5, 92, *[96] * 16, 91, 93, *[95] * 4, 89]]), _words(1)], 1
            ),
            "attention_mask": torch.ones(1, 33, dtype=torch.int64),
            "input_features": torch.randn(1, 16, 64),
            "feature_attention_mask": torch.ones(1, 64, dtype=torch.int64),
            "pixel_values": torch.randn(16, 3 * 2 * 8 * 8),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "labels": tokens(1, 33),
        },
        {
            "audio_config": {"num_mel_bins": 16, "output_dim": 32, "n_window": 8},
            "vision_config": {
                "depth": 2,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1, 2],
                }
            },
        },
    ),
    "Emu3ForConditionalGeneration": (
        {
            "vocabulary_map": {
                **{"<image>": 96, "<|extra_200|>": 95},
                **{f"<|visual token {i:06d}|>": 80 + i for i in range(8)},
            },
            "vq_config": {
                "codebook_size": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 2],
                "num_res_blocks": 1,
                "hidden_size": 64,
            },
        },
        lambda: {
            "input_ids": torch.cat([torch.full((2, 72), 96), _words(2)], 1),
            "pixel_values": torch.randn(2, 3, 16, 16),
            "image_sizes": torch.tensor([[16, 16], [16, 16]]),
            "labels": tokens(2, 80),
        },
        {"text_config": {"max_position_embeddings": 96}},
    ),
    "JanusForConditionalGeneration": (
        {
            "image_token_id": 96,
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "latent_channels": 32,
                "num_embeddings": 16,
                "num_patches": 4,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
        },
        lambda: {**plain_images(), "input_ids": _image_first(16), "labels": tokens(2, 24)},
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"projection_dim": 32, "num_image_tokens": 16},
        },
    ),
    "VisionTextDualEncoderModel": (
        {"projection_dim": 16},
        _contrasted,
        {"text_config": {"model_type": "bert"}, "vision_config": {"model_type": "vit"}},
    ),
}
