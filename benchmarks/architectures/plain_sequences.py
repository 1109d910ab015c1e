"""Models of sequences, graphs and tables in plain torch: loops, routing, scatters."""

import torch
from benchmarks.architectures.small import Example
from torch import Tensor, nn
from torch.nn import functional


class Seq2Seq(nn.Module):
    """A GRU encoder, a decoder with attention that loops over steps, with teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.encoder = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(32, 16)
        self.cell = nn.GRUCell(16 + 32, 16)
        self.score = nn.Linear(16, 32)
        self.out = nn.Linear(16, 50)

    def forward(self, source: Tensor, target: Tensor, teacher: bool = True) -> Tensor:
        memory, last = self.encoder(self.embed(source))
        state = self.bridge(torch.cat([last[0], last[1]], -1)).tanh()
        token = target[:, 0]
        logits = []
        for t in range(target.shape[1]):
            weights = torch.softmax((memory @ self.score(state).unsqueeze(-1)).squeeze(-1), -1)
            context = torch.einsum("bs,bsd->bd", weights, memory)
            state = self.cell(torch.cat([self.embed(token), context], -1), state)
            logits.append(self.out(state))
            token = target[:, t] if teacher else logits[-1].argmax(-1)
        return torch.stack(logits, 1)


class LSTMs(nn.Module):
    """An LSTM with projections, a cell in a loop, and packed-like masks."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, proj_size=8)
        self.cell = nn.LSTMCell(8, 16)
        self.register_buffer("start", torch.zeros(1, 16))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x)
        h = self.start.expand(x.shape[1], -1)
        c = torch.zeros_like(h)
        for step in y:
            h, c = self.cell(step, (h, c))
        mask = torch.arange(x.shape[0])[:, None] < lengths[None]
        return h, (y * mask.unsqueeze(-1)).sum(0)


class GraphConv(nn.Module):
    """Messages along edges: index_select, index_add, scatter, degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        src, dst = edges
        degree = torch.zeros(x.shape[0]).scatter_add_(0, dst, torch.ones(dst.shape[0]))
        norm = degree.clamp(min=1).rsqrt()
        for layer in self.layers:
            message = layer(x)[src] * (norm[src] * norm[dst]).unsqueeze(-1)
            x = torch.relu(torch.zeros_like(x).index_add(0, dst, message) + x)
        pooled = torch.zeros(3, 8).index_add_(0, batch, x)
        return torch.cat(
            [
                pooled,
                torch.full((3, 8), -9.0).scatter_reduce(0, batch[:, None].expand(-1, 8), x, "amax"),
            ],
            1,
        )


class DLRM(nn.Module):
    """Embedding bags, dense features, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        rows = [x, *(bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True))]
        t = torch.stack(rows, 1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, z[:, li, lj]], 1)).squeeze(1)


class Experts(nn.Module):
    """Top-k routing with a loop over experts, `where` and index_add: sizes from values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, 16)
        scores = self.gate(flat).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            out.index_add_(0, row, expert(flat[row]) * weights[row, slot, None])
        return self.head(out).view(*x.shape[:-1], 3), scores.mean(0).square().sum()


class SkippingExperts(Experts):
    """The same, but an expert without tokens is skipped: control flow on sizes from values."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 16)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            if row.numel() == 0:
                continue
            out[row] += expert(flat[row]) * weights[row, slot, None]
        return self.head(out)


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates, residuals and skips, weight-normed."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(norm(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(4))
        self.residual = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.skip = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(4))
        self.out = nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total: Tensor | int = 0
        for i in range(4):
            gate, value = self.gates[i](functional.pad(x, (2**i, 0))).chunk(2, 1)
            h = torch.sigmoid(gate) * torch.tanh(value)
            total = total + self.skip[i](h)
            x = x + self.residual[i](h)
        return self.out(total)


class Loop(nn.Module):
    """A fixed-point iteration that writes its state in place, and truncates gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor, steps: int = 6) -> Tensor:
        z = torch.zeros_like(x)
        for i in range(steps):
            if i < steps - 2:
                with torch.no_grad():
                    z = torch.tanh(self.cell(z) + x)
            else:
                z = torch.tanh(self.cell(z) + x)
        return z


class Cached(nn.Module):
    """Keys and values appended to a cache object that the caller gives and gets back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(
        self, x: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache:
            k, v = torch.cat([cache[0][0], k], 1), torch.cat([cache[0][1], v], 1)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.out(y), [(k, v)]


class TransformerXLLike(nn.Module):
    """nn.TransformerEncoder with padding and causal masks (its fast path in evaluation mode)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=True, norm_first=False
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.embed = nn.Embedding(50, 16)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.encoder(self.embed(ids), mask=mask, src_key_padding_mask=padding)


class Ssm(nn.Module):
    """A selective state-space scan by a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bc, self.dt, self.out = (
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Linear(16, 16),
            nn.Linear(16, 8),
        )
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, 5).repeat(16, 1)))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(self.conv(self.inner(x).transpose(1, 2))[..., : x.shape[1]]).transpose(
            1, 2
        )
        b, c = self.bc(h).chunk(2, -1)
        dt = functional.softplus(self.dt(h))
        a = -self.log_a.exp()
        state = h.new_zeros(x.shape[0], 16, 4)
        rows = []
        for t in range(x.shape[1]):
            state = (
                torch.exp(dt[:, t, :, None] * a) * state
                + dt[:, t, :, None] * b[:, t, None] * h[:, t, :, None]
            )
            rows.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(rows, 1))


class Complex(nn.Module):
    """Rotary positions by complex products, as in the first Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)
        freqs = torch.outer(torch.arange(8.0), 1 / 10 ** (torch.arange(0, 8.0) / 8))
        self.freqs = torch.polar(torch.ones_like(freqs), freqs)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.view_as_complex(self.q(x).float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(q * self.freqs).flatten(-2)


def sequences(batch: int = 3) -> Example:
    return LSTMs(), (torch.randn(5, batch, 8), torch.tensor([5, 2, 3]).repeat(2)[:batch]), {}


def edges(batch: int = 3) -> Example:
    nodes = 3 * batch
    pairs = torch.randint(0, nodes, (2, 7 * batch - 1))
    return GraphConv(), (torch.randn(nodes, 8), pairs, torch.arange(nodes) // batch), {}


def dlrm(batch: int = 4) -> Example:
    indices = [torch.randint(0, 20, (2 * batch + 2,)) for _ in range(3)]
    offsets = [torch.arange(batch) * 2 for _ in range(3)]
    return DLRM(), (torch.randn(batch, 4), indices, offsets), {}


def padding() -> Tensor:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    return padding
