"""Models of images, sound, several of these, and time series, of `transformers`."""

from typing import Any

import torch
from benchmarks.architectures.small import (
    images,
    padding,
    plain_images,
    tokens,
    waves,
)

Row = tuple[Any, ...]

_STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}


def _detection(size: int = 64, **more: Any) -> dict[str, Any]:
    return {**plain_images(size), **more}


def _pixel_mask() -> dict[str, Any]:
    return _detection(pixel_mask=torch.ones(2, 64, 64, dtype=torch.int64))


_RESNET = {
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
    "num_queries": 5,
}
_SMALL_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_FOUR_STAGES = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4],
}

VISION: dict[str, Row] = {
    "ViTForMaskedImageModeling": (
        {"encoder_stride": 8},
        lambda: {**plain_images(), "bool_masked_pos": torch.rand(2, 16) > 0.5},
    ),
    "SwinForImageClassification": (_SWIN, images),
    "Swinv2ForImageClassification": (_SWIN, images),
    "BeitForImageClassification": ({"use_relative_position_bias": True}, images),
    "DeiTForImageClassification": ({}, images),
    "ConvNextForImageClassification": ({**_STAGES, "num_stages": 2}, images),
    "ConvNextV2ForImageClassification": ({**_STAGES, "num_stages": 2}, images),
    "RegNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
        images,
    ),
    "ResNetForImageClassification": ({"embedding_size": 8, **_STAGES}, images),
    "BitForImageClassification": ({"embedding_size": 8, "num_groups": 4, **_STAGES}, images),
    "MobileNetV1ForImageClassification": ({"depth_multiplier": 0.25}, images),
    "MobileNetV2ForImageClassification": ({"depth_multiplier": 0.25}, images),
    "MobileViTForImageClassification": (
        {
            "patch_size": 2,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
        },
        lambda: images(64),
    ),
    "EfficientNetForImageClassification": (
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
        images,
    ),
    "PoolFormerForImageClassification": (
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_encoder_blocks": 4},
        lambda: images(64),
    ),
    "SegformerForSemanticSegmentation": (
        {**_FOUR_STAGES, "decoder_hidden_size": 16, "num_encoder_blocks": 4},
        lambda: {**plain_images(64), "labels": torch.randint(0, 5, (2, 64, 64))},
    ),
    "DetrForObjectDetection": (
        {**_RESNET, "backbone_config": _SMALL_RESNET},
        _pixel_mask,
    ),
    "ConditionalDetrForObjectDetection": (
        {**_RESNET, "backbone_config": _SMALL_RESNET},
        _pixel_mask,
    ),
    "DeformableDetrForObjectDetection": (
        {
            **_RESNET,
            "backbone_config": {**_SMALL_RESNET, "out_features": ["stage2", "stage3", "stage4"]},
            "num_feature_levels": 4,
        },
        _pixel_mask,
    ),
    "RTDetrForObjectDetection": (
        {
            "num_queries": 5,
            "backbone_config": {
                "model_type": "rt_detr_resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16, 16, 32],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage2", "stage3", "stage4"],
            },
            "encoder_hidden_dim": 32,
            "encoder_in_channels": [16, 16, 32],
            "decoder_in_channels": [32, 32, 32],
            "num_denoising": 0,
        },
        plain_images,
    ),
    "YolosForObjectDetection": ({"num_detection_tokens": 5, "image_size": [32, 32]}, plain_images),
    "MaskFormerForInstanceSegmentation": (
        {
            "backbone_config": {
                "model_type": "swin",
                **_SWIN,
                "depths": [1, 1, 1, 1],
                "num_heads": [2, 2, 2, 2],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "decoder_config": {
                "model_type": "detr",
                "d_model": 32,
                "num_queries": 5,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "dropout": 0.0,
                "decoder_ffn_dim": 32,
                "decoder_attention_heads": 4,
            },
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
        },
        lambda: plain_images(64),
    ),
    "Mask2FormerForUniversalSegmentation": (
        {
            "backbone_config": {
                "model_type": "swin",
                **_SWIN,
                "depths": [1, 1, 1, 1],
                "num_heads": [2, 2, 2, 2],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "feature_size": 32,
            "mask_feature_size": 32,
            "encoder_feedforward_dim": 32,
            "dim_feedforward": 32,
            "num_queries": 5,
        },
        lambda: plain_images(64),
    ),
    "DPTForDepthEstimation": (
        {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "reassemble_factors": [4, 2, 1, 0.5],
        },
        plain_images,
    ),
    "GLPNForDepthEstimation": (
        {**_FOUR_STAGES, "num_encoder_blocks": 4, "decoder_hidden_size": 16},
        lambda: plain_images(64),
    ),
    "PvtForImageClassification": (
        {**_FOUR_STAGES, "num_encoder_blocks": 4, "patch_sizes": [4, 2, 2, 2]},
        lambda: images(32),
    ),
    "PvtV2ForImageClassification": (
        {**_FOUR_STAGES, "num_encoder_blocks": 4},
        lambda: images(32),
    ),
    "CvtForImageClassification": (
        {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
        lambda: images(64),
    ),
    "Dinov2ForImageClassification": ({}, images),
    "ViTMAEForPreTraining": (
        {"decoder_hidden_size": 16, "decoder_intermediate_size": 32},
        lambda: {**plain_images(), "noise": torch.rand(2, 16)},
    ),
    "VideoMAEForVideoClassification": (
        {"num_frames": 4, "tubelet_size": 2},
        lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([1, 3])},
    ),
    "VivitForVideoClassification": (
        {"num_frames": 4, "tubelet_size": [2, 8, 8]},
        lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([1, 3])},
    ),
    "TimesformerForVideoClassification": (
        {"num_frames": 4},
        lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([1, 3])},
    ),
    "LevitForImageClassification": (
        {
            "image_size": 64,
            "patch_size": 16,
            "hidden_sizes": [16, 32, 32],
            "key_dim": [4, 4, 4],
            "num_attention_heads": [2, 4, 4],
            "depths": [1, 1, 1],
        },
        lambda: images(64),
    ),
    "FocalNetForImageClassification": (
        {
            "embed_dim": 16,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "patch_size": 4,
        },
        images,
    ),
    "UperNetForSemanticSegmentation": (
        {
            "backbone_config": {
                "model_type": "convnext",
                "num_stages": 4,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 8, 16, 16],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "hidden_size": 16,
            "auxiliary_in_channels": 16,
            "auxiliary_channels": 8,
        },
        lambda: {**plain_images(64), "labels": torch.randint(0, 5, (2, 64, 64))},
    ),
    "ViTMSNForImageClassification": ({}, images),
    "ImageGPTForImageClassification": (
        {"vocab_size": 65, "n_positions": 64},
        lambda: {"input_ids": torch.randint(0, 64, (2, 64)), "labels": torch.tensor([1, 3])},
    ),
    "HieraForImageClassification": (
        {
            "embed_dim": 8,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2],
            "image_size": [64, 64],
            "patch_size": [7, 7],
        },
        lambda: images(64),
    ),
    "Swin2SRForImageSuperResolution": (
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 1},
        lambda: plain_images(16),
    ),
    "SamModel": (
        {},
        lambda: {
            "pixel_values": torch.randn(1, 3, 32, 32),
            "input_points": torch.rand(1, 1, 2, 2) * 32,
            "input_labels": torch.ones(1, 1, 2, dtype=torch.int64),
        },
        {
            "vision_config": {
                "output_channels": 16,
                "mlp_dim": 32,
                "num_pos_feats": 8,
                "global_attn_indexes": [1],
                "window_size": 2,
            },
            "prompt_encoder_config": {
                "hidden_size": 16,
                "image_embedding_size": 4,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "iou_head_hidden_dim": 16},
        },
    ),
}

