"""Forty small models that nothing is tuned for: loops, tables, images, experts, `transformers`.

Sizes are such that a training step takes some milliseconds and holds some megabytes; weights are
random from a fixed seed, without dropout.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from benchmarks.architectures import small
from benchmarks.models import hugging_face
from benchmarks.prediction.models import Example
from torch import Tensor, nn
from torch.nn import functional


class StateSpace(nn.Module):
    """A selective state-space layer, by a loop of elementwise operators over time."""

    def __init__(self, width: int, state: int, layers: int) -> None:
        super().__init__()
        self.state = state
        self.enter = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 4, groups=width, padding=3) for _ in range(layers)
        )
        self.parts = nn.ModuleList(nn.Linear(width, 2 * state) for _ in range(layers))
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.leave = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        rates = torch.log(torch.arange(1.0, state + 1).repeat(width, 1))
        self.rates = nn.ParameterList(rates.clone() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        rows = (self.enter, self.convs, self.parts, self.steps, self.leave, self.rates)
        for enter, conv, part, step, leave, rate in zip(*rows, strict=True):
            h, gate = enter(x).chunk(2, -1)
            h = functional.silu(conv(h.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
            b, c = part(h).chunk(2, -1)
            dt = functional.softplus(step(h))
            decay = -rate.exp()
            state = h.new_zeros(x.shape[0], h.shape[2], self.state)
            made = []
            for t in range(x.shape[1]):
                state = torch.exp(dt[:, t, :, None] * decay) * state
                state = state + dt[:, t, :, None] * b[:, t, None] * h[:, t, :, None]
                made.append((state * c[:, t, None]).sum(-1))
            x = x + leave(torch.stack(made, 1) * functional.silu(gate))
        return x


class LinearAttention(nn.Module):
    """Attention as a recurrence: a matrix of state that decays, step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.full((width, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        state = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
        rows = []
        for one, two, three in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
            state = state * self.decay.sigmoid() + two.unsqueeze(-1) * three.unsqueeze(1)
            rows.append((one.unsqueeze(1) @ state).squeeze(1))
        return x + self.out(torch.stack(rows, 1))


class Recommender(nn.Module):
    """Bags of embeddings and dense features, and the products of all pairs."""

    def __init__(self, n: int, rows: int, width: int, mode: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode=mode) for _ in range(n))
        self.bottom = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = n * (n + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("pairs", torch.tril_indices(n + 1, n + 1, offset=-1))

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [x, *(bag(i, offsets) for bag, i in zip(self.bags, indices, strict=True))]
        t = torch.stack(rows, 1)
        z = torch.bmm(t, t.transpose(1, 2))
        return self.top(torch.cat([x, z[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


class Wide(nn.Module):
    """A wide and a deep part over embeddings of columns, and a factorization machine."""

    def __init__(self, columns: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(columns))
        self.linear = nn.ModuleList(nn.Embedding(rows, 1) for _ in range(columns))
        sizes = (columns * width, 256, 128, 1)
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(sizes)]
        self.deep = nn.Sequential(*[part for row in layers for part in row][:-1])

    def forward(self, ids: Tensor) -> Tensor:
        columns = ids.unbind(1)
        e = torch.stack([t(c) for t, c in zip(self.tables, columns, strict=True)], 1)
        wide = sum(t(c) for t, c in zip(self.linear, columns, strict=True))
        pairs = (e.sum(1).square() - e.square().sum(1)).sum(-1, keepdim=True) / 2
        return torch.sigmoid(wide + pairs + self.deep(e.flatten(1)))


class Towers(nn.Module):
    """Two towers of embeddings with a loss over all pairs of the batch."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="mean") for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rows = zip(self.tables, self.towers, (users, items), strict=True)
        u, i = (functional.normalize(tower(table(ids)), dim=-1) for table, tower, ids in rows)
        scores = u @ i.T / 0.1
        return functional.cross_entropy(scores, torch.arange(len(users)))


def _conv(inner: int, outer: int, stride: int = 1, **more: Any) -> nn.Sequential:
    conv = nn.Conv2d(inner, outer, 3, stride, 1, bias=False, **more)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class Siamese(nn.Module):
    """One encoder for three images, and the loss of triplets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(_conv(3, width, 2), _conv(width, 2 * width, 2), _conv(2 * width, 4 * width, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 64)),
        )

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> Tensor:
        a, s, o = (functional.normalize(self.encoder(x), dim=-1) for x in (anchor, same, other))
        return functional.triplet_margin_loss(a, s, o)


class UNet(nn.Module):
    """Down by strides, up by transposed convolutions or by interpolation, with what was skipped."""

    def __init__(self, width: int, mode: str | None) -> None:
        super().__init__()
        self.mode = mode
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(_conv(a, b), _conv(b, b))
            for a, b in zip([3, *sizes], sizes, strict=False)
        )
        pairs = [(4 * width, 2 * width), (2 * width, width)]
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, 2) if mode is None else nn.Conv2d(a, b, 1) for a, b in pairs
        )
        self.join = nn.ModuleList(_conv(a, b) for a, b in pairs)
        self.out = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for i, down in enumerate(self.down):
            x = down(x)
            if i < len(self.down) - 1:
                skipped.append(x)
                x = functional.max_pool2d(x, 2)
        for up, join in zip(self.up, self.join, strict=True):
            x = up(x)
            if self.mode is not None:
                x = functional.interpolate(x, scale_factor=2, mode=self.mode)
            x = join(torch.cat([skipped.pop(), x], 1))
        return self.out(x)


class Segmenter(nn.Module):
    """A pyramid of features, each brought to the size of the largest, and summed or joined."""

    def __init__(self, width: int, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        sizes = [width, 2 * width, 4 * width, 8 * width]
        pairs = zip([3, *sizes], sizes, strict=False)
        self.stages = nn.ModuleList(_conv(a, b, 2) for a, b in pairs)
        self.laterals = nn.ModuleList(nn.Conv2d(s, width, 1) for s in sizes)
        self.head = nn.Sequential(
            _conv(4 * width if joined else width, width), nn.Conv2d(width, 6, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        shape, found = x.shape[-2:], []
        for stage, lateral in zip(self.stages, self.laterals, strict=True):
            x = stage(x)
            found.append(lateral(x))
        whole = partial(functional.interpolate, mode="bilinear", align_corners=False)
        parts = [found[0], *(whole(part, size=found[0].shape[-2:]) for part in found[1:])]
        y = torch.cat(parts, 1) if self.joined else sum(parts)
        return whole(self.head(y), size=shape)


class Windows(nn.Module):
    """Attention in windows that are shifted every second layer, with a bias for relative places."""

    def __init__(self, width: int, window: int, layers: int) -> None:
        super().__init__()
        self.window = window
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.bias = nn.ParameterList(torch.zeros((2 * window - 1) ** 2, 4) for _ in range(layers))
        places = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        apart = (places[:, :, None] - places[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        k = self.window
        for i, (qkv, out, feed) in enumerate(zip(self.qkv, self.out, self.feed, strict=True)):
            y = self.norms[2 * i](x)
            shift = k // 2 if i % 2 else 0
            if shift:
                y = torch.roll(y, (-shift, -shift), (1, 2))
            y = y.reshape(n, h // k, k, w // k, k, c).transpose(2, 3).reshape(-1, k * k, c)
            q, key, v = qkv(y).reshape(-1, k * k, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
            scores = q @ key.transpose(-1, -2) * (c // 4) ** -0.5
            bias = self.bias[i][self.index.flatten()].view(k * k, k * k, 4).permute(2, 0, 1)
            y = (torch.softmax(scores + bias, -1) @ v).transpose(1, 2).reshape(-1, k * k, c)
            y = out(y).reshape(n, h // k, w // k, k, k, c).transpose(2, 3).reshape(n, h, w, c)
            x = x + (torch.roll(y, (shift, shift), (1, 2)) if shift else y)
            x = x + feed(self.norms[2 * i + 1](x))
        return x.mean((1, 2))


class Recurrent(nn.Module):
    """A recurrent layer over embedded tokens, with a head for each."""

    def __init__(self, kind: type[nn.RNNBase], width: int, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.layers = kind(width, width, 2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(2 * width if both else width, 500)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.layers(self.embed(ids))
        return self.head(y)


class Cells(nn.Module):
    """Cells of an LSTM in a loop, with attention to what was before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, width)
        self.cell = nn.LSTMCell(2 * width, width)
        self.score, self.head = nn.Linear(width, width), nn.Linear(width, 200)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        x = self.embed(ids)
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        rows = []
        for t in range(x.shape[1]):
            weights = torch.softmax((memory @ self.score(h).unsqueeze(-1)).squeeze(-1), -1)
            seen = torch.einsum("bs,bsd->bd", weights, memory)
            h, c = self.cell(torch.cat([x[:, t], seen], -1), (h, c))
            rows.append(h)
        return self.head(torch.stack(rows, 1))


class Experts(nn.Module):
    """A router that gives every token to two of its experts, row by row or all of them."""

    def __init__(self, width: int, n: int, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.gate, self.head = nn.Linear(width, n), nn.Linear(width, 20)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(n)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat).softmax(-1)
        if self.dense:
            made = torch.stack([expert(flat) for expert in self.experts], 1)
            return self.head((made * scores.unsqueeze(-1)).sum(1))
        weights, chosen = scores.topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            out = out.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        return self.head(out)


class Mobile(nn.Module):
    """Depthwise convolutions with gates by the mean of each channel."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = _conv(3, width, 2)
        self.deep = nn.ModuleList(_conv(width, width, groups=width) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.point = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for deep, gate, point in zip(self.deep, self.gate, self.point, strict=True):
            y = functional.hardswish(deep(x))
            y = y * functional.hardsigmoid(gate(functional.adaptive_avg_pool2d(y, 1)))
            x = x + point(y)
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Every layer reads all layers before it, joined."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = _conv(3, width, 2)
        self.layers = nn.ModuleList(_conv(width * (i + 1), width) for i in range(layers))
        self.head = nn.Linear(width * (layers + 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(functional.avg_pool2d(torch.cat(found, 1), 4).mean((2, 3)))


class Waves(nn.Module):
    """Causal dilated convolutions with gates, residuals and skips."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers)
        )
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.skip = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(2 * width, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total: Any = 0
        for i, (gates, residual, skip) in enumerate(
            zip(self.gates, self.residual, self.skip, strict=True)
        ):
            gate, value = gates(functional.pad(x, (2**i, 0))).chunk(2, 1)
            h = torch.sigmoid(gate) * torch.tanh(value)
            total = total + skip(h)
            x = x + residual(h)
        return self.out(total)


class Messages(nn.Module):
    """Messages along edges, weighted by their degrees or by attention."""

    def __init__(self, width: int, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        src, dst = edges
        n = x.shape[0]
        degree = x.new_zeros(n).index_add(0, dst, x.new_ones(dst.shape[0])).clamp(min=1)
        for layer, score in zip(self.layers, self.scores, strict=True):
            h = layer(x)
            if self.attends:
                e = score(torch.cat([h[src], h[dst]], -1)).exp()
                total = e.new_zeros(n, 1).index_add(0, dst, e)
                message = h[src] * (e / total[dst])
            else:
                message = h[src] * (degree[src] * degree[dst]).rsqrt().unsqueeze(-1)
            x = torch.relu(torch.zeros_like(x).index_add(0, dst, message) + x)
        return x


class Codes(nn.Module):
    """A variational autoencoder of images, with its own loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(_conv(3, width, 2), _conv(width, 2 * width, 2), nn.Flatten())
        self.mean, self.scale = nn.LazyLinear(32), nn.LazyLinear(32)
        self.enter = nn.Linear(32, 2 * width * 64)
        self.up = nn.Sequential(
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU()),
            *(nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        mean, scale = self.mean(h), self.scale(h)
        z = mean + torch.randn_like(mean) * (scale / 2).exp()
        y = self.up(self.enter(z).view(len(x), -1, 8, 8))
        apart = -(1 + scale - mean.square() - scale.exp()).sum() / 2
        return functional.binary_cross_entropy(y, x.sigmoid(), reduction="sum") + apart


class Mixer(nn.Module):
    """Layers over places and over channels in turn."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)

        def mix(size: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

        self.places = nn.ModuleList(mix(64) for _ in range(layers))
        self.channels = nn.ModuleList(mix(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return x.mean(1)


class Fields(nn.Module):
    """A field of colors along rays, from sines of many frequencies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 ** torch.arange(6))
        self.first = nn.Sequential(nn.Linear(36, width), nn.ReLU(), nn.Linear(width, width))
        self.second = nn.Sequential(nn.Linear(width + 36, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, points: Tensor) -> Tensor:
        phases = (points.unsqueeze(-1) * self.waves).flatten(-2)
        x = torch.cat([phases.sin(), phases.cos()], -1)
        made = self.second(torch.cat([functional.relu(self.first(x)), x], -1))
        color, density = made[..., :3].sigmoid(), functional.softplus(made[..., 3])
        through = torch.exp(-torch.cumsum(density, 1))
        return (color * (through * (1 - torch.exp(-density))).unsqueeze(-1)).sum(1)


class Integrated(nn.Module):
    """A differential equation, in steps of Runge and Kutta."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.field = nn.Sequential(
            nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = 1 / self.steps
        for _ in range(self.steps):
            a = self.field(x)
            b = self.field(x + h / 2 * a)
            c = self.field(x + h / 2 * b)
            d = self.field(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x


class Coupled(nn.Module):
    """A flow of coupled halves, with its likelihood."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width // 2, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            one, two = x.chunk(2, -1)
            shift, scale = net(one).chunk(2, -1)
            scale = scale.tanh()
            x = torch.cat([two * scale.exp() + shift, one], -1)
            total = total + scale.sum(-1)
        return (x.square().sum(-1) / 2 - total).mean()


class Fourier(nn.Module):
    """Layers in the frequencies of an image."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.mixes = nn.ParameterList(
            torch.randn(width, width, 8, 8, dtype=torch.cfloat) / width for _ in range(layers)
        )
        self.beside = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for mix, beside in zip(self.mixes, self.beside, strict=True):
            f = torch.fft.rfft2(x)
            low = torch.einsum("bixy,ioxy->boxy", f[..., :8, :8], mix)
            y = functional.pad(low, (0, f.shape[-1] - 8, 0, f.shape[-2] - 8))
            x = functional.gelu(torch.fft.irfft2(y, s=x.shape[-2:]) + beside(x))
        return self.leave(x)


class Larger(nn.Module):
    """An image at twice its size, by channels that become places."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))
            )
            for _ in range(layers)
        )
        self.last = nn.Sequential(nn.Conv2d(width, 12, 3, 1, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            y = y + 0.1 * layer(y)
        return self.last(y) + functional.interpolate(x, scale_factor=2, mode="bicubic")


class Blocks(nn.Module):
    """Convolutions of 7 x 7 in each channel, with norms of channels last and a scale."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, 4)
        self.deep = nn.ModuleList(
            nn.Conv2d(width, width, 7, 1, 3, groups=width) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.scales = nn.ParameterList(torch.full((width,), 0.1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for rows in zip(self.deep, self.norms, self.feed, self.scales, strict=True):
            deep, norm, feed, scale = rows
            y = feed(norm(deep(x).permute(0, 2, 3, 1))) * scale
            x = x + y.permute(0, 3, 1, 2)
        return x.mean((2, 3))


class Detector(nn.Module):
    """Boxes of two sizes from features that meet, with a loss over chosen ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = _conv(3, width, 2), _conv(width, 2 * width, 2)
        self.three = _conv(2 * width, 4 * width, 2)
        self.lateral = nn.Conv2d(4 * width, 2 * width, 1)
        self.heads = nn.ModuleList([nn.Conv2d(2 * width, 18, 1), nn.Conv2d(4 * width, 18, 1)])

    def forward(self, x: Tensor) -> Tensor:
        two = self.two(self.one(x))
        three = self.three(two)
        met = two + functional.interpolate(self.lateral(three), scale_factor=2.0)
        rows = [
            head(y).view(len(x), 3, 6, -1).transpose(2, 3).reshape(len(x), -1, 6)
            for head, y in zip(self.heads, (met, three), strict=True)
        ]
        found = torch.cat(rows, 1)
        score, best = found[..., 4].sigmoid().topk(50, 1)
        boxes = found[..., :4].gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        return functional.smooth_l1_loss(boxes, torch.ones_like(boxes)) - score.log().mean()


def _transformer(width: int, batch: int) -> Example:
    model = nn.Transformer(
        width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    return model, (torch.randn(batch, 32, width), torch.randn(batch, 24, width)), {}


def _bags(batch: int, n: int, rows: int, each: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, rows, (n, each * batch))
    return torch.randn(batch, 16), ids, torch.arange(batch) * each


def _graph(nodes: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, width), torch.randint(0, nodes, (2, 5 * nodes))


def _images(batch: int, size: int, channels: int = 3) -> tuple[Tensor]:
    return (torch.randn(batch, channels, size, size),)


def _hugging_face(name: str, arguments: Callable[[], dict[str, Any]], **own: Any) -> Example:
    return small.small(name, own, {}), (), arguments()


def _text(**own: Any) -> dict[str, Any]:
    ids = small.tokens(4, 48)
    return {"input_ids": ids, "labels": ids.clone(), **own}


def _pairs() -> dict[str, Any]:
    return {"input_ids": small.tokens(4, 48), "labels": small.tokens(4, 32)}


def _lazy(model: nn.Module, args: tuple[Tensor, ...]) -> Example:
    with torch.no_grad():
        model(*args)
    return model, args, {}


_T5: Final = {
    **{"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4},
    **{"pad_token_id": 0, "eos_token_id": 1},
}
_WINDOWS: Final = {
    **{"image_size": 64, "patch_size": 4, "embed_dim": 32, "window_size": 4},
    **{"depths": [2, 2], "num_heads": [2, 4]},
}

# Each is made anew.
UNTUNED: Final[Mapping[str, Callable[[], Example]]] = {
    "state_space": lambda: (StateSpace(64, 8, 2), (torch.randn(4, 24, 64),), {}),
    "state_space_wide": lambda: (StateSpace(128, 16, 1), (torch.randn(2, 32, 128),), {}),
    "linear_attention": lambda: (LinearAttention(64), (torch.randn(4, 24, 64),), {}),
    "recommender_sum": lambda: (Recommender(6, 2000, 32, "sum"), _bags(64, 6, 2000, 8), {}),
    "recommender_mean": lambda: (Recommender(4, 500, 64, "mean"), _bags(256, 4, 500, 20), {}),
    "recommender_max": lambda: (Recommender(3, 1000, 32, "max"), _bags(128, 3, 1000, 10), {}),
    "wide_and_deep": lambda: (Wide(10, 1000, 16), (torch.randint(0, 1000, (256, 10)),), {}),
    "two_towers": lambda: (
        Towers(3000, 64),
        tuple(torch.randint(0, 3000, (128, 10)) for _ in range(2)),
        {},
    ),
    "siamese": lambda: (Siamese(16), tuple(torch.randn(8, 3, 32, 32) for _ in range(3)), {}),
    "unet_transposed": lambda: (UNet(12, None), _images(2, 48), {}),
    "unet_nearest": lambda: (UNet(12, "nearest"), _images(2, 48), {}),
    "unet_bilinear": lambda: (UNet(8, "bilinear"), _images(4, 32), {}),
    "segmenter_joined": lambda: (Segmenter(16, True), _images(4, 64), {}),
    "segmenter_summed": lambda: (Segmenter(16, False), _images(2, 96), {}),
    "windows": lambda: (Windows(48, 4, 4), _images(4, 64), {}),
    "lstm": lambda: (Recurrent(nn.LSTM, 96, False), (torch.randint(0, 500, (8, 32)),), {}),
    "lstm_both": lambda: (Recurrent(nn.LSTM, 64, True), (torch.randint(0, 500, (4, 40)),), {}),
    "gru": lambda: (Recurrent(nn.GRU, 96, False), (torch.randint(0, 500, (8, 24)),), {}),
    "cells": lambda: (Cells(64), (torch.randint(0, 200, (8, 16)), torch.randn(8, 20, 64)), {}),
    "experts": lambda: (Experts(64, 4, False), (torch.randn(4, 64, 64),), {}),
    "experts_dense": lambda: (Experts(64, 6, True), (torch.randn(4, 64, 64),), {}),
    "mobile": lambda: (Mobile(32, 5), _images(4, 48), {}),
    "dense": lambda: (Dense(16, 6), _images(4, 48), {}),
    "waves": lambda: (Waves(24, 6), (torch.randn(2, 1, 400),), {}),
    "messages": lambda: (Messages(64, False), _graph(400, 64), {}),
    "messages_attending": lambda: (Messages(48, True), _graph(400, 48), {}),
    "codes": lambda: _lazy(Codes(16), _images(8, 32)),
    "mixer": lambda: (Mixer(64, 3), _images(8, 32), {}),
    "fields": lambda: (Fields(96), (torch.randn(64, 24, 3),), {}),
    "integrated": lambda: (Integrated(64, 6), (torch.randn(128, 64),), {}),
    "coupled": lambda: (Coupled(64, 6), (torch.randn(256, 64),), {}),
    "fourier": lambda: (Fourier(16, 3), _images(4, 32, 1), {}),
    "larger": lambda: (Larger(24, 3), _images(2, 40), {}),
    "blocks": lambda: (Blocks(48, 3), _images(4, 64), {}),
    "detector": lambda: (Detector(16), _images(4, 64), {}),
    "transformer": lambda: _transformer(64, 4),
    "gpt2": lambda: _hugging_face("GPT2LMHeadModel", _text, n_embd=64, n_inner=256),
    "t5": lambda: (hugging_face.t5(dropout=False, **_T5), (), _pairs()),
    "mamba": lambda: _hugging_face("MambaForCausalLM", _text, hidden_size=64, state_size=8),
    "swin": lambda: _hugging_face(
        "SwinForImageClassification", partial(small.images, 64), **_WINDOWS
    ),
}


def untuned(name: str) -> Example:
    """The model in training mode, with its example arguments."""
    torch.manual_seed(0)
    model, args, kwargs = UNTUNED[name]()
    return model.train(), args, kwargs
