"""What training loops do with a model, done with a placed one: equal in every bit."""

import copy
import io
from collections.abc import Callable
from typing import Any

import placed
import pytest
import torch
import zoo
from seeds import covering
from torch import nn

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")


Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "momentum foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "momentum fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, example: Any, n_steps: int = 10
) -> None:
    """Steps, each with a batch of its own where the arguments are of floats."""
    args, kwargs = example
    torch.manual_seed(3)
    for _ in range(n_steps):
        rows = [x + 0.1 * torch.randn_like(x) if x.is_floating_point() else x for x in args]
        optimizer.zero_grad()
        outputs = model(*rows, **kwargs)
        loss = getattr(outputs, "loss", None)
        if loss is None:
            loss = outputs.float().square().mean()
        loss.backward()
        optimizer.step()


def equal_state(one: nn.Module, other: nn.Module) -> None:
    mine = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("gpt2", "adamw"), ("resnet_train", "momentum foreach")),
        *(
            pytest.param("resnet_train", optimizer, marks=pytest.mark.slow)
            for optimizer in OPTIMIZERS
        ),
        pytest.param("gpt2", "momentum", marks=pytest.mark.slow),
    ],
)
def test_ten_steps_then_saved_loaded_into_the_unsplit_model_and_gone_on(
    name: str, optimizer: str
) -> None:
    """Parameters, running statistics and optimizer state are the unsplit run's all the way."""
    make, optimize = zoo.MODELS[name], OPTIMIZERS[optimizer]
    model, *example = make()
    module = placed.at_random(copy.deepcopy(model), *example, seed=2)
    one, two = optimize(model.parameters()), optimize(module.parameters())
    train(model, one, example)
    train(module, two, example)
    equal_state(model, module)
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": two.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    fresh, *_ = make()
    fresh.load_state_dict(saved["model"])
    three = optimize(fresh.parameters())
    three.load_state_dict(saved["optimizer"])
    train(fresh, three, example, 3)
    train(model, one, example, 3)
    train(module, two, example, 3)
    equal_state(model, fresh)
    equal_state(model, module)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    module.unplace()


