"""A model that is traced takes the branches that it takes when it runs."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, lru_cache, wraps
from typing import Any

import pytest
import torch
import zoo
from benchmarks.runtime.peaks import placed_alone
from placed import lazily
from scripts import tiny_llama
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

import baechi
from baechi.tracing.calling_convention import canonical_call


def without_padding(name: str) -> zoo.Example:
    model, args, kwargs = zoo.MODELS[name]()
    return model, args, {key: value for key, value in kwargs.items() if "mask" not in key}


@cache
def traced_without_padding(name: str) -> tuple[zoo.Example, baechi.Traced]:
    model, args, kwargs = example = without_padding(name)
    return example, baechi.trace(model, args, kwargs)


def nightly(*row: object) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


def readers(traced: baechi.Traced) -> Iterator[torch.fx.Node]:
    for node in traced.module.graph_module.graph.nodes:
        if "scaled_dot_product_attention" in str(node.target):
            yield node


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("llama", True),
        ("gpt2", True),
        nightly("mixtral", True),
        nightly("vit", False),
        nightly("clip", None),
    ],
)
def test_attention_without_padding_has_no_mask(name: str, causal: bool | None) -> None:
    found = list(readers(traced_without_padding(name)[1]))
    assert found
    for node in found:
        masked, is_causal = [*node.args[3:], None][0], [*node.args[5:], False][0]
        assert masked is None
        assert "attn_mask" not in node.kwargs or node.kwargs["attn_mask"] is None
        assert causal is None or bool(is_causal or node.kwargs.get("is_causal")) is causal


@pytest.mark.parametrize("name", ["gpt2", nightly("bert")])
def test_a_mask_of_ones_is_dropped_as_an_eager_run_drops_it(name: str) -> None:
    """And a mask that is needed stays; which of both a call has is looked up in each."""
    model, args, kwargs = zoo.MODELS[name]()
    whole = {key: torch.ones_like(v) if "mask" in key else v for key, v in kwargs.items()}
    padded = {key: v.clone() for key, v in whole.items()}
    padded["attention_mask"][0, -2:] = 0
    traces = [baechi.trace(model, args, each) for each in (whole, padded)]
    for node in readers(traces[0]):
        assert node.args[3:4] in ((), (None,))
    for node in readers(traces[1]):
        assert isinstance(node.args[3], torch.fx.Node)
    calls = [canonical_call(model, args, each) for each in (whole, padded)]
    answers = [[traced.module.answers(call) for call in calls] for traced in traces]
    assert answers == [[True, False], [False, True]]


def test_positions_of_one_sequence_mask_nothing_as_in_an_eager_run() -> None:
    """TRL packs several sequences into a row; the last row of an epoch may have one."""
    model, ids = tiny_llama(), torch.arange(3, 11)[None]
    rows = [torch.arange(8)[None], torch.arange(4).repeat(2)[None]]
    given = [{"input_ids": ids, "position_ids": row, "use_cache": False} for row in rows]
    calls = [canonical_call(model, (), each) for each in given]
    split, traces = lazily(copy.deepcopy(model)), []
    for each in given:
        for one in (model, split):
            one.zero_grad()
            one(**each).logits.sum().backward()
        for one, two in zip(model.parameters(), split.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        traces.append(split.traced)
    masks = [[node.args[3:4] for node in readers(traced)] for traced in traces]
    assert masks[0] in ([()], [(None,)])
    assert isinstance(masks[1][0][0], torch.fx.Node)
    answers = [[traced.module.answers(call) for call in calls] for traced in traces]
    assert answers == [[True, False], [False, True]]
    split.unplace()


class Masked(nn.Module):
    """Asks arguments for truth values: of their own, of a part of some size, after writing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        x = self.linear(x)
        if not mask.all():
            x = x * mask.unsqueeze(-1)
        if (lengths == x.shape[1]).any():
            x = x + 1
        inverted = mask.clone()
        inverted.logical_not_()
        return x.relu() if inverted[:, : x.shape[1] // 2].any() else x


def test_there_is_a_plan_for_each_answer_about_arguments() -> None:
    torch.manual_seed(0)
    model = Masked()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=False, placer=baechi.RandomPlacer(0), max_shapes=7)
    plans = []
    for rows, length in ((2, 6), (3, 8), (4, 10)):
        x, ones = torch.randn(rows, length, 4), torch.ones(rows, length, dtype=torch.bool)
        late, early = ones.clone(), ones.clone()
        late[0, -1] = early[1, 0] = False
        full, short = torch.full((rows,), length), torch.ones(rows, dtype=torch.int64)
        # Three answers of two questions, and two of the third.
        for mask, lengths in ((ones, full), (ones, short), (late, short), (early, full)):
            given = mask.clone()
            assert torch.equal(placed(x, given, lengths), unsplit(x, mask, lengths))
            assert torch.equal(given, mask)
        plans.append(len(placed._specializations))
    assert plans == [4, 4, 4]
    placed.unplace()


