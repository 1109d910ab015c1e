"""Memory: what autograd keeps, what optimizers keep, and peaks predicted against measured."""

import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import baechi
import zoo
from baechi.partition import attribute
from baechi.training import backward_ops

ALL = {**zoo.MODELS, **zoo.AWKWARD}


@cache
def example(name: str) -> tuple[zoo.Example, baechi.Traced, baechi.Profile]:
    model, args, kwargs = ALL[name]()
    traced = baechi.trace(model, args, kwargs)
    return (model, args, kwargs), traced, baechi.profile(traced, "cpu", threads=1, progress=False)


def kept_between_forward_and_backward(traced: baechi.Traced) -> list[int]:
    """Bytes of every storage, but state and inputs, that a run of the whole model keeps."""
    module = traced.module
    graph_module = module.graph_module
    state = [*module.model.parameters(), *module.model.buffers(), *module.call.tensors]
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = attribute(graph_module, str(node.target))
            state += [value] if isinstance(value, torch.Tensor) else []
    own = {tensor.untyped_storage()._cdata for tensor in state}
    alive: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in own and key not in alive:
            alive[key] = storage.nbytes()
            weakref.finalize(storage, alive.pop, key)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = graph_module(*module.call.tensors)
    kept = sorted(alive.values())
    del results
    return kept


@pytest.mark.parametrize("name", ALL)
def test_what_autograd_keeps_is_what_the_whole_model_keeps(name: str) -> None:
    _, traced, profile = example(name)
    module = traced.module
    given = {
        i for i, nodes in enumerate(module.nodes) if nodes[0].op in ("placeholder", "get_attr")
    }
    ops = backward_ops(traced.ops, traced.tensors)
    tensors = {t for op in ops for t in traced.ops[op].saves}
    rows = [traced.tensors[t].nbytes for t in tensors if traced.tensors[t].producer not in given]
    predicted = sum(rows) + sum(profile.costs[op].saved_bytes for op in ops)
    assert predicted == sum(kept_between_forward_and_backward(traced))