_CONV = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "mask_time_prob": 0.0,
    "num_feat_extract_layers": 3,
}


AUDIO: dict[str, Row] = {
    "Wav2Vec2ForCTC": (_CONV, waves),
    "Wav2Vec2ForSequenceClassification": (
        _CONV,
        lambda: {"input_values": torch.randn(2, 2000), "labels": torch.tensor([1, 3])},
    ),
    "HubertForCTC": (_CONV, waves),
    "WavLMForCTC": (_CONV, waves),
    "SEWForCTC": ({**_CONV, "squeeze_factor": 2}, waves),
    "SEWDForCTC": (
        {**_CONV, "squeeze_factor": 2, "position_buckets": 8, "max_position_embeddings": 64},
        waves,
    ),
    "UniSpeechForCTC": (_CONV, waves),
    "UniSpeechSatForCTC": (_CONV, waves),
    "Data2VecAudioForCTC": ({**_CONV, "conv_pos_kernel_size": 3}, waves),
    "Wav2Vec2ConformerForCTC": (_CONV, waves),
    "ASTForAudioClassification": (
        {
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 4,
            "time_stride": 4,
        },
        lambda: {"input_values": torch.randn(2, 32, 16), "labels": torch.tensor([1, 3])},
    ),
    "EncodecModel": (
        {
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_size": 32,
            "codebook_dim": 16,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
        },
        lambda: {"input_values": torch.randn(2, 1, 640)},
    ),
    "DacModel": (
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_hidden_size": 32,
            "upsampling_ratios": [4, 2],
            "n_codebooks": 2,
            "codebook_size": 32,
            "hidden_size": 32,
        },
        lambda: {"input_values": torch.randn(2, 1, 640)},
    ),
    "SpeechT5ForTextToSpeech": (
        {
            "num_mel_bins": 8,
            "speaker_embedding_dim": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_prenet_dropout": 0.0,
        },
        lambda: {
            "input_ids": tokens(),
            "decoder_input_values": torch.randn(2, 8, 8),
            "speaker_embeddings": torch.randn(2, 8),
        },
    ),
}