def test_a_transformer_with_a_mask_of_floats_is_split() -> None:
    """It asks whether its mask is causal; another mask has another plan."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
    unsplit = copy.deepcopy(model)
    placed = lazily(model, placer=baechi.RandomPlacer(0))
    for length in (5, 5, 6):
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        for mask in (causal, torch.zeros_like(causal), causal.clamp(min=-1)):
            x = torch.randn(2, length, 8)
            one, two = (each(x, mask=mask) for each in (placed, unsplit))
            assert torch.equal(one, two)
            one.sum().backward()
            two.sum().backward()
            assert placed.traced.rung == "torch.export (non-strict)"
    for one, two in zip(placed.parameters(), unsplit.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    placed.unplace()


class Tokens(nn.Module):
    """Makes a mask of floats of what its tokens are, as Pix2Struct does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids.ne(0).float()
        mask[:, 0] = 1
        with_pixels = torch.cat([mask, torch.ones(len(ids), 2)], dim=1)  # as LayoutLMv3 does
        x = self.table(ids)
        return x if with_pixels.bool().all() else x * mask.unsqueeze(-1)


def test_a_mask_of_floats_that_forward_makes_of_tokens_is_known() -> None:
    model = Tokens()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=False, placer=baechi.RandomPlacer(0))
    for ids in (torch.ones(2, 3, dtype=torch.int64), torch.tensor([[0, 1, 2], [3, 0, 0]])):
        assert torch.equal(placed(ids), unsplit(ids))
        assert placed.traced.rung == "torch.export (non-strict)"
    assert len(placed._specializations) == 2
    placed.unplace()


class Pooled(nn.Module):
    """Sums the rows of each graph of a batch by itself, and the first of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, batch: Tensor, lengths: Tensor) -> Tensor:
        x = self.before(x).relu()
        graphs = torch.stack([x[batch == i].sum(0) for i in range(int(batch.max()) + 1)])
        first = torch.stack([x[:n].mean(0) for n in lengths.tolist()])
        return torch.cat([self.after(graphs), self.after(first[:, : lengths.max().item()])])


class PoolsInside(nn.Module):
    """The same in a submodule, which could stay whole, but has all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pooled()

    def forward(self, x: Tensor, batch: Tensor, lengths: Tensor) -> Tensor:
        return self.inner(x, batch, lengths).tanh()


class Packed(nn.Module):
    """Sums parts whose number and lengths it computes, as vision encoders do with their images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor, batch: Tensor, lengths: Tensor) -> Tensor:
        lengths = torch.as_tensor([lengths[0], lengths[1]])
        counts = torch.full((batch[:2].max() + torch.as_tensor(1),), 0)
        counts[batch[:2]] = lengths - 7
        ends = nn.functional.pad(torch.repeat_interleave(counts, counts).cumsum(0), (1, 0))
        x = self.linear(x.view(lengths.sum() - 5, 4)[batch.nonzero()[:, 0]])
        x = x[: ends[-1]]
        parts = x.split(ends.diff().tolist()) if x.shape[0] > 1 else [x]
        starts = torch.tensor([batch[:n].sum() for n in lengths.tolist()], device=x.device)
        sums = torch.zeros(len(parts), lengths.max() - 7)
        if sums.shape[1] > 1:
            sums = torch.stack([part.sum() for part in parts]).outer(starts.float())
        return sums


@pytest.mark.parametrize("kind", [Pooled, PoolsInside, Packed])
def test_there_is_a_plan_for_the_numbers_that_forward_reads_from_arguments(
    kind: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    model = kind()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=True, placer=baechi.RandomPlacer(0))
    rungs = []
    for graphs, lengths in ((2, [8, 9]), (2, [8, 9]), (3, [8, 9]), (2, [9, 8]), (2, [8, 9])):
        x, batch = torch.randn(12, 4), torch.arange(12) % graphs
        results = [each(x, batch, torch.tensor(lengths)) for each in (placed, unsplit)]
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
        rungs.append(placed.traced.rung)
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, unsplit))))
    what = " and what they choose" if kind is Packed else ""
    assert set(rungs) == {f"torch.export (non-strict), numbers of the arguments{what}"}
    assert len(placed._specializations) == 3
    placed.unplace()


class Pictures(nn.Module):
    """Drops pictures and rows of pixels that are padding, and tells their number, as SmolVLM."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, pictures: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        counts, pictures = pictures.shape[:2], pictures.flatten(0, 1)
        real = (pictures == 0.0).sum(dim=(-1, -2)) != pictures[0].numel()
        real[0] |= ~real.any()  # an empty one, if there are no others
        x, mask = self.before(pictures[real]), rows.flatten(0, 1)[real]
        torch._check(x.shape[1] == mask.shape[1], lambda: f"{x.shape[0]} pictures")
        if not mask.all():
            x = x * mask.unsqueeze(-1)
        return self.after(x.relu()).split(real.view(*counts).sum(dim=1).tolist())


