"""Peaks of toys whose readers, parts or writes lie on several devices, or far apart in forward."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from placed import cpus
from seeds import some
from torch import Tensor, nn

import baechi
from baechi.tracing.family_traces import resized, sized
from baechi.tracing.ladder import trace


def peaks(
    model: nn.Module, x: Tensor, away: str = "", training: bool = True, *, measured: bool = False
) -> list[tuple[int, int]]:
    """Metered and predicted peak of each device; operators named by `away` are on the second."""
    return peaks_of(*costed(model, x, training, measured=measured), away)


def costed(
    model: nn.Module, x: Tensor, training: bool = True, *, measured: bool = False
) -> tuple[baechi.Traced, baechi.OpGraph]:
    """The trace of a step, and its graph."""
    traced = baechi.trace(model.train(training), (x,))
    costs = baechi.estimate(traced, "cpu")
    if measured:
        costs = baechi.profile(traced, "cpu", threads=1, progress=False, cache=False)
    return traced, traced.graph(costs, training=training)


def peaks_of(traced: baechi.Traced, graph: baechi.OpGraph, away: str = "") -> list[tuple[int, int]]:
    """As `peaks`, of what is traced."""
    cluster = cpus(2 if away else 1)
    named = [op.name.partition("/")[0] in away.split() for op in traced.ops]
    pins = {
        op.name: cluster.devices[there].name for op, there in zip(traced.ops, named, strict=True)
    }
    placement = baechi.solve(graph, cluster, constraints=baechi.Constraints(pins=pins))
    placed = baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)
    with torch.set_grad_enabled(graph.is_training):
        seen, said = placed.measure(1).peak_bytes, placed.schedule.peak_bytes
    placed.unplace()
    assert any(named) == bool(away)
    return [*zip(seen, said, strict=True)]


class Repeated(nn.Module):
    """A weight that is read often on one tape, and once more behind another device."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.shared(x).tanh()
        return self.shared(self.other(x).tanh())


@pytest.mark.parametrize("times", [1, 2, 5])
def test_gradients_of_a_weight_are_added_up_before_their_tape_ends(times: int) -> None:
    for seen, said in peaks(Repeated(times), torch.randn(4, 64), "other"):
        assert seen <= said <= 1.05 * seen


class Two(nn.Module):
    """Two weights that are read on one tape, and again behind another device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.other, self.a, self.b):
            x = layer(x).tanh()
        return x


def test_gradients_of_several_weights_are_added_up_before_their_tape_ends() -> None:
    for seen, said in peaks(Two(), torch.randn(4, 64), "other tanh_2"):
        assert seen <= said <= 1.05 * seen


class Joined(nn.Module):
    """Parts of a tensor that other operators read as a whole, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        a = x @ self.weight
        b = a * self.scale
        one, two = a.chunk(2, -1)
        return torch.cat([two * b[..., :4], one + b[..., 4:]], -1).tanh() @ self.weight + a


def test_a_joined_gradient_stays_until_its_parts_are_parts_of_another() -> None:
    own, other = peaks(Joined(), torch.randn(8, 6, 8), "mul mul_1 tanh")
    assert own[0] <= own[1] <= 1.05 * own[0]
    assert other[0] <= other[1]


class Rotated(nn.Module):
    """A product that others read as a whole and in halves, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).sin()
        whole = y * 2.0
        return whole + torch.cat([-y[..., 32:], y[..., :32]], -1) * 3.0


def test_parts_from_other_tapes_become_wholes_before_the_whole_s_own_operator() -> None:
    step = costed(Rotated(), torch.randn(16, 32, 64))
    for away in ("inner", "neg", "add", "mul mul_1", "sin cat", "mul neg cat"):
        for seen, said in peaks_of(*step, away):
            assert seen <= said, away


class CutOff(nn.Module):
    """A join of which only a part is read, so that less comes back to it than it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.cat([y.sin(), -y.cos(), y.exp() * 2], -1)[..., :64].tanh()


def test_a_joined_gradient_of_which_less_came_back_stays_beside_what_waits() -> None:
    ((seen, said),) = peaks(CutOff(), torch.randn(16, 32, 64))
    assert seen <= said <= 1.05 * seen


