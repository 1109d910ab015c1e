"""The solvers agree, on programs of favorite children; MOSEK's task is right without a licence."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layered

from baechi import InputError
from baechi.placers import linear_programs
from baechi.placers.linear_programs import (
    Cvxopt,
    Highs,
    LinearProgram,
    Mosek,
    near_point,
    solver_rows,
)
from baechi.placers.sct import relax


def plain(program):
    """The paper's rows, one by one: no shift, no reduction; only numbers divided by 100."""
    n, m = len(program.times), len(program.src)
    rows, limit = [], []
    for e, (i, j) in enumerate(zip(program.src, program.dst, strict=True)):
        rows.append({e: program.cost[e] / 100, m + i: 1.0, m + j: -1.0})
        limit.append(-program.times[i] / 100)
    for i in range(n):
        rows.append({m + i: 1.0, m + n: -1.0})
        limit.append(-program.times[i] / 100)
    for end in (program.src, program.dst):
        for i in range(n):
            edges = np.flatnonzero(end == i)
            rows.append(dict.fromkeys(edges.tolist(), -1.0))
            limit.append(1.0 - len(edges))
    nonzeros = [(r, c, v) for r, row in enumerate(rows) for c, v in row.items()]
    row, column, value = (np.array(part) for part in zip(*nonzeros, strict=True))
    upper = np.concatenate([np.ones(m), np.full(n + 1, np.inf)])
    cost = np.concatenate([np.zeros(m + n), np.ones(1)])
    return LinearProgram(cost, upper, row, column, value, np.array(limit))


def optimum(program, solver):
    """w in ns."""
    rows = solver_rows(program)
    solution = solver.solve(rows.program)
    assert not isinstance(solution, str)
    return rows.offset_ns + rows.unit_ns * solution[-1]


@pytest.mark.parametrize("cost", [10.0, 100.0, 10_000.0])
@pytest.mark.parametrize("width", [3, 20])
def test_the_reduced_and_shifted_program_has_the_optimum_of_the_papers(width, cost):
    program = layered(60, width, 1, cost)
    solution = Highs().solve(plain(program))
    assert optimum(program, Highs()) == pytest.approx(100 * solution[-1], rel=1e-7)


@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([1, 1e5]))
def test_cvxopt_agrees_with_highs(n, width, seed, cost):
    pytest.importorskip("cvxopt")
    program = layered(max(n, width + 1), width, seed, cost)
    if program.free.any():
        assert optimum(program, Cvxopt()) == pytest.approx(optimum(program, Highs()), rel=1e-6)


@pytest.mark.parametrize(("n", "cost"), [(400, 20.0), (400, 2000.0), (2000, 200.0)])
def test_cvxopt_knows_the_optimum_of_large_programs(n, cost):
    pytest.importorskip("cvxopt")
    program = layered(n, 10, 2, cost)
    assert optimum(program, Cvxopt()) == pytest.approx(optimum(program, Highs()), rel=1e-6)


def test_moseks_task_has_the_optimum_of_highs(tmp_path):
    mosek = pytest.importorskip("mosek")
    for seed, width in ((1, 4), (2, 10)):
        program = layered(300, width, seed)
        rows = solver_rows(program)
        path = tmp_path / f"{seed}.mps"
        with mosek.Env() as env, linear_programs._mosek_task(mosek, env, rows.program) as task:
            task.writedata(str(path))
        reader = highspy.Highs()
        reader.setOptionValue("output_flag", False)
        reader.readModel(str(path))
        reader.run()
        found = rows.offset_ns + rows.unit_ns * reader.getInfo().objective_function_value
        assert found == pytest.approx(optimum(program, Highs()), rel=1e-6)