def test_what_is_padding_of_floats_is_told_by_what_they_equal() -> None:
    torch.manual_seed(0)
    model = Pictures()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=True, placer=baechi.RandomPlacer(0))
    plans = []
    for padding in ([], [(0, 1)], [(0, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)], []):
        for hidden in (0, 1):
            pictures = torch.randn(2, 2, 3, 6)
            rows = torch.ones(2, 2, 3, dtype=torch.bool)
            rows[1, 1, :hidden] = False
            for place in padding:
                pictures[place] = 0
            ones, others = (each(pictures, rows) for each in (placed, unsplit))
            assert all(map(torch.equal, ones, others))
            for parts in (ones, others):
                torch.stack([part.square().sum() for part in parts]).sum().backward()
            plans.append(len(placed._specializations))
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, unsplit))))
    # Where no picture is real, the first stays, all of whose rows count.
    assert plans == [1, 2, 3, 4, 4, 4, 5, 5, 5, 5]
    rung = "torch.export (non-strict), numbers of the arguments and what they choose"
    assert placed.traced.rung == rung
    assert len(placed.traced.ops) > 5
    placed.unplace()


class Placeholders(nn.Module):
    """Puts rows of an image in the place of some tokens, as vision-language models do."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told
        self.words, self.image, self.last = nn.Embedding(9, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x, rows = self.words(tokens), self.image(image)
        mask = (tokens == 8).unsqueeze(-1).expand_as(x).to(x.device)
        if x[mask].numel() != rows.numel():
            raise ValueError("there are other rows than places for them")
        x = x.masked_scatter(mask, rows.to(x.dtype))
        if self.told:  # the places themselves, and what is there
            x = torch.cat([x[torch.where(tokens == 8)], x[(tokens == 8).nonzero(as_tuple=True)]])
            x = x + tokens[tokens == 8].sum().item()
        found: Tensor = self.last(x.tanh())
        return found


@pytest.mark.parametrize("told", [False, True])
def test_what_a_mask_of_tokens_chooses_is_counted(told: bool) -> None:
    torch.manual_seed(0)
    model = Placeholders(told)
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=True, placer=baechi.RandomPlacer(0))
    plans = []
    for places in ([(0, 1), (1, 2)], [(0, 0), (0, 3)], [(1, 1), (1, 3)], [(0, 1)], [(1, 2)]):
        tokens, image = torch.randint(8, (2, 4)), torch.randn(len(places), 4)
        for place in places:
            tokens[place] = 8
        results = [each(tokens, image) for each in (placed, unsplit)]
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
        plans.append(len(placed._specializations))
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, unsplit))))
    assert plans == [1, 1, 1, 2, 2]
    rung = "torch.export (non-strict), numbers of the arguments and what they choose"
    assert placed.traced.rung == rung
    placed.unplace()


class Strided(nn.Module):
    """Pads as audio codecs do, by numbers in buffers, and sums a part of a length."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.conv = nn.Linear(12, 12), nn.Conv1d(4, 8, 5, stride=3)
        self.kernel = nn.Buffer(torch.tensor(5), persistent=False)
        self.stride = nn.Buffer(torch.tensor(3), persistent=False)
        self.norm = nn.BatchNorm1d(8)  # whose buffer counts

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        frames = (x.shape[-1] - self.kernel) / self.stride + 1
        missing = (frames.ceil().to(torch.int64) - 1) * self.stride + self.kernel - x.shape[-1]
        x = self.norm(self.conv(nn.functional.pad(self.before(x), (0, missing))))
        return sum(x[..., i] for i in range(int(lengths[0] / 4)))


