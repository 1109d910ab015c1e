"""One architecture, placed at random and set beside the unsplit model: `... .check NAME [FORM...]`.

Outputs, gradients of parameters and arguments, buffers and arguments are compared bit by bit, of a
training step in training mode and of an inference in evaluation mode, at one thread everywhere.
With `--sizes`, batches of other sizes follow, which the first plan does not take; with `--generate`
a placed model in evaluation mode answers a prompt.
"""

import copy
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from benchmarks.architectures.catalog import example
from benchmarks.architectures.comparison import differences, in_words, step
from benchmarks.architectures.forms import MICRO_BATCHES, autocast, formed, resized, seeds
from benchmarks.architectures.micro_batches import check_step
from benchmarks.architectures.placing import at_random, errors_noted
from torch import nn

import baechi
from baechi.torch_support.torch_devices import torch_threads


def check(name: str, forms: Collection[str] = ()) -> dict[str, Any]:
    """What happened: operators, rungs, differences and errors, predicted and measured peaks."""
    model, args, kwargs = formed(name, forms)
    row: dict[str, Any] = {"ops": 0, "rungs": [], "problems": [], "peaks": []}
    if MICRO_BATCHES in forms:
        with torch_threads(1):
            check_step(row, name, model.train(), (args, kwargs))
        return row
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
            with errors_noted(row["problems"]):
                _place(row, own, args, kwargs, wanted, seeds(forms), seed)
    return row


def check_sizes(name: str) -> dict[str, Any]:
    """What happened in calls of several batch sizes, with the plans that they took."""
    row: dict[str, Any] = {"plans": [], "problems": [], "remarks": [], "skipped": []}
    model, *call = example(name)
    calls = [call, *(resized(name, call, batch) for batch in (3, 5, 4))]
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
        placed = at_random(copy.deepcopy(model), 3)
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
    placed = at_random(copy.deepcopy(model), seed)
    for index, (call, want) in enumerate(zip(calls, wanted, strict=True)):
        placed.load_state_dict(model.state_dict())
        wrong = differences(want, step(placed, *call))
        row["problems"] += [f"call {index}: {in_words(wrong, want)}"] if wrong else []
    _note_plans(row, placed)


def _place(
    row: dict[str, Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    seed: int,
) -> None:
    given, named = copy.deepcopy((args, kwargs))
    placed = at_random(model, seed, example_args=given, example_kwargs=named)
    row["ops"] = max(row["ops"], len(placed.traced.ops))
    row["rungs"].append(placed.traced.rung)
    for want, number in zip(wanted, seeds, strict=True):
        wrong = differences(want, step(placed, args, kwargs, number))
        row["problems"] += [in_words(wrong, want)] if wrong else []
    pairs = zip(placed.schedule.peak_bytes, placed.measure(steps=1).peak_bytes, strict=True)
    row["peaks"] += [list(pair) for pair in pairs]
    placed.unplace()


if __name__ == "__main__":
    _name, *_options = sys.argv[1:]
    _calls = {"--sizes": check_sizes, "--generate": check_generate}.get("".join(_options))
    print(json.dumps({"name": _name, **(_calls(_name) if _calls else check(_name, _options))}))
