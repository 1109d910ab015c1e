"""Small versions of the models that Baechi must split: one function each, `(model, args, kwargs)`.

Weights are random from a fixed seed, on the CPU, in fp32 and in training mode unless the name says
`eval`. `MODELS` are architectures that people use; `AWKWARD` are toys, each with one thing that
makes tracing or splitting hard, and `awkward` has them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from benchmarks.models import hugging_face
from benchmarks.models.inception_v3 import BasicConv2d, InceptionA, InceptionB, inception_v3
from benchmarks.models.lstm_lm import LSTMLanguageModel
from benchmarks.models.resnet import resnet18
from benchmarks.models.towers import Towers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import register_dataclass

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

VOCABULARY = 97
_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def gpt2() -> Example:
    """A decoder with tied embeddings, an attention mask and its own loss."""
    torch.manual_seed(0)
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    kwargs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    model = hugging_face.gpt2(
        dropout=False,
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        **_SPECIAL_TOKENS,
    )
    return model.train(), (), kwargs


def bert() -> Example:
    """An encoder with a masked-token head tied to its embedding."""
    torch.manual_seed(0)
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    model = hugging_face.bert(
        dropout=False,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    return model.train(), (tokens,), {"attention_mask": mask}


def t5() -> Example:
    """An encoder and a decoder that share their embedding, with the head tied to it too."""
    torch.manual_seed(0)
    kwargs = {"input_ids": _tokens(), "labels": _tokens(length=8)}
    model = hugging_face.t5(
        dropout=False,
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    return model.train(), (), kwargs


def llama() -> Example:
    """A decoder with rotary positions and fewer key heads than query heads."""
    torch.manual_seed(0)
    model = hugging_face.llama(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **_SPECIAL_TOKENS,
    )
    return model.train(), (_tokens(),), {}


def mixtral() -> Example:
    """A mixture of experts: which expert runs depends on the data."""
    torch.manual_seed(0)
    model = hugging_face.mixtral(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        **_SPECIAL_TOKENS,
    )
    return model.train(), (_tokens(),), {}


def lstm_lm() -> Example:
    """An LSTM language model with a tied embedding; it returns a nested tuple."""
    torch.manual_seed(0)
    model = LSTMLanguageModel(VOCABULARY, 32, 2, tied=True)
    return model.train(), (_tokens(),), {}


def nn_transformer() -> Example:
    """`nn.Transformer` with a causal mask, said to be causal."""
    torch.manual_seed(0)
    model = nn.Transformer(
        d_model=32,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=64,
        dropout=0.0,
        batch_first=True,
    )
    source, target = torch.randn(2, 10, 32), torch.randn(2, 7, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return model.train(), (source, target), {"tgt_mask": mask, "tgt_is_causal": True}


def vit() -> Example:
    """A vision transformer."""
    torch.manual_seed(0)
    model = hugging_face.vit(
        dropout=False,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=10,
    )
    return model.train(), (torch.randn(2, 3, 16, 16),), {}


def clip() -> Example:
    """Two towers, one for text and one for images, with a scalar parameter at their meeting."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    width = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {**width, "vocab_size": VOCABULARY, "max_position_embeddings": 16, **_SPECIAL_TOKENS}
    vision = {**width, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    tokens = _tokens()
    tokens[:, -1] = _SPECIAL_TOKENS["eos_token_id"]
    kwargs = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}
    return CLIPModel(config).train(), (), kwargs


def inception() -> Example:
    """The whole Inception-v3 on the smallest image that it takes."""
    torch.manual_seed(0)
    return inception_v3(num_classes=10).train(), (torch.randn(4, 3, 75, 75),), {}