def test_numbers_of_buffers_and_quotients_are_told() -> None:
    torch.manual_seed(0)
    model = Strided()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=True, placer=baechi.RandomPlacer(0))
    plans = []
    for length, stride in ((8, 3), (9, 3), (5, 3), (8, 3), (8, 4), (8, 3)):
        x = torch.randn(2, 4, 12)
        for each in (placed, unsplit):
            each.stride.fill_(stride)  # what forward pads by; not the convolution's own
        results = [each(x, torch.tensor([length])) for each in (placed, unsplit)]
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
        plans.append(len(placed._specializations))
    assert placed.traced.rung == "torch.export (non-strict), numbers of the arguments"
    assert plans == [1, 1, 2, 2, 3, 3]
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, unsplit))))
    assert torch.equal(model.norm.running_var, unsplit.norm.running_var)
    placed.unplace()


def test_a_quotient_that_a_gpu_may_round_otherwise_is_not_told() -> None:
    """A GPU may multiply by 1 / 7, and 21 * (1 / 7) is more than 3."""

    class Cut(nn.Module):
        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            return torch.stack([x + i for i in range(int((length / 7).ceil()))])

    assert baechi.trace(Cut(), (torch.randn(9), torch.tensor(14))).module.returned
    with pytest.raises(baechi.TraceError, match="a number is read from a tensor"):
        baechi.trace(Cut(), (torch.randn(9), torch.tensor(21)))


class Counting(nn.Module):
    """Has another number in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)[:, : int(self.calls)]
        self.calls += 1
        return x


def test_a_buffer_that_counts_is_not_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting())
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=False, placer=baechi.RandomPlacer(0))
    for _ in range(3):
        x = torch.randn(2, 4)
        with torch.no_grad():
            assert torch.equal(placed(x), unsplit(x))
    assert len(placed._specializations) == 1
    placed.unplace()


def loss_and_gradients(run: Any, model: nn.Module, example: zoo.Example) -> list[Tensor]:
    model.zero_grad()
    result = run(*example[1], **example[2])
    logits = result.logits if hasattr(result, "logits") else result[0]
    logits.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [logits.detach(), *map(torch.clone, gradients)]


@pytest.mark.parametrize("name", ["llama", "gpt2", *map(nightly, ("mixtral", "vit", "t5"))])
def test_one_device_gives_the_same_bits(name: str) -> None:
    example, traced = traced_without_padding(name)
    model = example[0]
    expected = loss_and_gradients(model, model, example)
    placed = placed_alone(traced, training=True)
    actual = loss_and_gradients(placed, model, example)
    placed.unplace()
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


class Asks(nn.Module):
    """Asks in all the ways that there are, and triples where any of them says yes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        answers = [
            torch.compiler.is_exporting(),
            torch.compiler.is_compiling(),
            torch.compiler.is_dynamo_compiling(),
            torch._dynamo.external_utils.is_compiling(),
            is_exporting(),
            is_compiling(),
        ]
        order = torch.arange(x.shape[0])
        if any(answers) or isinstance(order, torch._subclasses.FakeTensor):
            return self.linear(x) * 3
        return self.linear(x)


def test_a_model_that_asks_is_traced_as_it_runs() -> None:
    model, x = Asks(), torch.randn(2, 4)
    traced = baechi.trace(model, (x,))
    assert [attempt.reason for attempt in traced.attempts] == [""]
    torch.testing.assert_close(traced.module.graph_module(x)[0], model(x), rtol=0, atol=0)