def test_gradients_accumulate_over_two_calls_whether_or_not_they_were_set_to_none() -> None:
    model, args, kwargs = zoo.gpt2()
    module = placed.at_random(copy.deepcopy(model), args, kwargs)
    for set_to_none in (True, False):
        for one in (model, module):
            one.zero_grad(set_to_none=set_to_none)
            held = [parameter.grad for parameter in one.parameters()]
            for _ in range(3):
                (one(*args, **kwargs).loss / 3).backward()
            if not set_to_none:  # it is added to what is there
                now = [parameter.grad for parameter in one.parameters()]
                assert all(a is b for a, b in zip(held, now, strict=True))
        for one, two in zip(model.parameters(), module.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
    module.unplace()


def test_forwards_before_backwards_in_either_order() -> None:
    model, (x,), _ = zoo.towers()
    module = placed.at_random(copy.deepcopy(model), (x,))
    for reverse in (False, True):
        for one in (model, module):
            one.zero_grad()
            losses = [one(x * (1 + i)).square().mean() for i in range(3)]
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
        for one, two in zip(model.parameters(), module.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
    module.unplace()


class Outputs(nn.Module):
    """Three outputs: two with gradients that share a trunk, and one that never needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 5)
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.trunk(x).tanh()
        return {"one": self.one(y), "two": self.two(y), "best": y.argmax(-1), "raw": y.detach()}


LOSSES: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "both": lambda out: (out["one"] * out["two"]).sum(),
    "part": lambda out: out["one"].square().sum(),
    "twice": lambda out: out["one"].square().sum() + (out["one"] * 3).exp().sum(),
    "slice": lambda out: out["two"][0, 1:3].square().sum(),
    "with what needs none": lambda out: (out["two"] * out["raw"]).sum() + out["best"].sum(),
}


@pytest.mark.parametrize(("loss", "seed"), covering(list(LOSSES), range(3)))
def test_losses_on_part_of_the_outputs_and_on_one_of_them_twice(loss: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Outputs(), torch.randn(4, 5, requires_grad=True)
    module = placed.at_random(copy.deepcopy(model), (x,), seed=seed)
    found = []
    for one in (model, module):
        leaf = x.detach().clone().requires_grad_()
        outputs = one(leaf)
        assert [outputs[key].requires_grad for key in outputs] == [True, True, False, False]
        LOSSES[loss](outputs).backward()
        found.append([leaf.grad, *(parameter.grad for parameter in one.parameters())])
    assert all(map(placed.same, *found))
    module.unplace()


def test_retain_graph_and_gradients_asked_for_by_autograd_grad() -> None:
    torch.manual_seed(0)
    model, x = Outputs(), torch.randn(4, 5, requires_grad=True)
    module = placed.at_random(copy.deepcopy(model), (x,))
    found = []
    for one in (model, module):
        outputs, wanted = one(x), [x, one.trunk.weight, one.two.bias]
        first = torch.autograd.grad(outputs["one"].sum(), wanted[:2], retain_graph=True)
        second = torch.autograd.grad(LOSSES["both"](outputs), wanted, retain_graph=True)
        third = torch.autograd.grad(outputs["two"].sum(), wanted)
        found.append([*first, *second, *third])
        assert all(parameter.grad is None for parameter in one.parameters())
    assert all(map(placed.same, *found))
    module.unplace()


def test_a_batch_of_gradients_goes_backward_at_once() -> None:
    torch.manual_seed(0)
    model, x = Outputs(), torch.randn(4, 5, requires_grad=True)
    module = placed.at_random(copy.deepcopy(model), (x,))
    found = []
    for one in (model, module):
        output = one(x)["one"]
        rows = torch.eye(output.numel()).view(-1, *output.shape)
        wanted = [x, one.trunk.weight]
        found.append(torch.autograd.grad(output, wanted, rows, is_grads_batched=True))
    assert all(map(placed.same, *found))
    module.unplace()


def test_frozen_layers_and_inputs_with_gradients() -> None:
    torch.manual_seed(0)
    model, x = Outputs(), torch.randn(4, 5, requires_grad=True)
    model.trunk.requires_grad_(False)
    model.two.bias.requires_grad_(False)
    module = placed.at_random(copy.deepcopy(model), (x,))
    left = [placed.step(one, (x,), {}) for one in (model, module)]
    assert not left[0].differs_from(left[1])
    assert left[1].gradients["trunk.weight"] is None
    assert left[1].gradients["two.bias"] is None
    module.unplace()


@pytest.mark.parametrize(
    "mode", [pytest.param(torch.no_grad, marks=pytest.mark.slow), torch.inference_mode]
)
def test_the_first_call_may_be_in_any_mode_and_training_goes_on_after_it(mode: Any) -> None:
    """What is traced in `no_grad` or `inference_mode` can still be trained."""
    model, (x,), _ = zoo.resnet_train()
    reference = copy.deepcopy(model)
    module = baechi.place(
        model,
        {"cpu:0": "1GiB", "cpu:1": "1GiB"},
        placer="round-robin",
        costs="estimate",
        progress=False,
        threads_per_device=1,
        verify=True,
    )
    with mode():
        expected, actual = reference(x), module(x)
    assert torch.equal(expected, actual)
    assert actual.is_inference() == expected.is_inference()
    assert actual.requires_grad == expected.requires_grad
    optimizers = [OPTIMIZERS["momentum"](one.parameters()) for one in (reference, module)]
    train(reference, optimizers[0], ((x,), {}), 2)
    train(module, optimizers[1], ((x,), {}), 2)
    equal_state(reference, module)
    module.unplace()


def test_what_hooks_after_parameters_and_on_outputs_see_is_the_same() -> None:
    torch.manual_seed(0)
    model, x = Outputs(), torch.randn(4, 5)
    module = placed.at_random(copy.deepcopy(model), (x,))
    seen: list[list[torch.Tensor]] = []
    for one in (model, module):
        row: list[torch.Tensor] = []
        handle = one.trunk.weight.register_post_accumulate_grad_hook(
            lambda p, r=row: r.append(p.grad)
        )
        outputs = one(x)
        outputs["one"].register_hook(row.append)
        LOSSES["both"](outputs).backward()
        handle.remove()
        seen.append(row)
    assert len(seen[0]) == 2
    assert all(map(placed.same, *seen))
    module.unplace()


def test_dropout_masks_are_the_unsplit_models_on_one_device_under_every_placer() -> None:
    class Drops(nn.Module):
        """Two branches that draw, so that another order would draw other masks."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = self.drop(self.layers[0](x)), self.drop(self.layers[1](x))
            one, two = self.drop(self.layers[2](two)), self.drop(self.layers[3](one))
            return one + two

    model, x = Drops(), torch.randn(4, 8)
    traced = baechi.trace(model, (x,))
    torch.manual_seed(5)
    expected = model(x)
    for placer in ("single", "m-topo", "m-etf", "m-sct", "heft", "auto"):
        module = placed.place_on(traced, 1, placer)
        torch.manual_seed(5)
        assert torch.equal(module(x), expected), placer
    for seed in range(3):  # on several it is reproducible, and does not depend on who is first
        module = placed.again_at_random(traced, seed=seed, devices=3)
        results = set()
        for _ in range(5):
            torch.manual_seed(5)
            results.add(tuple(module(x).flatten().tolist()))
        assert len(results) == 1
        module.unplace()


class Attending(nn.Module):
    """torch's own layers, which are kernels without a derivative in evaluation."""

    def __init__(self, *, nested: bool, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("evaluated_first", [False, True])
def test_fused_layers_are_measured_and_evaluated_between_steps(evaluated_first: bool) -> None:
    model, x = Attending(nested=False), torch.randn(2, 5, 16)
    unsplit = copy.deepcopy(model)
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    placed = baechi.place(model, devices, placer="random", progress=False)
    for train in (not evaluated_first, evaluated_first, not evaluated_first):
        results = []
        for each in (placed, unsplit):
            each.train(train)
            with torch.set_grad_enabled(train):
                result = each(x)
            if train:
                result.sum().backward()
                result = torch.cat([p.grad.flatten() for p in each.parameters()])
            results.append(result)
        assert torch.equal(*results)
        assert len(set(placed.placement.devices)) == 2
        assert placed.measure(1).step_ns
    placed.unplace()


@pytest.mark.parametrize("batches", [2, "auto"])
def test_micro_batches_of_fused_layers_are_evaluated_between_steps(batches: int | str) -> None:
    model, x = Attending(nested=False, layers=1), torch.randn(4, 5, 16)
    unsplit = copy.deepcopy(model).eval()
    options: dict[str, Any] = {"costs": "estimate", "progress": False, "microbatches": batches}
    placed = baechi.place(model, {"cpu:0": "1GiB", "cpu:1": "1GiB"}, placer="random", **options)
    placed.eval()
    with torch.no_grad():
        y = placed(x)
        n = placed.placement.microbatches
        assert torch.equal(y, torch.cat([unsplit(chunk) for chunk in x.chunk(n)]))
        assert "other operators" not in str(placed.report())
    placed.train()
    placed.step(x, targets=x, loss=nn.functional.mse_loss)
    placed.unplace()


def test_an_operator_whose_parameters_were_put_apart_says_why_it_is_one() -> None:
    model, x = Attending(nested=True), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    placed = baechi.place(model, devices, placer="round-robin", costs="estimate", progress=False)
    placed(x, padding).sum().backward()
    placed.eval()
    match = "parameters that earlier calls put on several.*enable_nested_tensor=False"
    with (
        pytest.warns(UserWarning, match="stays on one device"),
        pytest.raises(baechi.InputError, match=match),
        torch.no_grad(),
    ):
        placed(x, padding)
    placed.unplace()
