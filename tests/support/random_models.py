"""Random models: operators that people use, nested and joined at random, the same for each seed.

Every part takes and gives tensors of shape (batch, LENGTH, WIDTH). Samples are mixed only where
`mixing` is allowed, so that the rest of the models may run in micro-batches.
"""

import random
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH = 6, 8

Draw = random.Random
Part = Callable[..., Any]  # of one or two tensors


class Apply(nn.Module):
    """A function as a module, with what it was made of."""

    def __init__(self, function: Part, name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)

    def extra_repr(self) -> str:
        return self.name


class Square(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


def inplace_chain(x: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(0.5).add_(1).clamp_(-2, 2)
    return x


def write_slice(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    x[:, 1:3] = y[:, :2]
    x[:, :, 0] += y[:, :, 1]
    return x


def write_view(x: Tensor, y: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made.narrow(1, 0, 3).copy_(x[:, :3])
    made[:, 3:].add_(y[:, 3:])
    return made


def write_mask(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 1] = 0.5
    return x


def index_add(x: Tensor, y: Tensor) -> Tensor:
    return x.index_add(1, torch.tensor([0, 0, 3]), y[:, :3])


def index_put(x: Tensor, y: Tensor) -> Tensor:
    rows = torch.tensor([1, 4, 1])
    return x.index_put((torch.arange(len(x))[:, None], rows), y[:, :3], accumulate=True)


def scattered(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(1, x.argsort(1), x.sin())


def gathered(x: Tensor) -> Tensor:
    return x.gather(1, x.detach().argsort(1, descending=True))


def largest(x: Tensor) -> Tensor:
    values, where = x.topk(3, dim=1)
    return torch.cat([values, where.to(x.dtype) * values], 1)


def in_order(x: Tensor) -> Tensor:
    return x.sort(dim=2).values + x.amax(1, keepdim=True) - x.min(2, keepdim=True).values


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=LENGTH, dim=1)


def turned(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.contiguous().view(*x.shape[:-1], -1, 2))
    angle = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 0.3)
    return torch.view_as_real(pairs * angle).flatten(2)


def attended(x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in (x, y, y))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def by_einsum(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bld,bmd->blm", x, y).softmax(-1) @ y


def unbound(x: Tensor) -> Tensor:
    rows = list(x.unbind(1))
    for i in range(1, len(rows)):
        rows[i] = rows[i] + rows[i - 1].tanh()
    return torch.stack(rows, 1)


def by_shape(x: Tensor) -> Tensor:
    batch, length, width = x.size()
    return x.reshape(batch * length, width).view(x.shape) * (length / width)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax((1, 2), keepdim=True)
    return x / (scale + 1)


def straight_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def in_bfloat16(x: Tensor) -> Tensor:
    return (x.bfloat16() * 1.5).float()


def in_double(x: Tensor) -> Tensor:
    return x.double().cumsum(1).to(x.dtype)


def chosen(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x, y * 2)


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, 1) + x.flip(2)


def split_up(x: Tensor) -> Tensor:
    a, b, c = x.split([1, 2, 3], 1)
    return torch.cat([c, a * b[:, :1], b], 1)


def windows(x: Tensor) -> Tensor:
    padded = functional.pad(x, (0, 0, 2, 0))
    return padded.unfold(1, 3, 1).sum(-1)


def strided(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) + x[:, ::2].repeat_interleave(2, 1)


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x[:, :1], y)
    return a + b * x.mean((1, 2), keepdim=True).expand_as(y)


def masked(x: Tensor) -> Tensor:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    scores = (x @ x.mT).masked_fill(~causal, float("-inf"))
    return scores.softmax(-1) @ x


def products(x: Tensor) -> Tensor:
    return torch.cumprod(x.sigmoid(), 1) + x.logsumexp(2, keepdim=True) + x.norm(dim=1)[:, None]


def clamped(x: Tensor, y: Tensor) -> Tensor:
    return torch.lerp(x, y, 0.3).clamp(min=-1).minimum(y).addcmul(x, y, value=0.1)


def norms(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1) + functional.layer_norm(x, (WIDTH,))


def read_twice(x: Tensor, y: Tensor) -> Tensor:
    return x * x + torch.stack([x, x, y], 0).sum(0) + torch.matmul(x, x.mT) @ x


def flags(x: Tensor) -> Tensor:
    return x * 2 if x.requires_grad else x * 3


def sizes(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], 2, WIDTH)], 1)[:, 1 : 1 + LENGTH]