class Nested(nn.Module):
    """What torch itself must know: a compiled function inside an export runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.compile(lambda x: x * 2, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) + (5 if torch.compiler.is_exporting() else 1)


def test_torch_itself_hears_that_there_is_an_export() -> None:
    model, x = Nested(), torch.randn(3)
    traced = baechi.trace(model, (x,))
    assert traced.rung == "torch.export (non-strict)"
    assert torch.equal(traced.module.graph_module(x)[0], x * 2 + 1)


class Careful(nn.Module):
    """Looks at values if nobody exports it; before that it asks for something else."""

    def forward(self, x: Tensor) -> Tensor:
        shift = 5 if torch.compiler.is_exporting() else 1
        if not torch.compiler.is_compiling() and x.sum() > 0:
            return x * 2
        return x + shift


def test_who_asked_last_is_told_where_the_eager_branch_cannot_be_traced() -> None:
    traced = baechi.trace(Careful(), (torch.ones(3),))
    first, last = traced.attempts
    assert "data-dependent" in first.reason
    assert last.rung == "torch.export (non-strict), export branches of Careful.forward"
    assert torch.equal(traced.module.graph_module(torch.ones(3))[0], torch.full((3,), 2.0))


class TwoCareful(nn.Module):
    """Whom to tell is not who asked last."""

    def forward(self, x: Tensor) -> Tensor:
        exported = bool(torch.compiler.is_exporting())
        shift = 5 if torch.compiler.is_compiling() else 1
        return x * 2 if not exported and x.sum() > 0 else x + shift


def test_all_are_told_at_last() -> None:
    traced = baechi.trace(TwoCareful(), (torch.ones(3),))
    assert len(traced.attempts) == 3
    assert traced.rung == "torch.export (non-strict), export branches of the model"
    assert torch.equal(traced.module.graph_module(torch.ones(3))[0], torch.full((3,), 6.0))


def looks() -> list[bool]:
    """What torch's code and the model's hear, and whether `FakeTensor` is another class."""
    scope = {"__name__": "torch.optim.other", "torch": torch}
    torchs = bool(eval("True if torch.compiler.is_compiling() else False", scope))
    fake = torch._subclasses.fake_tensor.FakeTensor
    return [torchs, bool(is_exporting()), torch._subclasses.FakeTensor is not fake]


class Relies(nn.Module):
    """Cannot be traced after an answer about a value, which none who exports would hear."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(x.shape[0])
        if isinstance(order, torch._subclasses.FakeTensor):
            return x + 5
        return x + (1 if x.sum() > 0 else 2)


def test_what_fails_after_an_answer_is_tried_without_answers() -> None:
    traced = baechi.trace(Relies(), (torch.ones(3),))
    assert traced.rung == "torch.export (non-strict), export branches of the model"
    assert torch.equal(traced.module.graph_module(torch.ones(3))[0], torch.full((3,), 6.0))


