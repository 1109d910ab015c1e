"""A placed model equals the unsplit one in outputs, gradients, buffers and state.

Whatever the placement: a random one puts every op (or group) on a random device, so it finds a
transfer that is missing. One thread everywhere, so that both models run the same kernels in the
same order.
"""

import copy
from typing import Any

import pytest
import torch
import zoo
from placed import EXACT, assert_same_values, cpus, made_up_profile
from seeds import some
from steps import (
    ALL,
    Case,
    apply,
    assert_same_step,
    case,
    infer,
    loss_of,
    named,
    tensors_of,
    train,
)

import baechi

PLACERS = {
    "auto": baechi.Auto(),
    "round-robin": baechi.RoundRobin(),
    "random-0": baechi.RandomPlacer(0),
    "random-1": baechi.RandomPlacer(1),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def cases(first: int) -> list[Any]:
    """Models with numbers of devices and placers: by default one of twelve pairs for each model.

    The pairs go round over the models, so that each meets two or three of them. A nightly run has
    all twelve.
    """
    rows = []
    for index, name in enumerate(ALL):
        for pair in range(12):
            marks = (
                ()
                if (pair - index - first) % 12 == 0 and name != "inception"
                else (pytest.mark.slow,)
            )
            row = (name, (2, 3, 4)[pair % 3], list(PLACERS)[pair % 4])
            rows.append(pytest.param(*row, marks=marks, id="-".join(map(str, row))))
    return rows


@pytest.mark.parametrize(("name", "n_devices", "placer"), cases(0))
def test_one_training_step_equals_the_unsplit_model_s(
    name: str, n_devices: int, placer: str
) -> None:
    it = case(name)
    it.reset()
    placed = apply(it.traced, it.training, n_devices, PLACERS[placer])
    try:
        assert_same_step(train(placed, it.example()), it.trained, **EXACT)
    finally:
        placed.unplace()


@pytest.mark.parametrize(("name", "n_devices", "placer"), cases(5))
def test_inference_equals_the_unsplit_model_s_in_every_bit(
    name: str, n_devices: int, placer: str
) -> None:
    it = case(name)
    it.reset()
    placed = apply(it.traced, it.inference, n_devices, PLACERS[placer])
    try:
        actual = infer(placed, it.example())
    finally:
        placed.unplace()
    assert_same_values(actual.outputs, it.inferred.outputs, **EXACT)
    assert_same_values(actual.arguments, it.inferred.arguments, **EXACT)
    for key, tensor in it.inferred.state.items():
        assert torch.equal(actual.state[key], tensor), key


@pytest.mark.parametrize("name", some(zoo.MODELS, 2))
def test_a_random_placement_uses_every_device(name: str) -> None:
    it = case(name)
    placement = baechi.solve(it.training, cpus(3), placer=baechi.RandomPlacer(0))
    assert set(placement.devices) == {0, 1, 2}


@pytest.mark.parametrize("name", some(ALL, 3, 1))
def test_state_dict_has_the_model_s_keys_and_goes_there_and_back(name: str) -> None:
    it = case(name)
    it.reset()
    fresh = copy.deepcopy(it.model)
    changed = {key: torch.rand_like(t) if t.is_floating_point() else t + 1
               for key, t in copy.deepcopy(it.model.state_dict()).items()}  # fmt: skip
    placed = apply(it.traced, it.training, 3, baechi.RandomPlacer(0))
    assert list(placed.state_dict()) == list(fresh.state_dict())
    assert [n for n, _ in placed.named_parameters()] == [n for n, _ in fresh.named_parameters()]
    placed.load_state_dict(changed)
    fresh.load_state_dict(placed.state_dict())
    back = placed.unplace()
    for key, tensor in fresh.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], tensor, **EXACT)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("t5", "lm_head.weight", "shared.weight"),
        ("lstm_lm", "head.weight", "embedding.weight"),
        ("tied", "head.weight", "embedding.weight"),
        ("tied", "again.weight", "inner.weight"),
        ("awkward", "head.weight", "embedding.weight"),
    ],
)
def test_tied_weights_stay_one_storage(name: str, one: str, other: str) -> None:
    it = case(name)
    it.reset()
    placed = apply(it.traced, it.training, 2, baechi.RandomPlacer(1))
    train(placed, it.example())
    state = placed.state_dict()
    assert state[one].data_ptr() == state[other].data_ptr()
    state = placed.unplace().state_dict()
    assert state[one].data_ptr() == state[other].data_ptr()


@pytest.mark.parametrize("name", ["gpt2", "resnet_train", "awkward"])
def test_unplace_gives_the_model_back_as_it_was(name: str) -> None:
    it = case(name)
    it.reset()
    before = tensors_of(it.model)
    placed = apply(it.traced, it.training, 2, baechi.RandomPlacer(0))
    train(placed, it.example())
    assert placed.unplace() is it.model
    assert {key: id(tensor) for key, tensor in tensors_of(it.model).items()} == {
        key: id(tensor) for key, tensor in before.items()
    }
    it.reset()
    assert_same_step(train(it.model, it.example()), it.trained)


