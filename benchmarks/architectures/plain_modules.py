"""Models in plain torch with modules that are shared, scripted, checkpointed or of mixed types."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