def _pairs(size: int = 32) -> dict[str, Any]:
    ids = tokens()
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": padding().fill_(1), **plain_images(size)}


_TEXT = {"text_config": {}, "vision_config": {}}

MULTIMODAL: dict[str, Row] = {
    "CLIPModel": ({"projection_dim": 16}, lambda: {**_pairs(), "return_loss": True}, _TEXT),
    "SiglipModel": ({}, lambda: {**_pairs(), "return_loss": True}, _TEXT),
    "ChineseCLIPModel": ({"projection_dim": 16}, lambda: {**_pairs(), "return_loss": True}, _TEXT),
    "AltCLIPModel": (
        {"projection_dim": 16},
        lambda: {**_pairs(), "return_loss": True},
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
        _TEXT,
    ),
    "BlipForConditionalGeneration": (
        {"projection_dim": 16},
        lambda: {**_pairs(), "labels": tokens()},
        {"text_config": {"encoder_hidden_size": 32}, "vision_config": {}},
    ),
    "BlipForImageTextRetrieval": (
        {"projection_dim": 16, "image_text_hidden_size": 16},
        _pairs,
        {"text_config": {"encoder_hidden_size": 32}, "vision_config": {}},
    ),
    "Blip2ForConditionalGeneration": (
        {"num_query_tokens": 4, "image_token_index": 96},
        lambda: {
            "pixel_values": torch.randn(2, 3, 32, 32),
            "input_ids": torch.cat([torch.full((2, 4), 96), tokens(2, 8).clamp(max=90)], 1),
            "labels": tokens(2, 12),
        },
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
        lambda: {
            "pixel_values": torch.randn(2, 3, 32, 32),
            "input_ids": torch.cat([torch.full((2, 16), 96), tokens(2, 8).clamp(max=90)], 1),
            "labels": tokens(2, 24),
        },
        {
            "vision_config": {"model_type": "clip_vision_model"},
            "text_config": {"model_type": "llama"},
        },
    ),
    "PaliGemmaForConditionalGeneration": (
        {"image_token_index": 96, "image_token_id": 96, "projection_dim": 32},
        lambda: {
            "pixel_values": torch.randn(2, 3, 32, 32),
            "input_ids": torch.cat([torch.full((2, 16), 96), tokens(2, 8).clamp(max=90)], 1),
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
        lambda: {
            **_pairs(),
            "pixel_mask": torch.ones(2, 32, 32, dtype=torch.int64),
            "labels": torch.rand(2, 5),
        },
    ),
    "OwlViTForObjectDetection": (
        {"projection_dim": 32},
        lambda: {
            "input_ids": tokens(4, 16),
            "attention_mask": padding(4),
            "pixel_values": torch.randn(2, 3, 32, 32),
        },
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
        lambda: {**_pairs(), "pixel_mask": torch.ones(2, 32, 32, dtype=torch.int64)},
        {
            "text_config": {"max_position_embeddings": 66, "hidden_size": 64},
            "vision_config": {"hidden_size": 64},
        },
    ),
    "GitForCausalLM": (
        {},
        lambda: {**_pairs(), "labels": tokens()},
        {"vision_config": {}},
    ),
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
            "pixel_values": torch.randn(2, 3, 32, 32),
            "labels": torch.randint(0, 5, (2, 16)),
        },
    ),
    "GroupViTModel": (
        {"projection_dim": 16, "projection_intermediate_dim": 32},
        lambda: {**_pairs(), "return_loss": True},
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
    "VisionTextDualEncoderModel": (
        {"projection_dim": 16},
        lambda: {**_pairs(), "return_loss": True},
        {"text_config": {"model_type": "bert"}, "vision_config": {"model_type": "vit"}},
    ),
}

_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "label_length": 4,
    "input_size": 1,
}


def _series() -> dict[str, Any]:
    return {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }


SERIES: dict[str, Row] = {
    "PatchTSTForPrediction": (
        {
            "num_input_channels": 3,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
        },
        lambda: {"past_values": torch.randn(2, 16, 3), "future_values": torch.randn(2, 4, 3)},
    ),
    "PatchTSMixerForPrediction": (
        {
            "num_input_channels": 3,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 16,
        },
        lambda: {"past_values": torch.randn(2, 16, 3), "future_values": torch.randn(2, 4, 3)},
    ),
    "TimeSeriesTransformerForPrediction": (_SERIES, _series),
    "InformerForPrediction": (_SERIES, _series),
    "AutoformerForPrediction": ({**_SERIES, "moving_average": 3}, _series),
    "DecisionTransformerModel": (
        {"state_dim": 5, "act_dim": 3, "max_ep_len": 20},
        lambda: {
            "states": torch.randn(2, 6, 5),
            "actions": torch.randn(2, 6, 3),
            "rewards": torch.randn(2, 6, 1),
            "returns_to_go": torch.randn(2, 6, 1),
            "timesteps": torch.arange(6).expand(2, 6).contiguous(),
            "attention_mask": torch.ones(2, 6, dtype=torch.int64),
        },
    ),
}
