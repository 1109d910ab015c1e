"""Models in plain torch, each with something that users write and tracers stumble over."""

from collections.abc import Callable
from typing import Any

import torch
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
from benchmarks.architectures.plain_sequences import (
    Cached,
    Complex,
    Experts,
    Loop,
    LSTMs,
    Seq2Seq,
    SkippingExperts,
    Ssm,
    TransformerXLLike,
    WaveNet,
    dlrm,
    edges,
    padding,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class VAE(nn.Module):
    """Draws with randn_like, and its own loss with a KL divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(-1)
        return self.decoder(z), kl.mean()


class VAEDistribution(VAE):
    """The same through torch.distributions."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, -1)
        q = torch.distributions.Normal(mean, (0.5 * logvar).exp())
        p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.decoder(q.rsample()), torch.distributions.kl_divergence(q, p).sum(-1).mean()


class Flow(nn.Module):
    """Affine couplings with slices assigned, permutations, a log-determinant by slogdet."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            x = (x @ self.mix)[:, self.order]
            total = total + torch.slogdet(self.mix)[1]
            shift, scale = net(x[:, :4]).chunk(2, -1)
            y = x.clone()
            y[:, 4:] = x[:, 4:] * scale.tanh().exp() + shift
            total += scale.tanh().sum(-1)
            x = y
        return x, total


class Options(nn.Module):
    """Dicts, lists, None, bools, ints and strings as arguments, with control flow on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(
        self,
        batch: dict[str, Any],
        which: str,
        n: int = 2,
        mask: Tensor | None = None,
        deep: bool = False,
        sizes: list[int] | None = None,
    ) -> dict[str, Any]:
        x = batch["x"]
        for _ in range(n):
            x = self.layers[which](x)
            if deep:
                x = torch.relu(x)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        parts = x.split(sizes or [8], -1)
        return {
            "parts": list(parts),
            "n": n,
            "which": which,
            "nested": {"y": (batch["more"][0] + x, None)},
        }


class Quantized(nn.Module):
    """int8 weights as buffers with scales, a bool mask, and a step counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (16, 8), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(16) / 64)
        self.register_buffer("keep", torch.rand(16) > 0.3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.adapter_a, self.adapter_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        weight = self.weight.to(x.dtype) * self.scale[:, None]
        return functional.linear(x, weight) * self.keep + self.adapter_b(self.adapter_a(x))


class Twice(nn.Module):
    """One submodule called three times, one shared under two names, one tied by transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.alias = self.block
        self.encode = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x) + self.alias(x)
        return functional.linear(self.encode(self.block(x)), self.encode.weight.t())


class Scripted(nn.Module):
    """A submodule from torch.jit.script between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@torch.jit.script
def _scripted_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class ScriptedFunction(nn.Module):
    """A function from torch.jit.script, as older code bases fuse their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_scripted_gelu(self.first(x)))


class Momentum(nn.Module):
    """A momentum encoder updated under no_grad, and a queue of keys as a buffer (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4)
        self.key.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q = functional.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            for own, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.data = other.data * 0.99 + own.data * 0.01
            k = functional.normalize(self.key(y), dim=-1)
        logits = (
            torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        )
        with torch.no_grad():
            start = int(self.pointer)
            self.queue[:, start : start + k.shape[0]] = k.T
            self.pointer[0] = (start + k.shape[0]) % 16
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


class MomentumInPlace(Momentum):
    """The same with in-place updates and tensor positions."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q = functional.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            for own, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.mul_(0.99).add_(own, alpha=0.01)
            k = functional.normalize(self.key(y), dim=-1)
        logits = (
            torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        )
        with torch.no_grad():
            where = (self.pointer + torch.arange(k.shape[0])) % 16
            self.queue[:, where] = k.T
            self.pointer.copy_((self.pointer + k.shape[0]) % 16)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


class Checkpointed(nn.Module):
    """`torch.utils.checkpoint` around blocks, both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
            if i == 1:
                x = checkpoint(lambda v: v * torch.sigmoid(v), x, use_reentrant=False)
        return x


class VectorQuantizer(nn.Module):
    """Straight-through codes with an exponential moving codebook in buffers (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(16, 4))
        self.register_buffer("count", torch.ones(16))
        self.register_buffer("total", torch.randn(16, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.down(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        q = functional.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                hot = functional.one_hot(nearest, 16).to(z.dtype)
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
        loss = functional.mse_loss(z, q.detach())
        return self.up(z + (q - z).detach()), loss, nearest


class ActorCritic(nn.Module):
    """A categorical policy that samples, with its log-probabilities and entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        policy = torch.distributions.Categorical(logits=self.policy(h))
        action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.value(h).squeeze(-1)


class Pointers(nn.Module):
    """Boolean masks as indices: shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        picked = self.last(h[mask])
        out = h.new_zeros(*mask.shape, 4)
        out[mask] = picked
        return out, picked.mean()


class EarlyExit(nn.Module):
    """Leaves a loop when the values say so: control flow on values in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.exit = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.exit(x).mean().item() > 0.5:
                break
        return x


class Anomalies(nn.Module):
    """Asserts on values and prints, as research code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.isnan(x).any(), "not a number"
        h = self.first(x)
        if torch.isinf(h).any():
            h = h.clamp(-1e4, 1e4)
        return self.last(h)


class Half(nn.Module):
    """Mixed types by hand: bfloat16 layers, a float32 norm, a float64 reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16).bfloat16()
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4).bfloat16()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.first(x.bfloat16()).float())
        return self.last(h.bfloat16()), h.double().sum()


class Autocasted(nn.Module):
    """Autocast inside forward, with a part that leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.relu(self.first(x))
            with torch.autocast("cpu", enabled=False):
                h = self.second(h.float()).softmax(-1)
            return self.last(h)


class Lists(nn.Module):
    """Non-module lists of parameters, a lambda, a partial, kwargs passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 8) / 3 for _ in range(3)])
        self.scales = nn.ParameterDict({"a": torch.ones(8), "b": torch.zeros(())})
        self.activation = lambda v: v * torch.sigmoid(1.702 * v)

    def forward(self, *xs: Tensor, **more: Tensor) -> list[Tensor]:
        total = sum(xs) + sum(more.values())
        for weight in self.weights:
            total = self.activation(total @ weight) * self.scales["a"] + self.scales["b"]
        return [total, *xs]


class ReturnsInput(nn.Module):
    """Writes into its argument's dict and returns it, as pipelines of modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["hidden"] = self.linear(batch["x"])
        batch["x"] = batch["x"] + batch["hidden"]
        return batch


class Nothing(nn.Module):
    """No parameters at all, and a scalar argument."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, float]:
        return (x * scale).softmax(-1), 1.5


def _mask() -> Tensor:
    mask = torch.rand(3, 5) > 0.4
    mask[0, 0] = True
    return mask


def _options() -> Example:
    batch = {"x": torch.randn(3, 8), "more": [torch.randn(3, 8)]}
    kwargs = {"which": "b", "n": 3, "mask": torch.rand(3, 8) > 0.5, "deep": True, "sizes": [3, 5]}
    return Options(), (batch,), kwargs


PLAIN: dict[str, Callable[[], Example]] = {
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
    "lstms": lambda: (LSTMs(), (torch.randn(5, 3, 8), torch.tensor([5, 2, 3])), {}),
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
    "options": _options,
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
    "pointers": lambda: (Pointers(), (torch.randn(3, 5, 8), _mask()), {}),
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
