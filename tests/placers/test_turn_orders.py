"""Orders of turns: schedules that pipelines are known to have, found and proved."""

import itertools
import random
import statistics

import pytest
from benchmarks.pipelines.graphs import UNIT, chunks, cluster_of, layers
from seeds import seeds

from baechi import Constraints, InputError, Link, Op, OpGraph, Placement, Tensor, solve
from baechi.placers.turn_orders import ordered_turns
from baechi.problem.segments import segments_of


def order(homes, times, memory, microbatches, **rest):
    graph, placement = chunks(homes, *times)
    return ordered_turns(graph, cluster_of(memory), placement, microbatches, **rest)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("many", [1, 8, 32])
def test_equal_stages_take_turns_as_in_1f1b_and_no_order_is_shorter(stages, many):
    batches = max(many, stages)
    times = [UNIT] * stages, [2 * UNIT] * stages
    memory = [stages - at for at in range(stages)]
    rhythm = order(range(stages), times, memory, batches)
    assert rhythm.step_ns == 3 * UNIT * (batches + stages - 1) == rhythm.lower_bound_ns
    assert rhythm.peak_bytes == tuple(memory)
    # One forward, one backward, once the device is warm.
    first = [turn for turn in rhythm.turns if rhythm.segments[turn[0]][0] in (0, 2 * stages - 1)]
    steady = [segment for segment, _ in first][stages - 1 : -stages + 1]
    assert all(a != b for a, b in itertools.pairwise(steady))


def test_one_loss_for_all_batches_holds_all_of_them():
    graph = OpGraph(
        (
            *(Op("F0", UNIT, group="a"), Op("F1", UNIT, group="b"), Op("loss", 0, phase="loss")),
            Op("B1", 2 * UNIT, group="b", phase="backward", forward=(1,)),
            Op("B0", 2 * UNIT, group="a", phase="backward", forward=(0,)),
        ),
        (
            *(Tensor(0, (4,), 1), Tensor(0, (1,), 0), Tensor(1, (3,), 1), Tensor(1, (2,), 0)),
            *(Tensor(2, (3,), 0), Tensor(3, (4,), 0)),
        ),
    )
    placement = Placement(graph.digest, (0, 1, 1, 1, 0), (0, 1, 2, 3, 4))
    rhythm = ordered_turns(graph, cluster_of([6, 6]), placement, 6, joined=True)
    assert rhythm.step_ns == 3 * UNIT * 7 == rhythm.lower_bound_ns
    assert rhythm.peak_bytes == (6, 6)
    after = [batch for segment, batch in rhythm.turns if segment == 3]
    assert after == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("stages", "batches", "units"), [(2, 8, 25), (4, 8, 27), (4, 16, 51)])
def test_gradients_of_parameters_apart_fill_bubbles_as_in_zb_h1(stages, batches, units):
    times = [[UNIT] * stages] * 3
    rhythm = order(range(stages), times, [stages] * stages, batches)
    assert rhythm.step_ns == units * UNIT == rhythm.lower_bound_ns