# The awkward points of tracing, each by its name.


def placed_awkward(name: str, seed: int = 0) -> tuple[Case, baechi.PlacedModule]:
    it = case(name)
    it.reset()
    return it, apply(it.traced, it.training, 3, baechi.RandomPlacer(seed))


def test_keyword_arguments_may_come_in_any_form() -> None:
    it, placed = placed_awkward("keyword_arguments")
    (x,), kwargs = it.example()
    expected = copy.deepcopy(it.model)(x, **kwargs)
    torch.testing.assert_close(placed(x=x, **kwargs), expected)
    torch.testing.assert_close(placed(x, extra=kwargs["extra"], bias=kwargs["bias"]), expected)


def test_a_dataclass_comes_back_as_its_own_type() -> None:
    it, placed = placed_awkward("nested_outputs")
    bundle = placed(*it.args)
    assert type(bundle) is zoo.Bundle
    assert type(bundle.answer) is zoo.Answer
    assert bundle.missing is None
    assert bundle.label == "bundle"


def test_a_model_output_comes_back_as_its_own_type() -> None:
    it, placed = placed_awkward("gpt2")
    outputs = placed(**it.kwargs)
    assert type(outputs) is type(it.trained.outputs)
    assert outputs.keys() == it.trained.outputs.keys()
    torch.testing.assert_close(outputs["logits"], outputs.logits)


def test_an_input_that_is_an_output_is_the_caller_s_own() -> None:
    it, placed = placed_awkward("inputs_as_outputs")
    x, y = it.args
    first, transposed, out, same, seven = placed(x, y)
    assert first is x
    assert transposed.data_ptr() == y.data_ptr()
    assert out.data_ptr() == same.data_ptr()
    assert seven == 7


def test_integer_and_boolean_tensors_keep_their_types() -> None:
    it, placed = placed_awkward("integers_and_booleans")
    assert [t.dtype for t in placed(*it.args)] == [
        t.dtype for t in copy.deepcopy(it.model)(*it.args)
    ]


def test_gradients_reach_inputs() -> None:
    model, (x,), _ = zoo.constants()
    traced = baechi.trace(model, (x.clone().requires_grad_(),))
    graph = traced.graph(made_up_profile(traced))
    gradients = []
    for one in (copy.deepcopy(model), apply(traced, graph, 3, baechi.RandomPlacer(0))):
        leaf = x.clone().requires_grad_()
        one(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_a_call_that_differs_from_the_traced_one_is_refused() -> None:
    it, placed = placed_awkward("towers")
    with pytest.raises(baechi.InputError, match=r"7, 16.*shape"):
        placed(torch.randn(7, 16))
    with pytest.raises(baechi.InputError, match="eval"):
        placed.eval()(*it.args)


def test_a_parameter_used_twice_gets_both_gradients() -> None:
    for seed in range(5):
        it, placed = placed_awkward("parameter_twice", seed)
        assert_same_step(train(placed, it.example()), it.trained)
        placed.unplace()


def test_buffers_that_forward_updates_count_every_call() -> None:
    it, placed = placed_awkward("buffers")
    reference = copy.deepcopy(it.model)
    for _ in range(3):
        placed(*it.example()[0])
        reference(*it.example()[0])
    assert int(dict(placed.named_buffers())["calls"]) == 3
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(placed.named_buffers())[name], buffer, msg=named(name))
    assert "mask" not in placed.state_dict()
    assert "last" not in placed.state_dict()


def test_an_in_place_write_is_seen_by_those_after_it_and_by_no_one_before() -> None:
    for seed in range(5):
        it, placed = placed_awkward("in_place", seed)
        assert_same_step(train(placed, it.example()), it.trained)
        placed.unplace()


def test_the_caller_sees_a_write_into_an_argument() -> None:
    it, placed = placed_awkward("input_written")
    (x, memory), _ = it.example()
    placed(x, memory)
    torch.testing.assert_close(memory, it.trained.arguments[0][1])


def test_a_detached_branch_gets_no_gradient() -> None:
    it, placed = placed_awkward("detached")
    gradients = train(placed, it.example()).gradients
    assert gradients["frozen.weight"] is None
    assert gradients["unused.weight"] is None
    assert gradients["first.weight"] is not None


EXPORT = "torch.export (non-strict)"
MENDED = torch.__version__ >= "2.15"  # grouped products of fp32 can be traced
GROUPED = EXPORT if MENDED else f"{EXPORT}, export branches of _can_use_grouped_mm"


