"""Without a backward a program runs operators in the placement's own order, whatever that is.

So no device holds more than the clock says. Bits do not depend on it, but for random draws, which
have an order in the graph.
"""

import copy
import random
from dataclasses import replace

import placed
import pytest
import torch
import zoo
from program_oracle import order_of
from seeds import some

import baechi
from baechi.tracing.pytrees import tensors_in

ALL = {**zoo.MODELS, **zoo.AWKWARD}


def in_any_order(graph: baechi.OpGraph, seed: int) -> tuple[int, ...]:
    """A topological order in which whatever can come next is as likely."""
    generator = random.Random(seed)
    left = [len({graph.tensors[t].producer for t in inputs}) for inputs in graph.op_inputs]
    ready = [op for op, count in enumerate(left) if not count]
    order: list[int] = []
    while ready:
        op = ready.pop(generator.randrange(len(ready)))
        order.append(op)
        readers = {c for t in graph.op_outputs[op] for c in graph.tensors[t].consumers}
        for reader in sorted(readers):
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return tuple(order)


@pytest.mark.parametrize("name", some(ALL, 16))
def test_an_inference_in_any_order_equals_the_unsplit_model(name: str) -> None:
    model, args, kwargs = ALL[name]()
    state = copy.deepcopy(model.state_dict())
    traced = baechi.trace(model, *copy.deepcopy((args, kwargs)))
    profile = placed.made_up_profile(traced)
    graph = traced.graph(profile, training=False, draws_in_order=True)
    with placed.one_thread(), torch.no_grad():
        torch.manual_seed(1)
        expected = tensors_in(copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        for seed in range(3):
            cluster = placed.cpus(1 + seed)
            found = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(seed))
            placement = replace(found, order=in_any_order(graph, seed))
            module = baechi.apply(
                traced, placement, graph=graph, cluster=cluster, threads_per_device=1
            )
            model.load_state_dict(state)
            torch.manual_seed(1)
            actual = tensors_in(module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
            ran = order_of(module.program, placement.order)
            module.unplace()
            assert all(map(torch.equal, actual, expected)), seed
            assert ran == placement.order, seed


def test_no_device_holds_more_than_the_clock_says() -> None:
    """The order of two operators that can trade places changes what is held beside them."""
    model, args, kwargs = zoo.MODELS["clip"]()
    traced = baechi.trace(model.eval(), args, kwargs)
    graph = traced.graph(baechi.estimate(traced, "cpu"), training=False)
    cluster = placed.cpus(2)
    peaks = set()
    for seed in range(4):
        found = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(0))
        placement = replace(found, order=in_any_order(graph, seed))
        said = baechi.simulate(graph, cluster, placement).peak_bytes
        module = baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)
        seen = module.measure(1).peak_bytes
        module.unplace()
        assert all(one >= two for one, two in zip(said, seen, strict=True)), seed
        peaks.add(said)
    assert len(peaks) > 1