class Branching(nn.Module):
    """The first blocks of an Inception-v3, one of each kind that small images allow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = BasicConv2d(3, 16, kernel_size=3)
        self.blocks = nn.Sequential(InceptionA(16, 8), InceptionB(232))
        self.head = nn.Linear(712, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def branches() -> Example:
    """Blocks of Inception-v3 on an image of 16 x 16."""
    torch.manual_seed(0)
    return Branching().train(), (torch.randn(4, 3, 16, 16),), {}


def resnet_train() -> Example:
    """A narrow ResNet-18 whose batch normalization updates its running statistics."""
    torch.manual_seed(0)
    return resnet18(num_classes=10, width=8).train(), (torch.randn(4, 3, 32, 32),), {}


def resnet_eval() -> Example:
    """A narrow ResNet-18 that reads its running statistics."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10, width=8)
    with torch.no_grad():
        model(torch.randn(8, 3, 32, 32))  # running statistics that are not 0 and 1
    return model.eval(), (torch.randn(4, 3, 32, 32),), {}


def towers() -> Example:
    """Two equal towers that meet at their end."""
    torch.manual_seed(0)
    return Towers(n_towers=2, depth=3, width=16).train(), (torch.randn(4, 16),), {}


class KeywordArguments(nn.Module):
    """Arguments by keyword only, one with a default that is used and one in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, *, scale: float = 2.0, bias: Tensor | None = None, extra: dict[str, Tensor]
    ) -> Tensor:
        x = self.linear(x) * scale + extra["shift"]
        return x if bias is None else x + bias


class Answer(NamedTuple):
    """A named tuple, as many libraries return."""

    score: Tensor
    parts: dict[str, Tensor]


@dataclass
class Bundle:
    """A dataclass as an output."""

    hidden: Tensor
    answer: Answer
    missing: Tensor | None = None
    label: str = "bundle"


register_dataclass(
    Bundle, field_names=["hidden", "answer", "missing", "label"], drop_field_names=[]
)


class NestedOutputs(nn.Module):
    """A dataclass of a named tuple of a dictionary, with a `None` and a string in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Bundle:
        hidden = self.first(x)
        score = self.second(hidden)
        return Bundle(hidden, Answer(score, {"double": score * 2, "sum": hidden.sum()}))


@dataclass
class Plain:
    """A dataclass that torch has never heard of."""

    hidden: Tensor
    others: list[Tensor]


class PlainDataclass(nn.Module):
    """A dataclass as an output, and as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Plain) -> Plain:
        hidden = self.linear(x.hidden)
        return Plain(hidden, [other + hidden for other in x.others])


class InputsAsOutputs(nn.Module):
    """Returns an input as it is, a view of an input, one tensor twice, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor | int, ...]:
        out = self.linear(x)
        return x, y.transpose(0, 1), out, out, 7


class IntegersAndBooleans(nn.Module):
    """Integer indices, a boolean mask, and integer and boolean outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        hidden = self.linear(self.embedding(tokens))
        hidden = hidden.masked_fill(~mask[..., None], 0.0)
        positive = hidden.sum(-1) > 0
        return hidden, hidden.argmax(-1), positive, positive & mask


class Constants(nn.Module):
    """Tensors made inside forward: from numbers, from lists, and like another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[-1], device=x.device)
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        window = torch.ones(4, 4, device=x.device).tril()
        return self.linear(x * scale + positions) @ window + torch.zeros_like(x)


class ParameterTwice(nn.Module):
    """One parameter read by two ops far apart, and one read inside and outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        x = self.second(x.relu()) * self.scale
        return x + self.first.weight.sum()


class Tied(nn.Module):
    """An embedding whose weight is also the head's, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.inner = nn.Linear(4, 4)
        self.again = self.inner
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.again(self.inner(self.embedding(tokens)).tanh()))


class Buffers(nn.Module):
    """A persistent buffer, a non-persistent one, and three that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.rand(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x) + self.offset) * self.mask
        with torch.no_grad():
            self.calls += 1
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.last.copy_(x[0])
        return x - self.mean


class InPlace(nn.Module):
    """In-place ops on activations, on views of them, and on what others still read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        before = hidden * 2
        hidden.add_(1.0)
        hidden.view(-1)[::2].mul_(0.5)
        left, right = hidden[:, :3], hidden[:, 3:]
        right += 3.0
        left.clamp_(min=-1.0)
        functional.relu_(before)
        return self.second(hidden + before), right.sum()