@pytest.mark.parametrize(("stages", "units"), [(2, 13.0), (4, 25.5), (8, 53.5)])
def test_a_v_of_chunks_has_next_to_no_bubble_in_the_memory_of_1f1b(stages, units):
    homes = [*range(stages), *reversed(range(stages))]
    times = [[UNIT // 2] * len(homes)] * 3
    ops = range(3 * len(homes))
    rest = {"segments": [(op,) for op in ops], "effort": "balanced"}
    rhythm = order(homes, times, [2 * stages] * stages, 2 * stages, **rest)
    assert rhythm.step_ns <= units * UNIT
    assert max(rhythm.peak_bytes) <= 2 * stages


def test_interleaved_chunks_halve_the_bubble():
    rhythm = order([*range(4)] * 2, ([UNIT // 2] * 8, [UNIT] * 8), [100] * 4, 8)
    assert rhythm.step_ns == 28.5 * UNIT == rhythm.lower_bound_ns


@pytest.mark.unsanitized
@pytest.mark.parametrize(("contiguous", "most"), [(True, 0.01), (False, 0.04)])
def test_unequal_chunks_come_near_the_bound(contiguous, most):
    gaps = []
    for seed in seeds(40):
        draw = random.Random(seed)
        devices = draw.randint(2, 6)
        n = devices if contiguous else draw.randint(devices, 3 * devices)
        homes = range(n) if contiguous else [draw.randrange(devices) for _ in range(n)]
        forward = [draw.randint(UNIT // 2, 2 * UNIT) for _ in range(n)]
        times = forward, [2 * ns for ns in forward]
        rhythm = order(homes, times, [100 * n] * devices, 8, effort="balanced")
        assert rhythm.step_ns >= rhythm.lower_bound_ns
        gaps.append(rhythm.step_ns / rhythm.lower_bound_ns - 1)
    assert statistics.mean(gaps) <= most


@pytest.mark.parametrize("seed", seeds(40))
def test_what_fits_for_one_micro_batch_has_an_order_that_fits(seed):
    draw = random.Random(seed)
    devices = draw.randint(2, 4)
    n = draw.randint(devices, 3 * devices)
    homes = [draw.randrange(devices) for _ in range(n)]
    times = [draw.randint(1, 9) for _ in range(n)], [draw.randint(1, 9) for _ in range(n)]
    need = order(homes, times, [0] * devices, 1).peak_bytes
    rhythm = order(homes, times, need, 4, effort="fast")
    assert rhythm.peak_bytes == need
    assert rhythm.step_ns <= 4 * sum(map(sum, times))


def test_parts_of_segments_take_the_turns_of_these():
    graph, cluster = layers(4), cluster_of([2**30] * 2)
    placement = solve(graph, cluster, "contiguous", microbatches=3)
    segments = segments_of(graph, placement)
    finer = [[op] for row in segments for op in row]
    rhythm = ordered_turns(graph, cluster, placement, 3, segments=finer)
    assert len(rhythm.segments) > len(segments)
    whole = {op: at for at, row in enumerate(segments) for op in row}
    turns = [(whole[rhythm.segments[at][0]], batch) for at, batch in rhythm.turns]
    assert tuple(turn for turn, _ in itertools.groupby(turns)) == placement.turns


def test_an_order_that_cannot_fit_is_the_one_of_least_excess():
    graph = OpGraph((Op("a", UNIT), Op("b", UNIT)), (Tensor(0, (1,), 5), Tensor(1, (), 3, True)))
    placement = Placement(graph.digest, (0, 0), (0, 1))
    rhythm = ordered_turns(graph, cluster_of([10]), placement, 4)
    assert rhythm.peak_bytes == (4 * 3 + 5,)


def test_margins_are_kept_free():
    times = [UNIT] * 2, [2 * UNIT] * 2
    graph, placement = chunks(range(2), *times)
    limits = Constraints(margins={"d0": 1})
    rhythm = ordered_turns(graph, cluster_of([2, 2]), placement, 4, constraints=limits)
    assert rhythm.peak_bytes[0] == 1


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ({"microbatches": 0}, "microbatches"),
        ({"effort": "much"}, "effort"),
        ({"cluster": cluster_of([9])}, "device"),
    ],
)
def test_wrong_arguments_are_named(rest, text):
    graph, placement = chunks(range(2), [UNIT] * 2, [UNIT] * 2)
    arguments = {"cluster": cluster_of([9, 9]), "microbatches": 2, **rest}
    with pytest.raises(InputError, match=text):
        ordered_turns(graph, placement=placement, **arguments)


def test_a_missing_link_is_named():
    graph, placement = chunks(range(2), [UNIT] * 2, [UNIT] * 2)
    cluster = cluster_of([9, 9], Link(0, 10**9))
    parted = type(cluster)(cluster.devices, ((None, None), (None, None)))
    with pytest.raises(InputError, match="no link"):
        ordered_turns(graph, parted, placement, 2)
