"""The catalog's models in plain torch, each with something that tracers stumble over."""

from collections.abc import Callable

import torch
from benchmarks.architectures.plain_buffers import (
    Momentum,
    MomentumInPlace,
    Quantized,
    VectorQuantizer,
)
from benchmarks.architectures.plain_distributions import VAE, ActorCritic, Flow, VAEDistribution
from benchmarks.architectures.plain_images import (
    GAN,
    Einops,
    Fourier,
    Frozen,
    Mixer,
    NeRF,
    Siamese,
    UNet,
    YoloHead,
    channels_last,
)
from benchmarks.architectures.plain_modules import (
    Autocasted,
    Checkpointed,
    Half,
    Scripted,
    ScriptedFunction,
    Twice,
)
from benchmarks.architectures.plain_python import (
    Anomalies,
    EarlyExit,
    Lists,
    Nothing,
    ReturnsInput,
    options,
    pointers,
)
from benchmarks.architectures.plain_sequences import (
    Cached,
    Complex,
    Experts,
    Loop,
    Seq2Seq,
    SkippingExperts,
    Ssm,
    TransformerXLLike,
    WaveNet,
    dlrm,
    edges,
    padding,
    sequences,
)
from benchmarks.architectures.small import Example

PLAIN: dict[str, Callable[..., Example]] = {
    "unet": lambda: (UNet(), (torch.randn(2, 3, 16, 16),), {}),
    "channels_last": channels_last,
    "gan": lambda: (GAN(), (torch.randn(4, 8), torch.randn(4, 48)), {}),
    "seq2seq": lambda: (
        Seq2Seq(),
        (torch.randint(1, 50, (2, 6)), torch.randint(1, 50, (2, 5))),
        {},
    ),
    "seq2seq_free": lambda: (
        Seq2Seq(),
        (torch.randint(1, 50, (2, 6)), torch.randint(1, 50, (2, 5))),
        {"teacher": False},
    ),
    "lstms": sequences,
    "graph_conv": edges,
    "dlrm": dlrm,
    "mixer": lambda: (Mixer(), (torch.randn(2, 3, 32, 32),), {}),
    "nerf": lambda: (
        NeRF(),
        (torch.randn(5, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()),
        {},
    ),
    "experts": lambda: (Experts(), (torch.randn(2, 6, 16),), {}),
    "skipping_experts": lambda: (SkippingExperts(), (torch.randn(2, 6, 16),), {}),
    "wavenet": lambda: (WaveNet(), (torch.randn(2, 1, 20),), {}),
    "vae": lambda: (VAE(), (torch.randn(3, 16),), {}),
    "vae_distribution": lambda: (VAEDistribution(), (torch.randn(3, 16),), {}),
    "flow": lambda: (Flow(), (torch.randn(3, 8),), {}),
    "options": options,
    "fourier": lambda: (Fourier(), (torch.randn(2, 1, 8, 8),), {}),
    "quantized": lambda: (Quantized(), (torch.randn(3, 8),), {}),
    "twice": lambda: (Twice(), (torch.randn(5, 8),), {}),
    "scripted": lambda: (Scripted(), (torch.randn(3, 8),), {}),
    "scripted_function": lambda: (ScriptedFunction(), (torch.randn(3, 8),), {}),
    "momentum": lambda: (Momentum(), (torch.randn(4, 8), torch.randn(4, 8)), {}),
    "momentum_in_place": lambda: (MomentumInPlace(), (torch.randn(4, 8), torch.randn(4, 8)), {}),
    "checkpointed": lambda: (Checkpointed(), (torch.randn(3, 8),), {}),
    "vector_quantizer": lambda: (VectorQuantizer(), (torch.randn(6, 8),), {}),
    "actor_critic": lambda: (ActorCritic(), (torch.randn(3, 4),), {}),
    "pointers": pointers,
    "early_exit": lambda: (EarlyExit(), (torch.randn(3, 8),), {}),
    "anomalies": lambda: (Anomalies(), (torch.randn(3, 8),), {}),
    "einops": lambda: (Einops(), (torch.randn(2, 3, 8, 8),), {}),
    "half": lambda: (Half(), (torch.randn(3, 16),), {}),
    "half_model": lambda: (UNet().bfloat16(), (torch.randn(2, 3, 16, 16).bfloat16(),), {}),
    "float16_model": lambda: (Mixer().half(), (torch.randn(2, 3, 32, 32).half(),), {}),
    "double_model": lambda: (
        WaveNet().double(),
        (torch.randn(2, 1, 20).double().requires_grad_(),),
        {},
    ),
    "autocasted": lambda: (Autocasted(), (torch.randn(3, 8),), {}),
    "loop": lambda: (Loop(), (torch.randn(3, 8),), {}),
    "cached": lambda: (
        Cached(),
        (torch.randn(2, 3, 16), [(torch.randn(2, 4, 16), torch.randn(2, 4, 16))]),
        {},
    ),
    "lists": lambda: (
        Lists(),
        (torch.randn(3, 8), torch.randn(3, 8)),
        {"extra": torch.randn(3, 8)},
    ),
    "transformer_encoder": lambda: (
        TransformerXLLike(),
        (torch.randint(0, 50, (2, 6)), padding()),
        {},
    ),
    "ssm": lambda: (Ssm(), (torch.randn(2, 6, 8),), {}),
    "yolo_head": lambda: (YoloHead(), (torch.randn(2, 3, 16, 16),), {}),
    "complex": lambda: (Complex(), (torch.randn(2, 8, 16),), {}),
    "frozen": lambda: (Frozen(), (torch.randn(2, 3, 16, 16),), {}),
    "returns_input": lambda: (ReturnsInput(), ({"x": torch.randn(3, 8)},), {}),
    "nothing": lambda: (Nothing(), (torch.randn(3, 8), torch.tensor(2.0)), {}),
    "siamese": lambda: (Siamese(), tuple(torch.randn(4, 3, 8, 8) for _ in range(3)), {}),
}