class InputWritten(nn.Module):
    """Writes into its argument, which the caller sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        hidden = self.linear(x)
        memory[0] = hidden.detach().mean(0)
        memory.mul_(2.0)
        return hidden * memory.sum()


class SliceAssigned(nn.Module):
    """Slices and masked elements assigned, in a fresh tensor and in an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 8, device=x.device)
        hidden = self.linear(x)
        out[:, :4] = hidden
        out[:, 4:] = hidden.flip(-1)
        out[0, 1:3] = 5.0
        doubled = hidden * 2
        doubled[:, 0] = out[:, 7]
        return out.sum(-1, keepdim=True) + doubled


class Dropouts(nn.Module):
    """A dropout of probability 0, and one above 0 in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.nothing = nn.Dropout(0.0)
        self.second = nn.Linear(4, 4)
        self.often = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.often(self.second(self.nothing(self.first(x))))


class Recurrent(nn.Module):
    """A bidirectional `nn.LSTM` with its state returned, and a GRU on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(x)
        return self.gru(hidden)[0], state


class Attention(nn.Module):
    """`nn.MultiheadAttention` to itself with weights, and to another tensor with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weights = self.own(x, x, x)
        hidden, _ = self.cross(hidden, memory, memory, key_padding_mask=padding, need_weights=False)
        return hidden, weights


class Detached(nn.Module):
    """A branch without gradients: detached, under `no_grad`, and through a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            scale = hidden.abs().mean()
        return self.frozen(hidden) / (1 + scale) + hidden.detach()


class Momentum(nn.Module):
    """Parameters that forward itself moves after others, without gradients (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for own, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.mul_(0.9).add_(own, alpha=0.1)
            key = self.key(x)
        return (query * key).sum(-1)


class Signed(nn.Module):
    """Control flow that looks at values, so that it must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(4, 4)
        self.negative = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.positive(x)
        return self.negative(x) * 2


class DataDependent(nn.Module):
    """Two submodules with data-dependent control flow between plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.left = Signed()
        self.right = Signed()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        left, right = self.left(hidden), self.right(-hidden)
        return self.last(self.norm(left + right))


class Awkward(nn.Module):
    """Everything above that `torch.export` takes, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.keyword = KeywordArguments()
        self.down = nn.Linear(8, 4)
        self.constants = Constants()
        self.twice = ParameterTwice()
        self.buffered = Buffers()
        self.in_place = InPlace()
        self.slices = SliceAssigned()
        self.dropouts = Dropouts().eval()
        self.recurrent = Recurrent()
        self.detached = Detached()
        self.attention = Attention()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def train(self, mode: bool = True) -> "Awkward":
        super().train(mode)
        self.dropouts.eval()
        return self

    def forward(self, tokens: Tensor, *, mask: Tensor, extra: dict[str, Tensor]) -> dict[str, Any]:
        embedded = self.embedding(tokens)
        attended, weights = self.attention(embedded, embedded, ~mask)
        logits = self.head(attended)
        hidden = self.keyword(self.down(attended), extra=extra)
        hidden, state = self.recurrent(self.constants(hidden))
        hidden = self.buffered(hidden[:, -1])
        hidden, total = self.in_place(self.detached(self.twice(hidden)))
        hidden = self.dropouts(self.slices(hidden))
        bundle = Bundle(hidden, Answer(logits, {"total": total, "weights": weights}))
        return {"bundle": bundle, "state": state, "tokens": tokens, "best": logits.argmax(-1)}


def keyword_arguments() -> Example:
    torch.manual_seed(0)
    kwargs = {"bias": torch.rand(4), "extra": {"shift": torch.rand(4)}}
    return KeywordArguments(), (torch.randn(3, 4),), kwargs


def nested_outputs() -> Example:
    torch.manual_seed(0)
    return NestedOutputs(), (torch.randn(3, 4),), {}


