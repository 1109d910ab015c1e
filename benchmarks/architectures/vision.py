"""Models of images and videos, of `transformers`: what makes each small, and its arguments."""

from typing import Any

import torch
from benchmarks.architectures.small import Row, images, plain_images

_STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
_SWIN_BACKBONE = {
    "model_type": "swin",
    **_SWIN,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_RESNET_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
    "num_queries": 5,
    "backbone_config": _RESNET_BACKBONE,
}
_FOUR_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
_FOUR_STAGES = {
    "num_encoder_blocks": 4,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4],
}


def _large_images() -> dict[str, Any]:
    return images(64)


def _large_plain_images() -> dict[str, Any]:
    return plain_images(64)


def _masked_images() -> dict[str, Any]:
    return {**plain_images(64), "pixel_mask": torch.ones(2, 64, 64, dtype=torch.int64)}


def _segmented() -> dict[str, Any]:
    return {**plain_images(64), "labels": torch.randint(0, 5, (2, 64, 64))}


def _videos() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([1, 3])}


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
    "RegNetForImageClassification": ({"embedding_size": 8, "groups_width": 8, **_STAGES}, images),
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
        _large_images,
    ),
    "EfficientNetForImageClassification": (
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
        images,
    ),
    "PoolFormerForImageClassification": (
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_encoder_blocks": 4},
        _large_images,
    ),
    "SegformerForSemanticSegmentation": (
        {**_FOUR_STAGES, "decoder_hidden_size": 16},
        _segmented,
    ),
    "DetrForObjectDetection": (_DETR, _masked_images),
    "ConditionalDetrForObjectDetection": (_DETR, _masked_images),
    "DabDetrForObjectDetection": ({**_DETR, "activation_function": "prelu"}, _masked_images),
    "TableTransformerForObjectDetection": (_DETR, _masked_images),
    "DeformableDetrForObjectDetection": (
        {
            **_DETR,
            "backbone_config": {**_RESNET_BACKBONE, "out_features": ["stage2", "stage3", "stage4"]},
            "num_feature_levels": 4,
        },
        _masked_images,
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
            "backbone_config": _SWIN_BACKBONE,
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
        _large_plain_images,
    ),
    "Mask2FormerForUniversalSegmentation": (
        {
            "backbone_config": _SWIN_BACKBONE,
            "feature_size": 32,
            "mask_feature_size": 32,
            "encoder_feedforward_dim": 32,
            "dim_feedforward": 32,
            "num_queries": 5,
        },
        _large_plain_images,
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
        {**_FOUR_STAGES, "decoder_hidden_size": 16},
        _large_plain_images,
    ),
    "PvtForImageClassification": (
        {**_FOUR_STAGES, "patch_sizes": [4, 2, 2, 2]},
        images,
    ),
    "PvtV2ForImageClassification": (_FOUR_STAGES, images),
    "CvtForImageClassification": (
        {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
        _large_images,
    ),
    "Dinov2ForImageClassification": ({}, images),
    "Dinov2WithRegistersForImageClassification": ({}, images),
    "DepthAnythingForDepthEstimation": (
        {
            "backbone_config": {**_FOUR_LAYERS, "model_type": "dinov2"},
            "reassemble_hidden_size": 32,
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 8,
            "head_hidden_size": 8,
        },
        plain_images,
    ),
    "DepthProForDepthEstimation": (
        {
            "patch_size": 16,
            "fusion_hidden_size": 16,
            "intermediate_hook_ids": [1, 0],
            "intermediate_feature_dims": [16, 16],
            "scaled_images_ratios": [0.5, 1.0],
            "scaled_images_overlap_ratios": [0.0, 0.5],
            "scaled_images_feature_dims": [16, 16],
            "merge_padding_value": 1,
            "use_fov_model": True,
            "num_fov_head_layers": 1,
        },
        plain_images,
        {
            f"{part}_model_config": {"model_type": "dinov2", "image_size": 16}
            for part in ("image", "patch", "fov")
        },
    ),
    "ZoeDepthForDepthEstimation": (
        {
            "backbone_config": {
                **_FOUR_LAYERS,
                "model_type": "beit",
                "use_relative_position_bias": True,
            },
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "bottleneck_features": 16,
            "num_relative_features": 8,
            "bin_embedding_dim": 16,
            "bin_configurations": [{"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0}],
            "num_attractors": [4, 2, 2, 1],
        },
        plain_images,
    ),
    "VitMatteForImageMatting": (
        {
            "hidden_size": 32,
            "convstream_hidden_sizes": [8, 8, 8],
            "fusion_hidden_sizes": [16, 8, 8, 8],
            "backbone_config": {
                "model_type": "vitdet",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_channels": 4,
                "image_size": 64,
                "out_features": ["stage2"],
            },
        },
        lambda: {"pixel_values": torch.randn(2, 4, 64, 64)},
    ),
    "VitPoseForPoseEstimation": (
        {
            "backbone_config": {
                "model_type": "vitpose_backbone",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": [32, 32],
                "patch_size": [8, 8],
                "out_features": ["stage2"],
                "num_experts": 3,
                "part_features": 8,
            }
        },
        lambda: {**plain_images(), "dataset_index": torch.tensor([0, 2])},
    ),
    "ViTMAEForPreTraining": (
        {"decoder_hidden_size": 16, "decoder_intermediate_size": 32},
        lambda: {**plain_images(), "noise": torch.rand(2, 16)},
    ),
    "VideoMAEForVideoClassification": (
        {"num_frames": 4, "tubelet_size": 2},
        _videos,
    ),
    "VivitForVideoClassification": (
        {"num_frames": 4, "tubelet_size": [2, 8, 8]},
        _videos,
    ),
    "TimesformerForVideoClassification": (
        {"num_frames": 4},
        _videos,
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
        _large_images,
    ),
    "FocalNetForImageClassification": (
        {
            **_STAGES,
            "embed_dim": 16,
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
        _segmented,
    ),
    "ViTMSNForImageClassification": ({}, images),
    "PPLCNetForImageClassification": ({}, images),
    "HGNetV2ForImageClassification": (
        {
            "stem_channels": [3, 8, 8],
            "stage_in_channels": [8, 8],
            "stage_mid_channels": [8, 8],
            "stage_out_channels": [8, 16],
            "stage_num_blocks": [1, 1],
            "stage_numb_of_layers": [1, 1],
            "stage_downsample": [False, True],
            "stage_light_block": [False, True],
            "stage_kernel_size": [3, 5],
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
        },
        images,
    ),
    "Sam3ViTModel": ({}, plain_images),
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
        _large_images,
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