def test_mosek_without_a_licence_names_the_alternatives(monkeypatch, tmp_path):
    pytest.importorskip("mosek")
    monkeypatch.setenv("MOSEKLM_LICENSE_FILE", str(tmp_path / "none.lic"))
    rows = solver_rows(layered(20, 3, 1))
    with pytest.raises(InputError, match=r"MOSEK did not start: .*licen.*'highs'.*'cvxopt'"):
        Mosek().solve(rows.program)


@pytest.mark.parametrize("solver", [Cvxopt(), Mosek()])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, solver):
    monkeypatch.setitem(sys.modules, solver.name, None)
    rows = solver_rows(layered(20, 3, 1))
    with pytest.raises(InputError, match=rf"pip install baechi\[{solver.name}\].*'highs'"):
        solver.solve(rows.program)


def test_a_solver_says_why_it_stopped():
    pytest.importorskip("cvxopt")
    program = solver_rows(layered(300, 10, 1)).program
    stopped = Highs(iterations_per_row=0).solve(program)
    assert "iteration" in stopped
    infeasible = LinearProgram(
        *(np.ones(1), np.ones(1)),
        *(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1), -np.ones(1)),
    )
    for solver in (Highs(), Cvxopt()):
        assert "infeasible" in solver.solve(infeasible)


@given(st.integers(2, 60), st.integers(1, 8), st.integers(0, 2**32), st.sampled_from([1, 1e5]))
def test_shares_are_a_point_and_the_simplex_reaches_the_optimum_from_it(n, width, seed, cost):
    program = layered(max(n, width + 1), width, seed, cost)
    if not program.free.any():
        return
    rows = solver_rows(program)
    shares = program.feasible(np.random.default_rng(seed).random(len(program.src)))
    start = near_point(program, rows, shares)
    lp = rows.program
    sums = np.bincount(lp.row, lp.value * start[lp.column], minlength=len(lp.limit))
    assert (sums <= lp.limit + 1e-9).all()
    assert (start >= 0).all()
    assert (start <= lp.upper).all()
    best = pytest.approx(Highs().solve(lp)[-1], rel=1e-6, abs=1e-9)
    assert Highs().solve(lp, start)[-1] == best
    capped = replace(lp, upper=np.append(lp.upper[:-1], start[-1]))
    assert Highs().solve(capped, start)[-1] == best


def test_equal_programs_have_equal_answers():
    pytest.importorskip("cvxopt")
    program = layered(300, 10, 1)
    rows = solver_rows(program)
    for solver in (Highs(), Cvxopt()):
        answers = [solver.solve(rows.program) for _ in range(2)]
        assert np.array_equal(*answers)
    start = near_point(program, rows, np.zeros(len(program.src)))
    assert np.array_equal(*(Highs().solve(rows.program, start) for _ in range(2)))


def test_a_point_in_a_fresh_process():
    """HiGHS's crossover falls over where nothing ran before it."""
    text = (
        "import numpy as np\n"
        "from baechi.placers.linear_programs import Highs, LinearProgram\n"
        "one = np.ones(1)\n"
        "zero = np.zeros(1, np.int64)\n"
        "program = LinearProgram(-one, 2 * one, zero, zero, one, one)\n"
        "print(Highs().solve(program, 0.5 * one)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1.0"


def test_highs_runs_where_somebody_ran_it_with_more_threads():
    def solved(threads):
        if threads:
            other = highspy.Highs()
            other.setOptionValue("output_flag", False)
            other.setOptionValue("threads", threads)
            other.addVar(0.0, 1.0)
            other.run()
        program = layered(200, 10, 1, 200.0)
        near = np.zeros(len(program.src))
        return relax(program, Highs()), relax(program, Highs(), near)

    # HiGHS keeps its threads for each thread that calls it.
    with ThreadPoolExecutor(1) as fresh, ThreadPoolExecutor(1) as used:
        rows = zip(fresh.submit(solved, 0).result(), used.submit(solved, 2).result(), strict=True)
    for alone, beside in rows:
        assert np.array_equal(alone.shares, beside.shares)
