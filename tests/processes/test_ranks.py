"""Real processes run one placed model: what they compute, keep, and say when one of them fails.

A start takes some seconds, so one serves many checks (`support/rank_checks.py`).
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import rank_checks

import baechi

SUPPORT = Path(rank_checks.__file__).parent
LAST = ("an_error_in_forward_is_one_of_all", "ranks_that_do_different_things_are_told")
APART = (
    *LAST,
    "ranks_that_take_different_plans_are_told",
    "an_error_in_the_loss_is_one_of_all",
    "an_error_between_steps_is_one_of_all",
    "a_checkpoint_of_two_ranks_loads_here",
    "steps_until_somebody_is_gone",
    "replicas_have_the_mean",
    "gpus_are_the_loop",
)
TOGETHER = [name for name in rank_checks.CHECKS if name not in APART]
SLOW = ("a_language_model_generates",)  # in each process transformers is imported
QUICK = [*(name for name in TOGETHER if name not in SLOW), LAST[0]]

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]


def environment() -> dict[str, str]:
    paths = [str(SUPPORT), str(SUPPORT.parents[1])]
    # Where CUDA is emulated it has another torch.
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    paths += map(str, Path(baechi.__file__).parents[1:2])
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **variables}


def begun(n: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """So many ranks of a script, without an agent that would end the others with one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sizes = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment() | common | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(n)
    ]


def outcome(n: int, folder: Path, *names: str) -> dict[str, list[str]]:
    """What each rank says of each check."""
    folder.mkdir(exist_ok=True)
    processes = begun(n, str(SUPPORT / "rank_checks.py"), str(folder), *names)
    texts = [process.communicate(timeout=300)[0] for process in processes]
    found: dict[str, list[str]] = {}
    for rank in range(n):
        path = folder / f"{rank}.json"
        assert path.exists(), texts[rank]
        for name, text in json.loads(path.read_text()).items():
            found.setdefault(name, []).append(text)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """The checks that one start of two ranks makes."""
    return outcome(2, tmp_path_factory.mktemp("two"), *QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(name: str, two: Mapping[str, list[str]]) -> None:
    assert two.get(name) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_is_noticed(
    end: signal.Signals, transport: str, tmp_path: Path
) -> None:
    name, before = "steps_until_somebody_is_gone", shared_memory()
    script = str(SUPPORT / "rank_checks.py")
    processes = begun(2, script, str(tmp_path), name, transport)
    try:
        for _ in range(3):
            line = processes[1].stdout.readline()  # type: ignore[union-attr]
            assert line, processes[0].communicate()
        processes[1].send_signal(end)
        text, _ = processes[0].communicate(timeout=120)
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert json.loads((tmp_path / "0.json").read_text()) == {name: ""}, text
    assert shared_memory() == before


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("baechi*")}


@pytest.mark.slow
def test_a_launcher_restarts_all_from_a_checkpoint(tmp_path: Path) -> None:
    """A training in which rank 1 kills itself has the losses of one in which it does not."""
    losses = []
    for name, *killed_at in (("whole",), ("killed", "2")):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(SUPPORT / "rank_training.py"), str(folder), "4"]
        run = subprocess.run(
            [*command, *killed_at],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert ("Signal 9" in run.stderr or "exitcode: -9" in run.stderr) == bool(killed_at)
        losses.append((folder / "losses").read_text())
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("an_error_in_forward_is_one_of_all", "gloo"),
        ("an_error_in_the_loss_is_one_of_all", "auto"),
        ("an_error_in_the_loss_is_one_of_all", "gloo"),
        ("ranks_that_take_different_plans_are_told", "auto"),
    ],
)
def test_an_error_on_a_rank_is_one_of_all(name: str, transport: str, tmp_path: Path) -> None:
    assert outcome(2, tmp_path, transport, name) == {name: ["", ""]}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "transport"), [("first", "gloo"), ("last", "auto")])
def test_an_error_that_ends_a_rank_is_told_to_all(who: str, transport: str, tmp_path: Path) -> None:
    name, before = "an_error_between_steps_is_one_of_all", shared_memory()
    script = str(SUPPORT / "rank_checks.py")
    processes = begun(3, script, str(tmp_path), name, who, transport)
    texts = [process.communicate(timeout=120)[0] for process in processes]
    ended = 0 if who == "first" else 2
    assert "OwnError" in texts[ended]
    for rank in {0, 1, 2} - {ended}:
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {name: ""}, texts[rank]
    assert shared_memory() == before


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_replicas_have_the_mean_of_their_gradients(n: int, tmp_path: Path) -> None:
    assert outcome(n, tmp_path, "replicas_have_the_mean") == {"replicas_have_the_mean": [""] * n}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpus_are_the_loop", "replicas_have_the_mean"])
def test_two_ranks_on_gpus(name: str, tmp_path: Path) -> None:
    assert outcome(2, tmp_path, name) == {name: ["", ""]}


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_a_checkpoint_of_two_ranks_loads_on_others(n: int, tmp_path: Path) -> None:
    saved = outcome(2, tmp_path / "2", "a_checkpoint_is_that_of_the_whole_model")
    assert saved == {"a_checkpoint_is_that_of_the_whole_model": ["", ""]}
    loaded = outcome(n, tmp_path / "n", "a_checkpoint_of_two_ranks_loads_here")
    assert loaded == {"a_checkpoint_of_two_ranks_loads_here": [""] * n}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_three_ranks(transport: str, tmp_path: Path) -> None:
    # The third has no parameters, and so no optimizer.
    trained = ("state_is_where_it_lives", "a_checkpoint_is_that_of_the_whole_model")
    names = [name for name in TOGETHER if name not in trained]
    found = outcome(3, tmp_path, transport, *names, LAST[1])
    assert found == {name: ["", "", ""] for name in (*names, LAST[1])}
