"""Models of time series, of `transformers`: what makes each small, and its arguments."""

from typing import Any

import torch
from benchmarks.architectures.small import Row

_PATCHES = {
    "num_input_channels": 3,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": 4,
}
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "label_length": 4,
    "input_size": 1,
}


def _channels() -> dict[str, Any]:
    return {"past_values": torch.randn(2, 16, 3), "future_values": torch.randn(2, 4, 3)}


def _series() -> dict[str, Any]:
    return {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }


SERIES: dict[str, Row] = {
    "PatchTSTForPrediction": (_PATCHES, _channels),
    "PatchTSMixerForPrediction": ({**_PATCHES, "d_model": 16}, _channels),
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
