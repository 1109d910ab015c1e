"""The pieces of `benchmarks/residual`: what is drawn, what is counted, what is told."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from benchmarks.residual.names import MEMORY_BYTES
from benchmarks.residual.plot import svg
from benchmarks.residual.report import csv_of, difference, tables
from benchmarks.residual.runs import ARMS, FIRST_FIT, SHARINGS, overflows, row_of
from benchmarks.residual.statistics import interval
from benchmarks.residual.workload import fleet_of, jobs_of, kind_of, mean_seconds

from baechi import Op, OpGraph, Tensor
from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import Job, TimeSliced
from baechi.cluster_simulation.placement_schemes import FirstFit
from baechi.cluster_simulation.policies.fifo import Fifo
from baechi.cluster_simulation.simulator import simulate_cluster

JOBS = 25


def chain(ops, nbytes):
    """A model of so many ops, each of which holds a part of the GPU's memory in all."""
    each = int(MEMORY_BYTES * nbytes) // ops
    return OpGraph(
        tuple(Op(f"op{i}", 1_000_000, persistent_bytes=each) for i in range(ops)),
        tuple(Tensor(i, (i + 1,), 1000) for i in range(ops - 1)),
    )


@pytest.fixture(scope="module")
def kinds():
    sizes = {"small": (4, 0.1), "half": (8, 0.6), "large": (8, 0.9), "double": (12, 1.5)}
    return [kind_of(name, chain(*size), "") for name, size in sizes.items()]


@pytest.fixture(scope="module")
def rows(kinds):
    found = []
    for seed in (0, 1):
        fleet = fleet_of(seed, 0.75, "")
        for load in (0.6, 1.2):
            jobs = jobs_of(kinds, fleet, seed, JOBS, load)
            memo = {}
            found += [
                row_of(arm, sharing, load, seed, jobs, fleet, memo)
                for arm in ARMS
                for sharing in (SHARINGS if arm.most > 1 else SHARINGS[:1])
            ]
    return found


def test_users_ask_for_as_few_gpus_as_hold_their_model(kinds):
    assert [kind.gpus for kind in kinds] == [1, 1, 1, 2]
    assert kinds[0].memory_bytes == pytest.approx(0.1 * MEMORY_BYTES, rel=0.01)
    # Of the splits over two, the one that holds least on the fullest.
    assert kinds[3].memory_bytes < 0.81 * MEMORY_BYTES


def test_what_is_drawn_depends_on_the_seed_alone(kinds):
    fleet = fleet_of(3, 0.75, "")
    assert fleet == fleet_of(3, 0.75, "")
    assert fleet != fleet_of(4, 0.75, "")
    assert not any(gpu.held_bytes for gpu in fleet.gpus if gpu.node == 0)
    assert not any(gpu.held_bytes for gpu in fleet_of(3, 0, "").gpus)
    one = jobs_of(kinds, fleet, 3, 50, 0.5)
    assert one == jobs_of(kinds, fleet, 3, 50, 0.5)
    assert one != jobs_of(kinds, fleet, 4, 50, 0.5)
    # Another load has the same jobs, at other times.
    twice = jobs_of(kinds, fleet, 3, 50, 1.0)
    assert [replace(job, submit_time=0) for job in one] == [
        replace(job, submit_time=0) for job in twice
    ]
    for slow, fast in zip(one, twice, strict=True):
        assert abs(slow.submit_time - 2 * fast.submit_time) <= 1


def test_load_is_gpu_time_over_capacity(kinds):
    fleet = fleet_of(0, 0.75, "")
    jobs = jobs_of(kinds, fleet, 0, 5000, 0.8)
    capacity = sum(gpu.share for gpu in fleet.gpus) / 1000
    asked = sum(job.gpus * job.duration for job in jobs)
    assert asked / (capacity * jobs[-1].submit_time) == pytest.approx(0.8, rel=0.05)
    assert fmean(job.duration for job in jobs) == pytest.approx(mean_seconds(), rel=0.05)


def test_every_job_ends_or_is_refused_and_none_runs_out_of_memory(rows):
    assert {row.jobs + row.refused for row in rows} == {JOBS}
    assert not any(row.oom or row.refused for row in rows)
    assert all(0 < row.memory <= 1 for row in rows)
    assert all(row.mean_s <= row.p99_s <= row.makespan_s for row in rows)


def test_jobs_are_split_over_left_overs_and_nowhere_else(rows):
    split = {row.arm for row in rows if row.split}
    assert split
    assert all(name.startswith("split") for name in split)


def test_overflows_are_counted_from_what_jobs_held():
    fleet = Fleet.uniform(1, 1, 1, memory_bytes=100)
    jobs = [Job(f"job{i}", 1, i, 10, memory_bytes=50) for i in range(4)]
    result = simulate_cluster(jobs, fleet, Fifo(), FirstFit(), sharing=TimeSliced(4))
    assert overflows(result, fleet) == 0
    assert overflows(result, Fleet.uniform(1, 1, 1, memory_bytes=99)) == 3
    tight = Fleet((replace(fleet.gpus[0], held_bytes=1),))
    assert overflows(result, tight) == 3


def test_intervals_are_students():
    mean, half = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.182 * 1.2909944 / 2)
    assert math.isnan(interval([1.0])[1])
    assert interval([5.0] * 40) == (5.0, 0.0)


def test_tables_and_picture_have_every_arm(rows):
    text = tables(rows)
    assert text.count("load 1.2") == len(SHARINGS)
    picture = svg(rows)
    for arm in ARMS:
        assert text.count(f"\n{arm.name} ") == 4
        assert arm.name in picture
    assert csv_of(rows).count("\n") == len(rows) + 1
    assert difference(rows, FIRST_FIT, FIRST_FIT, "mps", 0.6) == (0.0, 0.0)
    assert difference(rows, "splitting 1", "packing 1", "mps", 1.2)[0] != 0