def plain_dataclass() -> Example:
    torch.manual_seed(0)
    return PlainDataclass(), (Plain(torch.randn(3, 4), [torch.randn(3, 4)] * 2),), {}


def inputs_as_outputs() -> Example:
    torch.manual_seed(0)
    return InputsAsOutputs(), (torch.randn(3, 4), torch.randn(2, 3)), {}


def integers_and_booleans() -> Example:
    torch.manual_seed(0)
    return IntegersAndBooleans(), (torch.randint(11, (2, 5)), torch.rand(2, 5) > 0.3), {}


def constants() -> Example:
    torch.manual_seed(0)
    return Constants(), (torch.randn(3, 4),), {}


def parameter_twice() -> Example:
    torch.manual_seed(0)
    return ParameterTwice(), (torch.randn(3, 4),), {}


def tied() -> Example:
    torch.manual_seed(0)
    return Tied(), (torch.randint(11, (2, 5)),), {}


def buffers() -> Example:
    torch.manual_seed(0)
    return Buffers(), (torch.randn(5, 4),), {}


def in_place() -> Example:
    torch.manual_seed(0)
    return InPlace(), (torch.randn(3, 4),), {}


def input_written() -> Example:
    torch.manual_seed(0)
    return InputWritten(), (torch.randn(3, 4), torch.randn(2, 4)), {}


def slice_assigned() -> Example:
    torch.manual_seed(0)
    return SliceAssigned(), (torch.randn(3, 4),), {}


def dropouts() -> Example:
    torch.manual_seed(0)
    model = Dropouts()
    model.often.eval()
    return model, (torch.randn(3, 4),), {}


def recurrent() -> Example:
    torch.manual_seed(0)
    return Recurrent(), (torch.randn(2, 5, 4),), {}


def attention() -> Example:
    torch.manual_seed(0)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    return Attention(), (torch.randn(2, 5, 8), torch.randn(2, 6, 8), padding), {}


def detached() -> Example:
    torch.manual_seed(0)
    return Detached(), (torch.randn(3, 4),), {}


def momentum() -> Example:
    torch.manual_seed(0)
    return Momentum(), (torch.randn(3, 4),), {}


def data_dependent() -> Example:
    torch.manual_seed(0)
    return DataDependent(), (torch.randn(5, 4),), {}


def masked_transformer() -> Example:
    """`nn.Transformer` compares a mask's values to find out whether it is causal."""
    model, args, kwargs = nn_transformer()
    return model, args, {"tgt_mask": kwargs["tgt_mask"]}


def awkward() -> Example:
    torch.manual_seed(0)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 3:] = False
    kwargs = {"mask": mask, "extra": {"shift": torch.rand(4)}}
    return Awkward(), (torch.randint(11, (4, 5)),), kwargs


MODELS: Mapping[str, Callable[[], Example]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llama": llama,
    "mixtral": mixtral,
    "clip": clip,
    "vit": vit,
    "lstm_lm": lstm_lm,
    "nn_transformer": nn_transformer,
    "branches": branches,
    "inception": inception,
    "resnet_train": resnet_train,
    "resnet_eval": resnet_eval,
    "towers": towers,
    "awkward": awkward,
}

AWKWARD: Mapping[str, Callable[[], Example]] = {
    "keyword_arguments": keyword_arguments,
    "nested_outputs": nested_outputs,
    "plain_dataclass": plain_dataclass,
    "inputs_as_outputs": inputs_as_outputs,
    "integers_and_booleans": integers_and_booleans,
    "constants": constants,
    "parameter_twice": parameter_twice,
    "tied": tied,
    "buffers": buffers,
    "in_place": in_place,
    "input_written": input_written,
    "slice_assigned": slice_assigned,
    "dropouts": dropouts,
    "recurrent": recurrent,
    "attention": attention,
    "detached": detached,
    "momentum": momentum,
    "data_dependent": data_dependent,
    "masked_transformer": masked_transformer,
}


class OwnLoss(nn.Module):
    """Returns its loss and what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.first(x).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