def images(x: Tensor) -> Tensor:
    return functional.interpolate(x[:, None], scale_factor=2.0, mode="nearest")[:, 0, ::2, ::2]


def pooled(x: Tensor) -> Tensor:
    up = functional.adaptive_avg_pool1d(x.mT, 3).mT
    return up.repeat(1, 2, 1) + functional.max_pool1d(x.mT, 3, 1, 1).mT


def distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y).neg().exp() @ y


def triangles(x: Tensor) -> Tensor:
    square = x @ x.mT
    return square.tril().diagonal(dim1=1, dim2=2)[..., None] * x + square.triu() @ x


def gated(x: Tensor) -> Tensor:
    return functional.glu(torch.cat([x, x.cos()], 2))


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda t: (t.sin() * t).tanh(), x, use_reentrant=False)


def under_autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = x.float() @ y.float().mT
    return z.float() @ y


def vectorized(x: Tensor) -> Tensor:
    return torch.vmap(lambda t: t.softmax(0) * t.sum())(x)


def logged(x: Tensor) -> Tensor:
    return x.abs().log1p() + functional.softplus(x) + x.exp().reciprocal().clamp(max=3)


def accumulated(x: Tensor) -> Tensor:
    return x.cummax(1).values + x.diff(dim=1, prepend=x[:, :1]) + x.var(1, keepdim=True)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1).unflatten(1, (LENGTH, WIDTH)).squeeze(0).reshape(x.shape)


def negated(x: Tensor) -> Tensor:
    return torch.complex(x, -x).conj().imag + x.real


def chained(x: Tensor, y: Tensor) -> Tensor:
    for i in range(3):
        x, y = y + x / (i + 1), x
    return x - y


