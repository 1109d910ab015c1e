"""Models of sound, of `transformers`: what makes each small, and its arguments."""

from typing import Any

import torch
from benchmarks.architectures.small import Row, tokens, waves

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


def _wave() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 1, 640)}


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
    "MimiModel": (
        {
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 8,
            "num_quantizers": 4,
            "upsample_groups": 4,
            "vector_quantization_hidden_dimension": 8,
            "sliding_window": 8,
        },
        _wave,
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
        _wave,
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
        _wave,
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
