"""Models in plain torch that compute with buffers, and write them as they run."""

import torch
from torch import Tensor, nn
from torch.nn import functional


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
