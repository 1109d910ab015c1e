"""What failed on a first day with placed models, a test for each."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from placed import cpus, lazily, made_up_profile
from scripts import Place, equal_in_every_bit, tiny_gpt2, tiny_llama
from torch import nn

import baechi

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
IDS = torch.arange(3, 13).reshape(2, 5)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def test_1_moves_that_change_nothing() -> None:
    placed = lazily(layers())
    assert placed.to("cpu") is placed
    assert placed.to(torch.float32).cpu().float() is placed
    nn.Sequential(placed).to("cpu")
    placed(torch.ones(2, 4))
    assert placed.to("cpu")(torch.ones(2, 4)).shape == (2, 4)


def test_1_a_cast_plans_again() -> None:
    def script(place: Place) -> Any:
        model = place(layers(), training=False)
        with torch.no_grad():
            return model(torch.ones(2, 4)), model.double()(torch.ones(2, 4).double())

    equal_in_every_bit(script)


def test_2_the_signature_is_the_models() -> None:
    from transformers.utils import find_labels

    model = tiny_gpt2()
    known = inspect.signature(model.forward)
    placed = lazily(model)
    assert inspect.signature(placed.forward) == known
    assert find_labels(type(placed)) == ["labels"]


def test_3_a_tied_model_is_saved_by_its_own_method(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel, PreTrainedModel

    placed = lazily(tiny_gpt2())
    assert isinstance(placed, PreTrainedModel)
    placed.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert again.config.architectures == ["GPT2LMHeadModel"]
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.parametrize("way", ["enable_input_require_grads", "gradient_checkpointing_enable"])
def test_4_checkpointing_of_transformers(way: str) -> None:
    def script(place: Place) -> Any:
        model = place(tiny_llama(), optimizer="adamw").train()
        getattr(model, way)()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        return loss.detach(), [one.grad for one in model.parameters()]

    equal_in_every_bit(script)


def test_5_more_sizes_than_a_few() -> None:
    def script(place: Place) -> Any:
        model = place(layers())
        return [model(torch.ones(n, 4)).detach() for n in range(1, 13)]

    equal_in_every_bit(script)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.net(x) * step


def test_6_a_number_is_a_symbol() -> None:
    def script(place: Place) -> Any:
        model = place(Steps(), max_shapes=2)
        return [model(torch.ones(2, 4), step).detach() for step in (540, 450, 360, 270)]

    equal_in_every_bit(script)


def test_6_a_wrong_shape_is_the_models_own_error() -> None:
    placed = lazily(layers())
    with pytest.raises(
        baechi.TraceError, match="mat1 and mat2 shapes cannot be multiplied"
    ) as told:
        placed(torch.ones(2, 5))
    assert isinstance(told.value.__cause__, RuntimeError)


def test_7_no_submodule_runs_unsplit_unsaid() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = layers(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x))

    placed = lazily(Two(), training=False)
    placed.encoder(torch.ones(2, 4))
    assert set(placed.placement.devices) == {0, 1}


def test_8_a_model_that_stays_whole_is_told() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            return y * 2 if float(y.detach().sum()) > 1e9 else y

    placed = lazily(nn.Sequential(Asking()))
    with pytest.warns(UserWarning, match="float"):
        placed(torch.ones(2, 4))


def test_9_one_plan_on_meta_and_with_weights() -> None:
    with torch.device("meta"):
        empty = tiny_llama()
    one = baechi.trace(tiny_llama(), (IDS,))
    two = baechi.trace(empty, (IDS.to("meta"),))
    assert one.digest == two.digest


def test_10_copies_are_of_the_unsplit_model(tmp_path: Path) -> None:
    placed = lazily(layers())
    placed(torch.ones(2, 4))
    average = torch.optim.swa_utils.AveragedModel(placed)
    average.update_parameters(placed)
    torch.save(placed, tmp_path / "model.pt")
    for copied in (
        average.module,
        copy.deepcopy(placed),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert type(copied) is nn.Sequential
        assert torch.equal(copied(torch.ones(2, 4)), placed(torch.ones(2, 4)))


def test_11_what_is_not_there_yet_is_no_attribute() -> None:
    placed = lazily(layers())
    assert not hasattr(placed, "schedule")
    assert dict(inspect.getmembers(placed))["training"]


def test_12_hooks_observe() -> None:
    def script(place: Place) -> Any:
        model = place(layers(), training=False)
        seen: list[torch.Tensor] = []
        model[0].register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
        with torch.no_grad():
            model(torch.ones(2, 4))
            model(torch.zeros(2, 4))
        return seen

    equal_in_every_bit(script)


def test_13_the_configuration_is_read_at_each_call() -> None:
    def script(place: Place) -> Any:
        model = place(tiny_llama().eval(), training=False)
        with torch.no_grad():
            model(IDS)
            model.config.output_hidden_states = True
            states = model(IDS).hidden_states
            model.set_attn_implementation("eager")
            return states, model(IDS).logits

    equal_in_every_bit(script)


@pytest.mark.parametrize("tracer", [torch.export.export, torch.jit.trace])
def test_14_other_tracers_are_refused_at_once(tracer: Any) -> None:
    placed = lazily(layers())
    placed(torch.ones(2, 4))
    with pytest.raises(baechi.ExecutionError, match="unplace"):
        tracer(placed, (torch.ones(2, 4),))


def test_15_costs_of_another_kind_of_device_are_told() -> None:
    traced = baechi.trace(layers(), (torch.ones(2, 4),))
    graph = traced.graph(baechi.profile(traced, device="cpu", threads=1))
    rows = [baechi.Device(f"cuda:{i}", "8GiB", kind="H100-SXM-80GB") for i in range(2)]
    cluster = baechi.Cluster.connected(rows, baechi.Link(1_000, 10**10))
    with pytest.warns(UserWarning, match="cpu"):
        baechi.solve(graph, cluster)


def test_16_outputs_stay_where_they_are_made_and_bytes_that_move_are_predicted() -> None:
    model = tiny_gpt2().eval()
    traced = baechi.trace(model, (IDS,))
    graph = traced.graph(made_up_profile(traced), training=False)
    cut = next(i for i, op in enumerate(graph.ops) if op.name.startswith("transformer.h.0.ln_2"))
    halves = tuple(int(i >= cut and op.group is None) for i, op in enumerate(graph.ops))
    placement = baechi.Placement(graph.digest, halves, tuple(range(len(halves))))
    placed = baechi.apply(traced, placement, graph=graph, cluster=cpus(2), threads_per_device=1)
    with torch.no_grad():
        cached = placed(IDS).past_key_values.layers
    assert len(cached) == 1
    sizes = [tensor.nbytes for tensor in placed.graph.tensors]
    moved = placed.measure(2).moved_bytes
    assert moved == sum(sizes[one.tensor] for one in placed.schedule.transfers)
    hidden = 4 * IDS.numel() * model.config.n_embd
    # What the second half of the block reads, and the head, which is where the embedding is; but
    # no keys or values.
    assert moved == 2 * hidden