class TurnedNorm(nn.Module):
    """A batch norm between two turns, whose result is turned: a product copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.norm(self.layers[0](x).mT).mT.tanh())


@pytest.mark.parametrize("training", [True, False])
def test_a_product_copies_what_a_norm_turned(training: bool) -> None:
    ((seen, said),) = peaks(TurnedNorm(), torch.randn(8, 64, 16), training=training)
    assert seen <= said <= 1.05 * seen


class Padded(nn.Module):
    """Room that is made long before it is written."""

    def forward(self, x: Tensor) -> Tensor:
        room = torch.zeros(64, 64)
        room[:, 0] = x.repeat(1, 2).sin().cos().sum(-1)
        return room.sum(0)


def test_an_inference_makes_room_when_it_is_written() -> None:
    ((seen, said),) = peaks(Padded(), torch.randn(64, 64), training=False)
    assert seen == said


class AddedLate(nn.Module):
    """Scores to which something is added in place that is computed after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(16, 16), nn.Parameter(torch.randn(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        scores = x @ x.T
        with torch.no_grad():
            added = (self.table[:, None] * self.table[None, :64]).exp().sum((0, 1))
        return (scores.add_(added)).sum()


@pytest.mark.parametrize("training", [True, False])
def test_what_is_written_late_is_made_when_the_clock_says(training: bool) -> None:
    ((seen, said),) = peaks(AddedLate(), torch.randn(256, 16), training=training)
    assert seen <= said <= 1.01 * seen


class Positioned(nn.Module):
    """A table of which a call reads the first rows, on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(4096, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x + self.table[: len(x)])
        return self.outer(x + self.table[: len(x)])


@pytest.mark.parametrize("training", [True, False])
def test_rows_of_a_table_cross_without_the_table(training: bool) -> None:
    x = torch.randn(64, 16)
    rows = peaks(Positioned(), x, "add_1 outer", training)
    assert max(seen for seen, _ in rows) > 4 * min(seen for seen, _ in rows)
    for seen, said in rows:
        assert seen <= said <= seen + 2 * x.nbytes  # each time they are read


@pytest.mark.parametrize("first", [16, 3000])
def test_a_table_is_counted_at_all_sizes(first: int) -> None:
    """Of which a call reads nearly all, or a small part."""
    traced = trace(Positioned(), (torch.randn(first, 16),), places=frozenset({(0, 0)}))
    assert traced.module.family.traced_at == (first,)
    for rows in (16, 3000):
        known, again = (at(traced, [rows]) for at in (resized, sized))
        assert known.tensors == again.tensors
        for one, two in zip(known.ops, again.ops, strict=True):
            assert (one.frozen_bytes, one.saved_bytes) == (two.frozen_bytes, two.saved_bytes)


class Unfolded(nn.Module):
    """Patches that overlap, and their sum where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = nn.functional.unfold(self.inner(x), 5, padding=2, stride=2)
        return self.outer(nn.functional.fold(patches.tanh(), 32, 5, padding=2, stride=2))


@pytest.mark.parametrize("training", [True, False])
def test_what_is_folded_has_the_memory_of_the_patches(training: bool) -> None:
    step = costed(Unfolded(), torch.randn(2, 4, 32, 32), training)
    for away in ("", "im2col", "col2im"):
        for seen, said in peaks_of(*step, away):
            assert seen <= said <= 1.2 * seen, away


class Remembering(nn.Module):
    """Tokens of its own in each layer but the first, beside those that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 2, 64))
        layers = (nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in "123")
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for i in range(2):
            x = self.layers[1 + i](x)
            x = torch.cat([self.memory[i].expand(len(x), -1, -1), x], 1).softmax(-1)
        return x[:, :2].sum()


def test_what_a_repeated_token_waits_for_is_not_the_whole_that_it_was_joined_to() -> None:
    step = costed(Remembering(), torch.randn(4, 64, 64))
    for away in ("", "layers.0.1", "layers.1.1"):
        (seen, said), *_ = peaks_of(*step, away)
        assert seen <= said <= 1.02 * seen, away


class Within(nn.Module):
    """An operator that runs others inside, by a value or until one is large enough."""

    def __init__(self, *, loops: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.loops = nn.Linear(64, 64), nn.Linear(64, 64), loops

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.loops:
            (y,) = torch.while_loop(lambda y: y.sum().abs() < 1e6, _grown, (x.detach(),))
        else:
            y = torch.cond(x.sum() > 0, lambda x: _grown(x)[0], torch.sin, (x,))
        return self.outer(x + y)


def _grown(x: Tensor) -> tuple[Tensor]:
    large = x.repeat(1, 16).cos().view(-1, 16, 64) + 2
    return (large.sum(1) * x.abs().sum().clamp(min=1),)


@pytest.mark.parametrize(
    ("loops", "training", "measured"),
    [
        (True, True, False),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in product((True, False), (True, False), (True, False))
            if row != (True, True, False)
        ),
    ],
)
def test_what_runs_inside_of_an_operator_is_metered(
    loops: bool, training: bool, measured: bool
) -> None:
    x = torch.randn(32, 64)
    step = costed(Within(loops=loops), x, training, measured=measured)
    for away in ("", "outer"):
        (seen, said), *_ = peaks_of(*step, away)
        assert 32 * x.nbytes < seen <= said <= 2 * seen  # both branches may count


class Windowed(nn.Module):
    """Windows that overlap, each set beside its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        windows = x.as_strided((len(x) - 7, 8, 16), (16, 16, 1))
        return torch.einsum("nd,nwd->nw", x[7:].detach(), windows)


def test_a_gradient_of_windows_that_comes_turned_is_copied() -> None:
    ((seen, said),) = peaks(Windowed(), torch.randn(256, 16))
    assert seen <= said <= 1.1 * seen


class Squared(nn.Module):
    """A product of two views of one tensor, each with a gradient of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.outer((x.view(-1, 4, 4) @ x.view(-1, 4, 4)).view(-1, 16))


def test_gradients_of_two_views_of_a_whole_are_added_up() -> None:
    step = costed(Squared(), torch.randn(256, 16))
    for away in ("", "matmul outer"):
        for seen, said in peaks_of(*step, away):
            assert seen <= said <= 1.05 * seen, away


class Ends(nn.Module):
    """An early output, and much that goes backward before its gradient is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(16, 256), nn.Linear(256, 256)
        self.last = nn.Linear(256, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x).tanh()
        return first, self.last(self.wide(first).exp().exp())


def test_the_gradient_of_an_early_output_has_room_where_that_is() -> None:
    step = costed(Ends(), torch.randn(256, 16))
    for away in ("last", "wide last"):
        for seen, said in peaks_of(*step, away):
            assert seen <= said <= 1.05 * seen, away


class Recurrent(nn.Module):
    """A recurrent layer, which keeps much for a backward."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_keeps_nothing_where_no_backward_comes(kind: type[nn.RNNBase]) -> None:
    for seen, said in peaks(Recurrent(kind), torch.randn(12, 16, 64), training=False):
        assert seen <= said <= 1.05 * seen


class Biased(nn.Module):
    """Attention whose mask is computed, for whose gradient torch keeps all scores."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(128, 128))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, self.mask.tanh())


@pytest.mark.parametrize("training", [True, False])
def test_attention_without_gradients_has_no_scores_in_memory(training: bool) -> None:
    ((seen, said),) = peaks(Biased(), torch.randn(4, 128, 32), training=training)
    assert seen <= said <= 1.3 * seen


class Branches(nn.Module):
    """A branch that keeps much, one whose gradients are large, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.head = nn.Linear(64, 512), nn.Linear(512, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        one = x * self.scale
        for _ in range(16):
            one = one.sin()
        return self.head(one + self.back(self.wide(x).sin()))


def test_peaks_are_of_the_order_in_which_a_step_runs() -> None:
    """A clock that begins with the backward of what was first frees what a step still holds."""
    traced = baechi.trace(Branches(), (torch.randn(32, 64),))
    graph, cluster = traced.graph(baechi.estimate(traced, "cpu"), training=True), cpus(2)
    pins = {op.name: f"cpu:{int(op.name.startswith('head'))}" for op in traced.ops}
    found = baechi.solve(graph, cluster, constraints=baechi.Constraints(pins=pins))
    names = [graph.ops[i].name for i in found.order]
    chain = ["backward:sin", *(f"backward:sin_{i}" for i in range(1, 16))][::-1]
    rest = [name for name in names if name not in chain]
    begin = rest.index("backward:add") + 1
    names = [*rest[:begin], *chain, *rest[begin:]]
    index = {op.name: i for i, op in enumerate(graph.ops)}
    placement = replace(found, order=tuple(index[name] for name in names))
    placed = baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)
    seen, said = placed.measure(1).peak_bytes, placed.schedule.peak_bytes
    placed.unplace()
    assert baechi.simulate(graph, cluster, placement).peak_bytes[0] < seen[0]
    assert seen[0] <= said[0] <= 1.02 * seen[0]


class Stacked(nn.Module):
    """Layers that take their weights from one parameter, and their biases from another."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(8, 64, 64) / 8)
        self.biases = nn.Parameter(torch.zeros(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(8):
            x = torch.tanh(x @ self.weights[i] + self.biases[i])
        return x


def test_gradients_of_layers_in_one_parameter_are_counted_once() -> None:
    ((seen, said),) = peaks(Stacked(), torch.randn(256, 64))
    assert seen <= said <= 1.08 * seen
    # Parts of both become the whole in turn, on a tape that begins before the input has come.
    (seen, said), _ = peaks(Stacked(), torch.randn(16, 64), "input:x0 tanh_6 tanh_7")
    assert seen <= said <= 1.02 * seen


class Chosen(nn.Module):
    """Runs the experts that are hit, whose weights are parts of one parameter, as DBRX's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4 * 32, 32))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            made.index_add_(0, rows, x[rows] @ self.weights.view(4, 32, 32)[number].relu())
        return made


class Routed(nn.Module):
    """Nobody but a run of the model knows which experts are hit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.last = nn.Linear(32, 4), Chosen(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(x, self.gate(x).argmax(-1)))


@pytest.mark.parametrize("measured", some([True, False], 2))
def test_which_experts_are_hit_does_not_decide_what_is_counted(measured: bool) -> None:
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(16, 32)
    (seen, said), *_ = peaks(model, x, measured=measured)
    assert seen <= said <= 1.15 * seen
    for _ in range(3):
        (other, _), *_ = peaks(model, torch.randn(16, 32))
        assert other <= said
    layers = nn.Sequential(*(Routed() for _ in range(3)))  # each of which routes otherwise
    (seen, said), *_ = peaks(layers, x, training=False, measured=measured)
    assert seen <= said <= 1.02 * seen


@torch.library.custom_op("baechi_peaks::marked", mutates_args=())
def marked(x: Tensor, marks: Tensor) -> Tensor:
    """What is marked."""
    return x * marks


@marked.register_fake
def _(x: Tensor, marks: Tensor) -> Tensor:
    del marks
    return torch.empty_like(x)


def keep_marks(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Holds integers by itself, as grouped products do in transformers, out of autograd's sight."""
    del output
    ctx.marks = inputs[1]


def back_of_marked(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.marks, None


marked.register_autograd(back_of_marked, setup_context=keep_marks)


class Marking(nn.Module):
    """Marks what it computed, and computes more between that and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(marked(x, (x > 0).to(torch.int64)))


def test_what_a_custom_function_holds_by_itself_is_counted() -> None:
    for seen, said in peaks(Marking(), torch.randn(256, 64)):
        assert seen <= said <= 1.02 * seen


class Chunks(nn.Module):
    """Three parts of one product, of which an operator elsewhere reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(32, 96), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.enter(x).chunk(3, -1)
        return self.leave(one.tanh()) + (two * three).sum(-1, keepdim=True)


@pytest.mark.parametrize("training", [True, False])
def test_a_copy_holds_the_part_that_is_read(training: bool) -> None:
    step = costed(Chunks(), torch.randn(16, 8, 32), training)
    for away in ("tanh leave", "mul sum"):
        own, other = peaks_of(*step, away)
        assert own[0] <= own[1], away
        assert other[0] <= other[1] <= 1.02 * other[0], away


class Spread(nn.Module):
    """A weight that is read three times, between what one device and what another does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shared, self.leave = (nn.Linear(96, 96, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).tanh()
        ys = [self.shared(x * (i + 1)) for i in range(3)]
        return torch.stack([self.leave(y).sin() for y in ys]).sum(0)


def test_gradients_that_wait_for_the_last_readers_are_added_up_when_it_has_come() -> None:
    away = "leave sin sin_1 sin_2 stack sum_1"
    for seen, said in peaks(Spread(), torch.randn(4, 96), away):
        assert seen <= said <= 1.05 * seen


class Remembered(nn.Module):
    """Two learned rows, one joined with the first values and one with the last."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 1, 4, 64))
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.memory
        x = self.down(self.up(torch.cat([first, x], 1)).exp()).sin()
        return torch.cat([last, x, x, x], 1).tanh()


def test_what_a_learned_row_was_joined_with_is_held_for_the_row_s_gradient() -> None:
    for seen, said in peaks(Remembered(), torch.randn(1, 512, 64), "exp"):
        assert seen <= said <= 1.05 * seen


def test_the_gradient_of_a_learned_row_leaves_its_tape_without_what_it_was_joined_with() -> None:
    step = costed(Remembered(), torch.randn(1, 512, 64))
    for away in ("sin exp", "down exp"):
        for seen, said in peaks_of(*step, away):
            assert seen <= said, away
