"""One architecture, placed at random and set beside the unsplit model: `... .check NAME [FORM...]`.

Outputs, gradients of parameters and arguments, buffers and arguments are compared bit by bit, of a
training step in training mode and of an inference in evaluation mode, at one thread everywhere.
With `--sizes`, batches of other sizes follow, which the first plan does not take; with `--generate`
a placed model in evaluation mode answers a prompt.
"""

import copy
import inspect
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from benchmarks.architectures.catalog import example
from benchmarks.architectures.forms import autocast, formed, seeds
from benchmarks.architectures.plain import PLAIN
from torch import nn
from torch.utils._pytree import tree_map

import baechi
from baechi.torch_support.torch_devices import torch_threads
from baechi.tracing.pytrees import Parts, tensors_in

DEVICES = {"cpu:0": "8GiB", "cpu:1": "8GiB"}


def step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 3
) -> dict[str, Any]:
    """What a forward and a backward leave: outputs, gradients, buffers."""
    args, kwargs = copy.deepcopy((tuple(args), dict(kwargs)))
    model.zero_grad()
    torch.manual_seed(seed)
    found = Parts(look_into=True)  # a cache of keys and values is an object
    found.structure(model(*args, **kwargs))
    outputs = found.tensors
    with torch.autocast("cpu", enabled=False):  # torch's advice: what follows forward is outside
        roots = [_scalar(t) for t in outputs if t.requires_grad]
        if roots:
            torch.stack(roots).sum().backward()
    left: dict[str, Any] = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    left |= {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    left |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for index, tensor in enumerate(tensors_in((args, kwargs))):
        left[f"argument {index}"] = tensor.detach()
        left[f"gradient of argument {index}"] = tensor.grad
    return left


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.float().square().mean()


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """What is not equal in every bit."""
    if one.keys() != two.keys():
        return [f"other names: {sorted(one.keys() ^ two.keys())[:4]}"]
    return [
        _difference(name, one[name], two[name]) for name in one if not _same(one[name], two[name])
    ]


def _same(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(_numbers(one), _numbers(two))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.nan_to_num(real) if real.is_floating_point() else real


def _difference(name: str, one: Any, two: Any) -> str:
    if one is None or two is None:
        return f"{name}: {'none' if one is None else 'some'}, placed the other way"
    if one.dtype != two.dtype or one.shape != two.shape:
        return f"{name}: {one.dtype}{list(one.shape)}, placed {two.dtype}{list(two.shape)}"
    a, b = _numbers(one).double(), _numbers(two).double()
    worst = float((a - b).abs().max())
    return f"{name}: {worst:.1e} of {float(a.abs().max()):.1e}"


def check(name: str, forms: Collection[str] = ()) -> dict[str, Any]:
    """What happened: operators, rungs, differences and errors, predicted and measured peaks."""
    model, args, kwargs = formed(name, forms)
    row: dict[str, Any] = {"ops": 0, "rungs": [], "problems": [], "peaks": []}
    for training, seed in ((True, 1), (False, 3)):
        own = copy.deepcopy(model).train(training)
        with torch_threads(1), torch.set_grad_enabled(training), autocast(forms):
            wanted, again = (
                [step(unsplit, args, kwargs, n) for n in seeds(forms)]
                for unsplit in (copy.deepcopy(own), copy.deepcopy(own))
            )
            unstable = [text for each in map(differences, wanted, again) for text in each]
            if unstable:
                row["problems"].append(f"the unsplit model differs from itself: {unstable[0]}")
                continue
            try:
                _place(row, own, args, kwargs, wanted, seeds(forms), training, seed)
            except baechi.BaechiError as error:
                row["problems"].append(f"{type(error).__name__}: {error}")
            except Exception as error:  # what only the split model raises, whatever it is
                row["problems"].append(f"fails when placed: {type(error).__name__}: {error}")
    return row


def check_sizes(name: str) -> dict[str, Any]:
    """What happened in calls of several batch sizes, with the plans that they took."""
    row: dict[str, Any] = {"plans": [], "problems": [], "remarks": [], "skipped": []}
    model, *call = example(name)
    calls = [call, *(_resized(name, call, batch) for batch in (3, 5, 4))]
    for training, seed in ((True, 1), (False, 3)):
        own = copy.deepcopy(model).train(training)
        with torch_threads(1), torch.set_grad_enabled(training):
            try:
                wanted = [step(copy.deepcopy(own), *call) for call in calls]
                again = [step(copy.deepcopy(own), *call) for call in calls]
            except Exception as error:  # whatever a model's code raises for another batch
                row["skipped"].append(f"the unsplit model fails: {error}"[:200])
                continue
            if any(map(differences, wanted, again)):
                row["skipped"].append("the unsplit model differs from itself")
                continue
            try:
                _call_each(row, own, calls, wanted, seed)
            except baechi.BaechiError as error:
                row["problems"].append(f"{type(error).__name__}: {error}")
    return row


_ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
}
_NO_PROMPT = {"labels", "decoder_input_ids", "return_loss", "use_cache"}


def check_generate(name: str) -> dict[str, Any]:
    """What happened in `generate`, with the plans that its calls took."""
    row: dict[str, Any] = {"plans": [], "problems": [], "remarks": [], "skipped": []}
    model, _, kwargs = example(name, cache=True)
    if not getattr(model.eval(), "can_generate", bool)():
        return {"generates": False}
    prompt = {key: value for key, value in kwargs.items() if key not in _NO_PROMPT}
    with torch_threads(1), torch.no_grad():
        wanted: dict[str, dict[str, Any]] = {}
        for how in _ANSWERS:
            try:
                one, two = (_answer(model, prompt, how) for _ in range(2))
            except Exception as error:  # whatever a model's code raises
                row["skipped"].append(f"{how}: the unsplit model fails: {error}"[:200])
                continue
            if differences(one, two):
                row["skipped"].append(f"{how}: the unsplit model differs from itself")
            else:
                wanted[how] = one
        if not wanted:
            return row
        placed = _placed_lazily(model, 3)
        for how, want in wanted.items():
            try:
                wrong = differences(want, _answer(placed, prompt, how))
            except baechi.BaechiError as error:
                row["problems"].append(f"{type(error).__name__}: {how}: {error}")
            else:
                row["problems"] += [f"{how}: {text}" for text in wrong]
        _note_plans(row, placed)
    return row


def _answer(model: nn.Module, prompt: Mapping[str, Any], how: str) -> dict[str, Any]:
    """Five tokens, with the scores by which they were chosen."""
    torch.manual_seed(5)
    wishes = {"max_new_tokens": 5, "min_new_tokens": 5, **_ANSWERS[how]}
    wishes |= {"return_dict_in_generate": True, "output_scores": True}
    answer = model.generate(**copy.deepcopy(dict(prompt)), **wishes)  # type: ignore[operator]
    return {"tokens": answer.sequences, "scores": torch.stack(answer.scores)}


def _placed_lazily(model: nn.Module, seed: int) -> baechi.PlacedModule:
    return baechi.place(
        copy.deepcopy(model),
        DEVICES,
        placer=baechi.RandomPlacer(seed),
        training=model.training,
        costs="estimate",
        progress=False,
        threads_per_device=1,
    )


def _note_plans(row: dict[str, Any], placed: baechi.PlacedModule) -> None:
    row["plans"].append(len(placed._specializations))
    row["remarks"] += [remark for remark in placed.remarks if "each shape" in remark]
    placed.unplace()


def _call_each(
    row: dict[str, Any],
    model: nn.Module,
    calls: Sequence[tuple[Any, Any]],
    wanted: Sequence[Mapping[str, Any]],
    seed: int,
) -> None:
    placed = _placed_lazily(model, seed)
    for index, (call, want) in enumerate(zip(calls, wanted, strict=True)):
        placed.load_state_dict(model.state_dict())
        wrong = differences(want, step(placed, *call))
        if wrong:
            some = "; ".join(wrong[:3])
            row["problems"].append(f"call {index}: {len(wrong)} of {len(want)} differ: {some}")
    _note_plans(row, placed)


# Their arguments' first sizes differ: several texts or patches for an image. A call of more of
# them is the same call several times.
_REPEATED = {"OwlViTForObjectDetection", "Qwen2VLForConditionalGeneration"}


def _resized(name: str, call: Any, batch: int) -> Any:
    """The arguments with another batch, of tensors whose first size is the first one's."""
    if name in PLAIN and inspect.signature(PLAIN[name]).parameters:
        return PLAIN[name](batch)[1:]
    own = next((tensor.shape[0] for tensor in tensors_in(call) if tensor.dim()), None)

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if name in _REPEATED:
            rows = torch.arange(batch * len(value)) % len(value)
        elif len(value) == own:
            rows = torch.arange(batch) % own
        else:
            return value
        return value.detach()[rows].requires_grad_(value.requires_grad)

    return tree_map(change, call)


def _place(
    row: dict[str, Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    training: bool,
    seed: int,
) -> None:
    given, named = copy.deepcopy((args, kwargs))
    placed = baechi.place(
        model,
        DEVICES,
        example_args=given,
        example_kwargs=named,
        placer=baechi.RandomPlacer(seed),
        training=training,
        costs="estimate",
        progress=False,
        threads_per_device=1,
    )
    row["ops"] = max(row["ops"], len(placed.traced.ops))
    row["rungs"].append(placed.traced.rung)
    for want, number in zip(wanted, seeds, strict=True):
        wrong = differences(want, step(placed, args, kwargs, number))
        if wrong:
            some = "; ".join(wrong[:3])
            row["problems"].append(f"{len(wrong)} of {len(want)} differ: {some}")
    pairs = zip(placed.schedule.peak_bytes, placed.measure(steps=1).peak_bytes, strict=True)
    row["peaks"] += [list(pair) for pair in pairs]
    placed.unplace()


if __name__ == "__main__":
    _name, *_options = sys.argv[1:]
    _calls = {"--sizes": check_sizes, "--generate": check_generate}.get("".join(_options))
    print(json.dumps({"name": _name, **(_calls(_name) if _calls else check(_name, _options))}))
