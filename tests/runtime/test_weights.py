"""Weights from files: a model on meta is placed first and read second; it is saved the same way."""

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from placed import made_up_profile
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils import _pytree as pytree
from transformers import GPT2LMHeadModel

import baechi
from baechi.runtime import weights as module
from baechi.runtime.weights import devices_of_state, places_of

DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


class Small(nn.Module):
    """Tied embeddings, a layer in channels-last order, and buffers of both kinds."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(8, 10, bias=False)
        self.unused = nn.Linear(3, 3)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("turns", torch.arange(8.0).sin(), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seen = self.embed(rows) + self.turns
        image = self.conv(seen.view(-1, 2, 2, 2)).flatten(1)
        return self.head(seen.relu()).sum(1) + self.norm(image).sum(1, keepdim=True)


ROWS = torch.tensor([[1], [5]])


def real() -> Small:
    torch.manual_seed(0)
    model = Small()
    with torch.no_grad():
        model.norm.running_mean.add_(3)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {name: tensor.contiguous() for name, tensor in real().state_dict().items()}
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def place(model: nn.Module, weights: Any, **options: Any) -> baechi.PlacedModule:
    return baechi.place(
        model,
        DEVICES,
        weights=weights,
        costs="estimate",
        placer="round-robin",
        threads_per_device=1,
        progress=False,
        **options,
    )


def skeleton(**options: Any) -> Small:
    return baechi.skeleton(lambda: Small(**options)).eval()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_equal_state(one: nn.Module, other: nn.Module) -> None:
    rows = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    for (name, mine), (same, own) in rows:
        assert name == same
        assert mine.dtype == own.dtype
        assert bits(mine) == bits(own), name


def test_a_skeleton_has_parameters_on_meta_tied_as_they_were_and_real_buffers() -> None:
    shared = nn.Parameter(torch.ones(2))

    def build() -> nn.Module:
        model = Small()
        model.one, model.two = nn.ParameterList([shared]), nn.ParameterList([shared])
        return model

    model = baechi.skeleton(build)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.one[0] is model.two[0] is shared
    assert torch.equal(model.turns, torch.arange(8.0).sin())
    assert not model.norm.running_mean.is_meta
    assert model.conv.weight.stride() == real().conv.weight.stride()
    assert not nn.Linear(1, 1).weight.is_meta
    with pytest.raises(baechi.InputError, match="what build returns is 3"):
        baechi.skeleton(lambda: 3)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("eager", [True, False])
def test_a_placed_skeleton_is_the_model_in_every_bit(folder: Path, eager: bool) -> None:
    model, expected = skeleton(), real()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[torch.Tensor] = []
    model.head.weight.register_post_accumulate_grad_hook(calls.append)
    placed = place(model, folder, **({"example_args": (ROWS,)} if eager else {}))
    assert all(p.is_meta for p in model.parameters()) is not eager
    result = placed(ROWS)
    assert bits(result) == bits(expected(ROWS))
    assert len(set(placed.placement.devices)) == 2
    assert_equal_state(placed, expected)  # what the call did not use, too
    assert {n: id(p) for n, p in placed.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    assert placed.conv.weight.stride() == expected.conv.weight.stride()
    result.sum().backward()
    optimizer.step()
    assert calls == [placed.embed.weight]
    expected(ROWS).sum().backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert_equal_state(placed, expected)
    again = copy.deepcopy(placed)
    assert type(again) is Small
    model = placed.unplace()
    assert bits(model(ROWS)) == bits(again(ROWS)) == bits(expected(ROWS))


def test_a_second_shape_and_mode_after_weights_were_read(folder: Path) -> None:
    placed, expected = place(skeleton(), folder), real()
    for rows in (ROWS, ROWS.repeat(2, 1)):
        assert bits(placed(rows)) == bits(expected(rows))
    assert bits(placed.train()(ROWS)) == bits(expected.train()(ROWS))
    assert_equal_state(placed, expected)  # statistics of the batch


@pytest.mark.parametrize("first", ["a step", "a part"])
def test_weights_are_read_where_the_first_plan_is_of_a_step_or_a_part(
    folder: Path, first: str
) -> None:
    expected = real()
    placed = place(skeleton(), folder, microbatches=None if first == "a part" else 2)
    if first == "a part":
        assert torch.equal(placed.embed(ROWS), expected.embed(ROWS))
    rows, total = torch.cat([ROWS, ROWS + 1]), torch.zeros(())
    loss = placed.step(rows, targets=rows, loss=lambda y, t: (y - t).square().mean())
    for part in [rows] if first == "a part" else rows.chunk(2):
        own = (expected(part) - part).square().mean() * (len(part) / 4)
        own.backward()
        total = total + own.detach()
    assert torch.equal(loss, total)
    assert torch.equal(placed.embed.weight.grad, expected.embed.weight.grad)


def test_all_that_does_not_fit_is_one_error_before_a_byte_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, Any] = baechi.stored_weights(folder)
    extra = {f"extra.{i}": rows["conv.bias"] for i in range(7)}
    rows |= {"conv.bias": rows["unused.weight"], **extra}
    del rows["unused.bias"], rows["embed.weight"]
    rows["norm.bias"] = torch.zeros(4, dtype=torch.float64)
    monkeypatch.setattr(module, "_read", None)
    model = skeleton()
    model.turns = model.turns.to("meta")
    with pytest.raises(baechi.InputError) as caught:
        place(model, rows)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the weights do not fit this Small:"
    assert set(lines[1:-1]) == {
        "  2 missing: embed.weight, unused.bias",
        "  7 unexpected: extra.0, extra.1, extra.2, extra.3, extra.4, ...",
        "  1 of another shape: conv.bias is [3, 3] and in the model [4]",
        "  1 of another dtype: norm.bias is torch.float64 and in the model torch.float32",
        "  1 on meta and never in a file: turns",
    }
    assert "stored_weights" in lines[-1]


def test_parameters_in_one_memory_that_are_no_one_object_are_refused(folder: Path) -> None:
    model = skeleton(tied=False)
    model.head.weight = nn.Parameter(model.embed.weight.data)
    with pytest.raises(baechi.InputError, match=r"memory of: head.weight and embed.weight"):
        place(model, folder)


def test_a_plain_attribute_on_meta_is_refused(folder: Path) -> None:
    model = skeleton()
    model.scale = torch.empty(2, device="meta")
    with pytest.raises(baechi.InputError, match=r"1 on meta and never in a file: scale"):
        place(model, folder)


def test_tied_parameters_with_two_values_are_refused_and_with_one_twice_are_not(
    folder: Path,
) -> None:
    rows = baechi.stored_weights(folder)
    same: dict[str, Any] = {**rows, "head.weight": rows["embed.weight"]}
    assert bits(place(skeleton(), same)(ROWS)) == bits(real()(ROWS))
    model = skeleton()
    placed = place(model, {**rows, "head.weight": torch.zeros(10, 8)})
    with pytest.raises(baechi.FormatError, match=r"'embed.weight' .* one parameter .* two values"):
        placed(ROWS)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tensors_functions_and_other_names(folder: Path) -> None:
    rows: dict[str, Any] = dict(baechi.stored_weights(folder))
    wrong = {**rows, "unused.bias": lambda: torch.zeros(4)}
    rows |= {"unused.weight": real().unused.weight, "unused.bias": lambda: real().unused.bias}
    placed = place(skeleton(), rows)
    placed(ROWS)
    assert_equal_state(placed, real())
    model = skeleton()
    with pytest.raises(baechi.InputError, match=r"weights of 'unused.bias' are \[4\]"):
        place(model, wrong)(ROWS)
    assert model.conv.weight.is_meta


def test_dtypes_are_converted_when_asked_for_through_buffers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 48)  # pieces that end inside of a tensor
    model = skeleton().bfloat16()
    with pytest.raises(
        baechi.InputError, match=r"9 of another dtype: embed.weight is .*32 .* .*16"
    ):
        place(model, folder)
    placed = place(model, folder, convert_weights=True)
    placed(ROWS)
    assert_equal_state(placed, real().bfloat16())
    with pytest.raises(baechi.InputError, match="convert_weights=True is for weights"):
        baechi.place(real(), DEVICES, convert_weights=True)


def test_a_file_that_ends_while_it_is_read_leaves_the_model_on_meta(folder: Path) -> None:
    model = skeleton()
    placed = place(model, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(baechi.FormatError, match=r"ended while it was read"):
        placed(ROWS)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(baechi.ExecutionError, match=r"on meta: call the placed model"):
        placed.save(folder)


def test_weights_of_a_model_that_has_some_are_replaced(folder: Path) -> None:
    torch.manual_seed(1)
    model = Small().eval()
    view = model.conv.weight.data
    placed = place(model, folder)
    placed(ROWS)
    assert_equal_state(placed, real())
    assert view.data_ptr() == model.conv.weight.data_ptr()


def test_what_is_not_allowed_beside_weights(folder: Path) -> None:
    with pytest.raises(baechi.InputError, match="weights is 3, a int"):
        place(skeleton(), 3)

    class Counting(Small):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            pass

    model = baechi.skeleton(Counting)
    with pytest.raises(baechi.InputError, match=r"'_extra_state' in the model's state_dict"):
        place(model, folder)


def test_what_no_op_reads_goes_where_there_is_room() -> None:
    model = skeleton()
    traced = baechi.trace(model, (ROWS,))
    graph = traced.graph(made_up_profile(traced), training=False)
    cluster = baechi.Cluster.uniform(2, 10**6, baechi.Link(1, 10**9))
    placement = baechi.solve(graph, cluster, placer="single")
    homes = devices_of_state(traced.module, placement.devices)
    places = torch.device("cuda", 0), torch.device("cuda", 1)
    cpu = torch.device("cpu")
    found = []
    for left in (30, 10, 80):
        place_of = places_of(homes, [(left, places[0]), (40, places[1])])
        found.append([place_of(model.conv.bias)])
        found[-1] += [place_of(model.unused.weight), place_of(model.unused.bias)]  # 36 and 12 bytes
    one, two = places
    assert found == [[one, two, one], [one, two, cpu], [one] * 3]


def test_saved_files_are_those_of_transformers(tmp_path: Path) -> None:
    model, _, kwargs = zoo.MODELS["gpt2"]()
    model.eval()
    config = model.config
    blank = baechi.skeleton(lambda: GPT2LMHeadModel(config)).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    placed = place(blank, tmp_path / "theirs", training=False)
    assert bits(placed(**kwargs).logits) == bits(model(**kwargs).logits)
    for limit in ("20KB", "5GB"):
        placed.save(tmp_path / "ours", max_shard=limit)
        config.save_pretrained(tmp_path / "ours")
        again = GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
        assert_equal_state(again, model)
        files = sorted(path.name for path in (tmp_path / "ours").iterdir())
        if limit == "5GB":
            assert files == ["config.json", "model.safetensors"]
            assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
        else:
            index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
            assert set(index["weight_map"].values()) == {n for n in files if n[-5:] == "nsors"}
            assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())


def test_a_save_that_fails_leaves_the_folder_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = place(skeleton(), folder)
    placed(ROWS)
    before = (folder / "model.safetensors").read_bytes()

    def half(_tensor: torch.Tensor) -> Iterator[memoryview]:
        raise OSError("disk full")
        yield memoryview(b"")

    monkeypatch.setattr(module, "_pieces", half)
    with pytest.raises(OSError, match="disk full"):
        placed.save(folder, max_shard=100)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == before


def conv() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Small(), (ROWS,), {}


@pytest.mark.parametrize(
    "make",
    [zoo.llama, pytest.param(zoo.gpt2, marks=pytest.mark.slow), conv],
    ids=["llama", "gpt2", "conv"],
)
def test_traces_on_meta_of_a_skeleton_and_of_the_model_are_one(make: Any) -> None:
    model, args, kwargs = make()
    whole = baechi.trace(model, args, kwargs)
    kind = type(model)
    build = (lambda: kind(model.config)) if hasattr(model, "config") else kind
    with torch.device("meta"):
        blank = build().train(model.training)
    bare = baechi.trace(blank, args, kwargs)
    if make is not conv:
        assert whole.digest == bare.digest
        return
    half = baechi.skeleton(build).train(model.training)
    on_meta = functools.cache(lambda tensor: tensor.to("meta"))  # one of one
    nowhere = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    assert whole.digest == bare.digest == baechi.trace(half, *nowhere).digest
    graphs = [traced.graph(baechi.estimate(traced, "cpu")) for traced in (whole, bare)]
    assert graphs[0] == graphs[1]
