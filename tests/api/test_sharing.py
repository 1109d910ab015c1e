"""How tests are shared out over processes (`make test`)."""

import os

import pytest


@pytest.mark.xdist_group("together")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process has all")
def test_a_group_of_tests_is_one_process_s(request: pytest.FixtureRequest) -> None:
    """pytest-xdist notes the group in the test's name; else each process traces every model."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("tests are shared out without groups")
    assert request.node.nodeid.endswith("@together")
