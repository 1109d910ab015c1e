"""Models of images and fields in plain torch: skips, grids, spectra, frozen parts."""

import torch
from benchmarks.architectures.small import Example
from torch import Tensor, nn
from torch.nn import functional


def conv(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips by concatenation, in-place ReLUs, up-sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 8), conv(8, 16), conv(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join = nn.ModuleList([conv(32, 16), conv(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x)
            if i < 2:
                skips.append(x)
                x = functional.max_pool2d(x, 2)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class GAN(nn.Module):
    """A generator and a discriminator that sees real and detached images, with two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2, True), nn.Linear(32, 48))
        self.discriminator = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(48, 32)),
            nn.LeakyReLU(0.2),
            nn.Linear(32, 1),
        )

    def forward(self, z: Tensor, real: Tensor) -> dict[str, Tensor]:
        fake = self.generator(z).tanh()
        loss_g = functional.softplus(-self.discriminator(fake)).mean()
        loss_d = (
            functional.softplus(self.discriminator(fake.detach())).mean()
            + functional.softplus(-self.discriminator(real)).mean()
        )
        return {"g": loss_g, "d": loss_d, "fake": fake}


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Sequential):
    """An MLP-mixer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 8, 8), nn.Flatten(2), Transposed(), MixerBlock(), MixerBlock()
        )


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class NeRF(nn.Module):
    """Positions encoded by sines, volume rendering by cumulative products, gradients of rays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(4))
        self.first = nn.Linear(24, 32)
        self.second = nn.Linear(32 + 24, 32)
        self.out = nn.Linear(32, 4)

    def forward(
        self, origins: Tensor, directions: Tensor, near: float = 0.5, far: float = 2.0, n: int = 8
    ) -> tuple[Tensor, Tensor]:
        t = torch.linspace(near, far, n)
        points = origins[:, None] + directions[:, None] * t[None, :, None]
        angles = (points[..., None] * self.bands).flatten(-2)
        x = torch.cat([angles.sin(), angles.cos()], -1)
        h = torch.relu(self.second(torch.cat([torch.relu(self.first(x)), x], -1)))
        raw = self.out(h)
        alpha = 1 - torch.exp(-functional.softplus(raw[..., 3]) * (far - near) / n)
        transmitted = torch.cumprod(
            torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1
        )[:, :-1]
        weights = alpha * transmitted
        return (weights[..., None] * raw[..., :3].sigmoid()).sum(1), (weights * t).sum(-1)


class Fourier(nn.Module):
    """A Fourier neural operator: rfft2, complex parameters, irfft2."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, 4, 1)
        self.weights = nn.ParameterList(
            [torch.randn(4, 4, 4, 4, dtype=torch.cfloat) * 0.1 for _ in range(2)]
        )
        self.skips = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(2)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for weight, skip in zip(self.weights, self.skips, strict=True):
            f = torch.fft.rfft2(x)
            g = torch.zeros_like(f)
            g[..., :4, :4] = torch.einsum("bixy,ioxy->boxy", f[..., :4, :4], weight)
            x = functional.gelu(torch.fft.irfft2(g, s=x.shape[-2:]) + skip(x))
        return self.out(x)


class Einops(nn.Module):
    """Views of views, unfold, roll, flip, cumsum, sort, gather, one_hot, meshgrid."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(27, 8)
        self.bias = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        patches = functional.unfold(x, 3, padding=1).transpose(1, 2)
        h = self.proj(patches).view(-1, 8, 8, 8).roll((1, 2), (1, 2)).flip(1)
        grid = torch.stack(
            torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1
        ).float()
        h = h + (grid[..., 0] - grid[..., 1])[..., None] * self.bias[0] + self.bias[None, None]
        values, order = h.flatten(1).sort(-1, descending=True)
        picked = h.flatten(1).gather(1, order[:, :5]) + values.cumsum(-1)[:, :5]
        return (
            picked,
            functional.one_hot(order[:, 0] % 7, 7),
            h.unfold(1, 4, 2).mean((-1, -2)).as_strided((2, 3), (1, 2)),
        )


class YoloHead(nn.Module):
    """Grids kept on the module as plain attributes and made anew where the shape changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, 2, 1)
        self.grid = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        b, _, h, w = y.shape
        y = y.view(b, 2, 6, h, w).permute(0, 1, 3, 4, 2).contiguous()
        if self.grid.shape[2:4] != y.shape[2:4]:
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            self.grid = torch.stack((xs, ys), 2).view(1, 1, h, w, 2).float()
        y = y.sigmoid().clone()
        y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + self.grid) * 8
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2
        return y.view(b, -1, 6)


class Frozen(nn.Module):
    """A frozen backbone in evaluation mode inside a model that trains (its own `train`)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 8), nn.Dropout2d(0.5), conv(8, 8)).requires_grad_(
            False
        )
        self.head = nn.Linear(8, 3)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h.mean((2, 3)))


class Siamese(nn.Module):
    """Two batches through one BatchNorm net, with a triplet loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        a, p, n = (functional.normalize(self.net(v), dim=-1) for v in (a, p, n))
        return functional.triplet_margin_loss(a, p, n)


def channels_last() -> Example:
    model = UNet().to(memory_format=torch.channels_last)
    return model, (torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),), {}