@pytest.mark.parametrize(
    ("name", "rung"),
    [
        ("gpt2", EXPORT),
        ("mixtral", GROUPED),
        ("masked_transformer", EXPORT),
        ("data_dependent", f"{EXPORT}, opaque submodules"),
    ],
)
def test_the_rung_that_was_taken_is_told(name: str, rung: str) -> None:
    traced = case(name).traced
    assert traced.rung == rung
    assert all(attempt.reason for attempt in traced.attempts[:-1])


def test_other_values_take_the_other_branch_of_an_opaque_leaf() -> None:
    it, placed = placed_awkward("data_dependent")
    reference = copy.deepcopy(it.model)
    for _ in range(4):
        x = 3 * torch.randn_like(it.args[0])
        torch.testing.assert_close(placed(x), reference(x))


def test_other_tokens_take_other_experts() -> None:
    it, placed = placed_awkward("mixtral")
    for _ in range(3):
        tokens = torch.randint(3, zoo.VOCABULARY, it.args[0].shape)
        expected = copy.deepcopy(it.model)(tokens).logits
        torch.testing.assert_close(placed(tokens).logits, expected)


# What a training loop does besides.


def test_gradients_accumulate_and_are_clipped_as_on_the_unsplit_model() -> None:
    it, placed = placed_awkward("gpt2")
    norms = []
    for model in (placed, copy.deepcopy(it.model)):
        for _ in range(2):
            model(**it.kwargs).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(*norms)


def test_five_steps_of_adam_follow_the_unsplit_model() -> None:
    it, placed = placed_awkward("resnet_train")
    losses = []
    for model in (placed, copy.deepcopy(it.model)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        row = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model(*it.args))
            loss.backward()
            optimizer.step()
            row.append(loss.detach())
        losses.append(torch.stack(row))
    torch.testing.assert_close(*losses)


def test_a_loss_on_some_outputs_leaves_the_others_without_gradient() -> None:
    it, placed = placed_awkward("nested_outputs")
    reference = copy.deepcopy(it.model)
    for model in (placed, reference):
        model(*it.args).hidden.sum().backward()
    assert dict(placed.named_parameters())["second.weight"].grad is None
    torch.testing.assert_close(
        dict(placed.named_parameters())["first.weight"].grad, reference.first.weight.grad
    )


def test_forwards_may_overlap_before_their_backwards() -> None:
    it, placed = placed_awkward("towers")
    reference = copy.deepcopy(it.model)
    x, y = torch.randn_like(it.args[0]), torch.randn_like(it.args[0])
    for model in (placed, reference):
        first, second = model(x), model(y)
        first.square().sum().backward()
        second.square().sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(dict(placed.named_parameters())[name].grad, parameter.grad)


def test_a_checkpoint_file_goes_there_and_back(tmp_path: Any) -> None:
    it, placed = placed_awkward("gpt2")
    torch.save(placed.state_dict(), tmp_path / "model.pt")
    fresh, _, _ = zoo.gpt2()
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(fresh(**it.kwargs).logits, placed(**it.kwargs).logits)


# The one call, with real costs and real links.


@pytest.mark.parametrize(
    "name", ["towers", pytest.param("gpt2", marks=pytest.mark.slow), "buffers"]
)
def test_place_measures_solves_and_equals_the_unsplit_model(name: str) -> None:
    model, args, kwargs = ALL[name]()
    expected = train(copy.deepcopy(model), (args, kwargs))
    devices = {"cpu:0": "8GiB", "cpu:1": "8GiB"}
    placed = baechi.place(model, devices, example_args=args, example_kwargs=kwargs, verify=True)
    assert_same_step(train(placed, (args, kwargs)), expected)
    assert placed.placement.devices
    assert placed.schedule.makespan_ns > 0


def test_the_lazy_form_specialises_on_the_first_call_and_on_other_shapes() -> None:
    model, (x,), _ = zoo.towers()
    reference = copy.deepcopy(model)
    placed = baechi.place(model, ["cpu:0", "cpu:1"], costs="estimate")
    torch.testing.assert_close(placed(x), reference(x))
    wider = torch.randn(7, 16)
    torch.testing.assert_close(placed(wider), reference(wider))
    torch.testing.assert_close(placed(x), reference(x))


def test_the_steps_give_what_the_one_call_gives() -> None:
    model, args, kwargs = zoo.towers()
    expected = train(copy.deepcopy(model), (args, kwargs))
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.profile(traced, device="cpu", threads=1, progress=False)
    graph = traced.graph(profile, training=True, optimizer="adamw")
    cluster = baechi.probe({"cpu:0": "1GiB", "cpu:1": "1GiB"})
    placement = baechi.solve(graph, cluster, placer="auto")
    placed = baechi.apply(traced, placement, devices=["cpu:0", "cpu:1"])
    assert_same_step(train(placed, (args, kwargs)), expected)
