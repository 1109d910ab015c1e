"""The step `captures`: which operators a CUDA graph holds, beside the rules that decide it before.

The operators are those of torch's own tests (`OpInfo`), each on its first sample, as a model on one
lane of the GPU with `cuda_graphs="auto"`: forward and backward, until they are replayed.

    captured     replayed, with the eager values
    one way      the same, but for its backward, whose capture failed
    refused      `capture_rules` has a reason; `too strict` are those that a capture takes after all
    missed       the rules let it through and its capture failed, so that it runs eagerly

A missed one is a failure: its name belongs into the rules, which say so before anything runs.
"""

import re
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from benchmarks.gpu_check.check import Check, WrongError
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import baechi
from baechi.runtime.executors.cuda_graphs import WARM_UP
from baechi.torch_support.graph_capture import CudaRecorder
from baechi.tracing.pytrees import tensors_in

_PLACE: Final = torch.device("cuda", 0)
_CHUNK: Final = 40
# Of the reason: which operator failed, and where in this file.
_COMMON: Final = re.compile(
    r"it could not be captured: | \(captures\.py:.*\)\) failed on logical device 0"
)
_QUICK: Final = ("add", "cumsum", "linalg.inv", "masked_select", "nn.functional.conv2d", "sort")


def run(check: Check) -> None:
    """A row per forty operators in the order of their names."""
    check.case("six operators", lambda: _swept(_operators(_QUICK)))
    rows = [] if check.quick else _operators()
    for begin in range(0, len(rows), _CHUNK):
        some = rows[begin : begin + _CHUNK]
        check.case(f"{some[0].full_name} to {some[-1].full_name}", partial(_swept, some))


def _operators(names: Sequence[str] = ()) -> list[Any]:
    try:
        import expecttest  # noqa: F401
    except ImportError:  # the base of test cases, of which none runs here
        base = types.ModuleType("expecttest")
        base.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = base
    from torch.testing._internal.common_methods_invocations import op_db

    rows = (op for op in op_db if torch.float32 in op.supported_dtypes("cuda"))
    written = (op for op in rows if "empty" not in op.full_name)
    chosen = (op for op in written if not names or op.full_name in names)
    return sorted(chosen, key=lambda op: str(op.full_name))


def _swept(operators: Sequence[Any]) -> Mapping[str, Any]:
    found: dict[str, list[str]] = {}
    for op in operators:
        kind, why = _tried(op)
        found.setdefault(kind, []).append(f"{op.full_name} ({why})" if why else op.full_name)
    figures: dict[str, Any] = {
        kind: len(found.get(kind, ())) for kind in ("captured", "refused", "not placed")
    }
    figures |= {kind: found.get(kind, []) for kind in ("too strict", "one way")}
    wrong = {kind: found[kind] for kind in ("missed", "other values") if kind in found}
    if wrong:
        raise WrongError(
            ", ".join(f"{len(rows)} {kind}" for kind, rows in wrong.items()), **figures, **wrong
        )
    return figures


def _tried(op: Any) -> tuple[str, str]:
    """What becomes of an operator, and why."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, tensors = _model(op)
            expected, again = (_step(model, tensors) for _ in range(2))
            traced = baechi.trace(model, tensors)
            placed = _placed(traced)
            for _ in range(WARM_UP + 2):
                actual = _step(placed, tensors)
        except (baechi.BaechiError, RuntimeError, TypeError, ValueError) as error:
            return "not placed", type(error).__name__  # samples of what no model is
        reasons = [why for why in placed._current.graphs.reasons if why]
        placed.unplace()
        one_way = [why for why in reasons if why.startswith("a backward of ")]
        if any("could not be captured" in why for why in reasons if why not in one_way):
            return "missed", _COMMON.sub("", reasons[0])[:200]
        if reasons and reasons != one_way:
            return ("too strict", reasons[0]) if _is_captured(model, tensors) else ("refused", "")
    # Samples of random operators set a seed inside, which is in no trace.
    compared = not any(row.random for row in traced.ops) and _are_close(expected, again)
    same = not compared or _are_close(expected, actual)
    return ("other values" if not same else "one way" if one_way else "captured"), ""


@final
class _Call(nn.Module):
    """One call of an operator, on copies of the arguments, of which it may return a view."""

    def __init__(self, op: Any, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.call, self.leaves, self.spec = op, tuple(leaves), spec

    def forward(self, *tensors: Tensor) -> Any:
        given = (tensor.clone() for tensor in tensors)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.call(*args, **kwargs)


def _model(op: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    graded = op.supports_autograd
    sample = next(iter(op.sample_inputs(_PLACE, torch.float32, requires_grad=graded)))
    given = ((sample.input, *sample.args), dict(sample.kwargs))
    leaves, spec = pytree.tree_flatten(given)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    bare = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _Call(op, bare, spec), tensors


def _placed(traced: baechi.Traced) -> Any:
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    cluster = baechi.Cluster.connected([baechi.Device(str(_PLACE), "4GiB")], baechi.Link(0, 1))
    placement = baechi.solve(graph, cluster, placer="single")
    return baechi.apply(traced, placement, graph=graph, cluster=cluster, cuda_graphs="auto")


def _step(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of the arguments, by the same random numbers each time."""
    torch.manual_seed(0)
    for tensor in tensors:
        tensor.grad = None
    outputs = tensors_in(model(*tensors))
    graded = [t for t in outputs if t.requires_grad]
    losses = [torch.view_as_real(t) if t.is_complex() else t for t in graded]
    if losses:
        torch.stack([loss.square().mean() for loss in losses]).sum().backward()
    return [*outputs, *_gradients(tensors)]


def _are_close(rows: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    try:
        torch.testing.assert_close(rows, others, rtol=1e-3, atol=1e-3, equal_nan=True)
    except AssertionError:
        return False
    return True


def _gradients(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    return (tensor.grad for tensor in tensors if tensor.grad is not None)


def _is_captured(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """True if a graph holds the forward and the backward of the model itself."""
    recorder = CudaRecorder(_PLACE)
    try:
        recorder.run(lambda: _step(model, tensors))
        recorder.record(lambda: _step(model, tensors), 0)
    except Exception:
        return False
    return True
