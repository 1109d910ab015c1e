"""Where a placement is known, however odd the graph, the devices and the rules, `solve` has one."""

import pytest

from baechi import simulate, solve
from baechi.placers.packing import is_hopeless
from baechi.problem import Problem
from baechi.simulation import fits_memory, overflows, replay
from hidden import hidden_among_constraints


def test_what_is_hidden_among_constraints_is_found():
    rules = missing = 0
    for seed in range(150):
        graph, cluster, constraints, row = hidden_among_constraints(seed)
        problem = Problem(graph, cluster, constraints)
        assert fits_memory(problem, replay(problem, row, range(len(row))))
        assert not is_hopeless(problem)
        placement = solve(graph, cluster, effort="fast", constraints=constraints)
        schedule = simulate(graph, cluster, placement, constraints)
        assert not overflows(schedule, cluster, constraints)
        assert placement.stats["makespan_ns"] == schedule.makespan_ns >= schedule.lower_bound_ns
        rules += constraints is not None
        n = len(cluster.devices)
        missing += sum(link is None for row in cluster.links for link in row) > n
    assert min(rules, missing) > 75


# What the searches of a fast solve do not find, but backtracking over few groups does.
@pytest.mark.parametrize(("seed", "most_ops"), [(1977, 14), (5174, 70)])
def test_backtracking_finds_what_no_rule_and_no_fast_search_does(seed, most_ops):
    graph, cluster, constraints, _ = hidden_among_constraints(seed, most_ops)
    placement = solve(graph, cluster, effort="fast", constraints=constraints)
    assert placement.stats["fallback"]