FUNCTIONS: Final[tuple[Part, ...]] = (
    inplace_chain, write_slice, write_view, write_mask, index_add, index_put, scattered, gathered,
    largest, in_order, spectrum, turned, attended, by_einsum, unbound, by_shape, without_gradients,
    straight_through, in_bfloat16, in_double, chosen, rolled, split_up, windows, strided, broadcast,
    masked, products, clamped, norms, read_twice, flags, sizes, images, pooled, distances,
    triangles, gated, checkpointed, under_autocast, vectorized, logged, accumulated, flat, negated,
    chained, Square.apply,
)  # fmt: skip
PAIRS: Final = {
    write_slice, write_view, index_add, index_put, attended, by_einsum, chosen, broadcast, clamped,
    read_twice, distances, under_autocast, chained,
}  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], draw: Draw) -> None:
        super().__init__()
        both = draw.random() < 0.5
        layers = draw.choice([1, 2])
        size = WIDTH // 2 if both else WIDTH
        self.m = kind(WIDTH, size, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x)[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, rows = torch.zeros_like(x[:, 0]), []
        for row in x.unbind(1):
            h = self.m(row, h)
            rows.append(h)
        return torch.stack(rows, 1)


class Channels(nn.Module):
    """A layer that has channels in the second dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, weights = self.m(x, y, y)
        return out + weights.sum(-1, keepdim=True)


class Words(nn.Module):
    """An embedding of what is near, tied to a head."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=draw.choice([None, 0]))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if draw.random() < 0.7:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach().sum(-1) * 7).long() % 11
        return self.table(self.head(x + self.table(ids)).argmax(-1)) + self.head(x)[..., :WIDTH]


class Bag(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.m = nn.EmbeddingBag(11, WIDTH, mode=draw.choice(["sum", "mean", "max"]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.m((x.detach()[..., 0] * 5).long() % 11)[:, None]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum((weights[..., i : i + 1] * (x @ w) for i, w in enumerate(self.experts)), x)


class Running(nn.Module):
    """A mean that moves in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return x - self.mean


class Counting(nn.Module):
    """A count of calls that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


class Scaled(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=draw.random() < 0.7)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class InHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x.bfloat16()).float()


class Shared(nn.Module):
    """One layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(self.m(x).relu())


class Encoder(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        first = draw.random() < 0.5
        self.m = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=first
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x)


def doubled(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out * 2


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(doubled)
    return layer


def linear(*_: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


LAYERS: Final[dict[str, Callable[[Draw], nn.Module]]] = {
    "linear": linear,
    "narrow": lambda _: nn.Sequential(nn.Linear(WIDTH, 3), nn.GELU(), nn.Linear(3, WIDTH)),
    "lstm": lambda draw: Recurrent(nn.LSTM, draw),
    "gru": lambda draw: Recurrent(nn.GRU, draw),
    "rnn": lambda draw: Recurrent(nn.RNN, draw),
    "cell": lambda _: Cell(),
    "conv": lambda _: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "grouped": lambda _: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)),
    "transposed": lambda _: Channels(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "group norm": lambda _: Channels(nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda _: Channels(nn.InstanceNorm1d(WIDTH, affine=True)),
    "layer norm": lambda _: nn.LayerNorm(WIDTH),
    "rms norm": lambda _: nn.RMSNorm(WIDTH),
    "attention": lambda _: Attention(),
    "encoder": Encoder,
    "words": Words,
    "bag": Bag,
    "experts": lambda _: Experts(),
    "scaled": Scaled,
    "half": lambda _: InHalf(),
    "shared": lambda _: Shared(),
    "hooked": lambda _: hooked(),
    "prelu": lambda _: nn.PReLU(),
    "dropout": lambda _: nn.Dropout(0.3),
    "counting": lambda _: Counting(),
    "spectral": lambda _: parametrizations.spectral_norm(linear()),
    "weight norm": lambda _: parametrizations.weight_norm(linear()),
    "orthogonal": lambda _: parametrizations.orthogonal(linear()),
}
# Layers for which a sample is not alone, or calls of which several micro-batches have one state.
MIXING: Final[dict[str, Callable[[Draw], nn.Module]]] = {
    "batch norm": lambda _: Channels(nn.BatchNorm1d(WIDTH)),
    "cumulative": lambda _: Channels(nn.BatchNorm1d(WIDTH, momentum=0.3)),
    "running": lambda _: Running(),
}


class RandomModel(nn.Module):
    """Parts that read what the input and parts before them gave; some are such models again."""

    def __init__(self, draw: Draw, n: int, mixing: bool, depth: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self._part(draw, mixing, depth) for _ in range(n))
        self.reads: list[tuple[int, ...]] = []
        for i, part in enumerate(self.parts):
            pair = isinstance(part, Attention) or (
                isinstance(part, Apply) and part.function in PAIRS
            )
            recent = [max(0, i - draw.choice([0, 0, 0, 1, 2, 4])) for _ in range(1 + pair)]
            self.reads.append(tuple(recent))
        self.joins = draw.sample(range(1, n + 1), min(n, 3))
        self.last = nn.Linear(WIDTH, WIDTH)  # so that something is trained
        self.own = draw.choice(["tensor", "tensor", "tuple", "dict"]) if depth == 0 else "tensor"

    def _part(self, draw: Draw, mixing: bool, depth: int) -> nn.Module:
        roll = draw.random()
        if depth < 2 and roll < 0.12:
            return RandomModel(draw, draw.randint(2, 4), mixing, depth + 1)
        if roll < 0.55:
            function = draw.choice(FUNCTIONS)
            return Apply(function, function.__name__)
        layers = LAYERS | (MIXING if mixing else {})
        return layers[draw.choice(list(layers))](draw)

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for part, reads in zip(self.parts, self.reads, strict=True):
            values.append(part(*(values[i] for i in reads)))
        joined = self.last(sum((values[i] for i in self.joins[1:]), values[self.joins[0]]))
        if self.own == "tuple":
            return joined, values[-1].mean(-1)
        return {"out": joined, "last": values[-1]} if self.own == "dict" else joined


def random_model(draw: Draw, mixing: bool = True) -> RandomModel:
    """A model of three to nine parts, in training mode, with weights drawn by torch."""
    return RandomModel(draw, draw.randint(3, 9), mixing).train()