class Conditional(nn.Module):
    """Both branches are compiled inside of the export."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))


def test_a_compiler_inside_of_the_export_is_given_way() -> None:
    traced = baechi.trace(Conditional(), (torch.ones(3),))
    assert traced.rung == "torch.export (non-strict), export branches of the model"
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(traced.module.graph_module(x)[0], Conditional()(x))


class Watched(nn.Module):
    """Lets another thread look while it is traced, and looks itself."""

    def __init__(self, look: Callable[[str], None]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        other = threading.Thread(target=self.look, args=("other",))
        other.start()
        other.join()
        self.look("own")
        return x + 1


def test_other_threads_see_torch_as_it_is_and_so_does_all_after() -> None:
    seen: dict[str, list[bool]] = {}
    baechi.trace(Watched(lambda who: seen.update({who: looks()})), (torch.ones(2),))
    assert seen == {"other": [False, False, False], "own": [True, False, True]}
    assert looks() == [False, False, False]
    assert torch.compiler._is_exporting_flag is False
    assert torch.compiler._is_compiling_flag is False
    assert torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor
    assert not hasattr(torch._subclasses, "__getattr__")


def test_torch_below_2_15_cannot_trace_grouped_products_in_fp32() -> None:
    """Where torch is mended, experts in fp32 are traced as they run when eager."""
    rows, weights, ends = torch.ones(8, 16), torch.ones(2, 16, 16), torch.tensor([4, 8]).int()
    assert torch._grouped_mm(rows, weights, offs=ends).shape == (8, 16)
    meta = [tensor.to("meta") for tensor in (rows, weights, ends)]
    fails = pytest.raises(RuntimeError, match=r"BF16|BFloat16")
    with nullcontext() if torch.__version__ >= "2.15" else fails:
        torch._grouped_mm(meta[0], meta[1], offs=meta[2])


class Branching(nn.Module):
    """Asks something of its input, in a submodule, which could stay whole."""

    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.ask(x) else x + 2


def ordered(x: Tensor) -> bool:
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(2, -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())


def counted(x: Tensor) -> bool:
    return torch.full((2,), x.shape[0]).sum().item() == 2 * x.shape[0]


def listed(_: Tensor) -> bool:
    return torch.tensor([3, 4]).flip(0).tolist() == [4, 3]


def compared(_: Tensor) -> bool:
    return torch.equal(torch.ones(3, dtype=torch.int64).cumsum(0), torch.arange(1, 4))


def written(_: Tensor) -> bool:
    """The values are those after what was written, if that is returned."""
    return int(torch.zeros(2, dtype=torch.int64).add_(3)[0]) == 3


@pytest.mark.parametrize("ask", [ordered, listed, written, nightly(counted), nightly(compared)])
def test_what_depends_on_shapes_alone_is_known(ask: Callable[[Tensor], bool]) -> None:
    x = torch.randn(2, 5)
    assert ask(x)
    traced = baechi.trace(Branching(ask), (x,))
    assert traced.rung == "torch.export (non-strict)"
    assert torch.equal(traced.module.graph_module(x)[0], x + 1)


def of_the_input(x: Tensor) -> bool:
    return bool((torch.arange(x.shape[1]) + x.to(torch.int64) > 100).any())


def written_with_the_input(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    zeros[2:] = x[0, 2:].to(torch.int64)
    return bool((zeros > 100).any())


def written_through_a_view(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    part = zeros[2:]
    part.copy_(x[0, 2:])
    return bool((zeros > 100).any())


def written_as_data(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    zeros.data.copy_(x[0])
    return bool((zeros > 100).any())


def written_out(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    torch.add(x[0].to(torch.int64), 1, out=zeros)
    return bool((zeros > 100).any())


def drawn(x: Tensor) -> bool:
    return bool((torch.randint_like(torch.arange(x.shape[1]), 100) > 100).any())


def drawn_in_place(_: Tensor) -> bool:
    return bool((torch.zeros(5, dtype=torch.int64).random_(0, 100) > 100).any())


@pytest.mark.parametrize(
    "ask",
    [
        *(of_the_input, written_through_a_view, written_as_data, drawn),
        *(nightly(written_with_the_input), nightly(written_out)),
    ],
)
def test_what_depends_on_more_is_told_and_checked(ask: Callable[[Tensor], bool]) -> None:
    x = torch.ones(2, 5)  # zeros may be a mask that is added
    traced = baechi.trace(Branching(ask), (x,))
    assert traced.rung == "torch.export (non-strict), truth values of the example"
    assert "data-dependent" in traced.attempts[0].reason
    assert torch.equal(traced.module.graph_module(x)[0], x + 2)
    if ask is not drawn:
        with pytest.raises(RuntimeError, match="would now read True"):
            traced.module.graph_module(x + 1000)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: torch.equal(x, x[0]) or x.equal(torch.full_like(x, 1001)),
        lambda x: torch.allclose(x, x[0] + 1) or x.allclose(other=x[0] * 0 + 1001, rtol=1e-3),
    ],
)
def test_whether_tensors_are_equal_is_checked(ask: Callable[[Tensor], bool]) -> None:
    x = torch.ones(2, 5)
    traced = baechi.trace(Branching(ask), (x,))
    assert torch.equal(traced.module.graph_module(x)[0], x + 2)
    with pytest.raises(RuntimeError, match="would now read True"):
        traced.module.graph_module(x + 1000)


def test_what_no_tracer_can_write_down_is_refused() -> None:
    with pytest.raises(baechi.TraceError, match="data-dependent"):
        baechi.trace(Branching(drawn_in_place), (torch.zeros(2, 5),))


def test_memory_that_nobody_wrote_is_not_known() -> None:
    model = Branching(lambda _: bool((torch.empty_like(torch.arange(5)) > 100).any()))
    traced = baechi.trace(model, (torch.zeros(2, 5),))
    assert "data-dependent" in traced.attempts[0].reason


def keeping(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """Keep results, but in an export, as transformers does with positions and anchors."""
    kept = lru_cache(function)

    @wraps(function)
    def asks(length: int) -> Tensor:
        return function(length) if is_compiling() else kept(length)

    return asks


@keeping
def positions(length: int) -> Tensor:
    return torch.arange(length) / length


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.inner(x) + positions(x.shape[1])[:, None])
        return found


def test_what_a_function_keeps_of_earlier_calls_is_computed() -> None:
    unsplit = Positioned()
    module = lazily(copy.deepcopy(unsplit), placer=baechi.RandomPlacer(0))
    for length in (5, 8, 5, 9):
        x = torch.randn(2, length, 4)
        assert torch.equal(unsplit(x), module(x))  # the first leaves its positions for the second
        assert torch.equal(unsplit(x), module(x))
    assert len(module._specializations) == 1
    module.unplace()
