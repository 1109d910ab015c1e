"""Every test run keeps its measured costs in a folder of its own; what many tests ask for."""

import gc
import os
import resource
import signal
import statistics
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Where an optional package is missing, as on a machine that is there for its GPU alone, the tests
# of what needs it are left out.
_NEEDS = {
    "benchmarks/placement_quality/test_instances.py": ("plotly",),
    "tests/adapters/test_scheduler_extender.py": ("fastapi", "httpx"),
    "tests/scheduling/test_service.py": ("fastapi", "httpx", "prometheus_client", "uvicorn"),
    **{
        path: names
        for page, names in {
            "accelerate": ("accelerate",),
            "detection": ("scipy", "transformers"),
            "diffusers": ("diffusers",),
            "encoder-decoders": ("transformers",),
            "lightning": ("lightning",),
            "peft": ("peft",),
            "sentence-transformers": ("datasets", "sentence_transformers"),
            "timm": ("timm", "torchvision"),
            "torch-geometric": ("torch_geometric",),
            "torchao": ("torchao",),
            "trainer": ("accelerate", "transformers"),
            "trl": ("datasets", "peft", "trl"),
        }.items()
        for path in (
            f"docs/recipes/{page}.md",
            f"tests/ecosystem/test_{page.replace('-', '_')}.py",
        )
    },
}
collect_ignore = [path for path, names in _NEEDS.items() if None in map(find_spec, names)]
if find_spec("hypothesis") is None:
    collect_ignore += [
        str(path)
        for path in Path(__file__).parent.glob("tests/**/test_*.py")
        if any(word in path.read_text() for word in ("from hypothesis", "from strategies"))
    ]
# Tests, and functions of which it is all, that `make test` leaves out.
_COVERED = Path(__file__).with_name("tests").joinpath("selection/covered.txt")
_COSTLY = 10
# Of a million additions in Python, on a machine for which `budget_s` is meant.
_ADDITIONS_S = 0.09
_GPUS = {"gpu": 1, "multigpu": 2}
# Processes that compile take longer to start than small functions do to compile; and torch 2.11 may
# wait five minutes for them when a test run ends.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Looks for garbage at every 700th object are a tenth of a run; who wants one asks for it. Where
# there are GPUs they stay: tests count what the runtime is asked for, and how streams come back.
_LOOKS = gc.get_threshold()
gc.set_threshold(20_000, 20, 20)

# A shell starts what runs in the background with Ctrl-C ignored; tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, Phase, settings

    # Nothing fails because the machine is busy, and every run of `make test` makes the same cases.
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("default", max_examples=25, derandomize=True, **patient)
    settings.register_profile("nightly", max_examples=200, **patient)
    # `make mutants` asks whether a test fails; the smallest example would take minutes to find.
    alone = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", settings.get_profile("default"), phases=alone)
    # Sanitizers look at what a case touches, and make it five times slower.
    settings.register_profile("sanitized", max_examples=5, derandomize=True, **patient)
    settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long a test may take is an option in pyproject.toml."""
    parser.addini("budget_s", "processor time that a test may take; 0 for any", default="0")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test of the default run that takes more processor time than `budget_s`.

    Benchmarks measure for as long as they need.
    A busy machine fails nothing, since waiting is not counted, and a slow one has more. Without
    this limit the suite grows back: `tests/README.md` says what to do instead.
    """
    begun = _processor_s()
    yield
    took, budget_s = _processor_s() - begun, float(item.config.getini("budget_s"))
    free = item.nodeid.startswith("benchmarks/test_") or item.get_closest_marker("costly")
    if not budget_s or took <= budget_s or free:
        return
    budget_s *= _slowness()
    if took > budget_s:
        pytest.fail(f"took {took:.1f} s of processor time; the budget is {budget_s:.1f} s", False)


def _slowness() -> float:
    """How many times `_ADDITIONS_S` a million additions take here, and 1 where they take less.

    The median of nine tries, since a shared processor may run at half its speed for a moment.
    """
    tries = []
    for _ in range(9):
        begun, number = time.process_time(), 0
        for each in range(10**6):
            number += each
        tries.append(time.process_time() - begun)
    return max(1, statistics.median(tries) / _ADDITIONS_S)


def _processor_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without a look for garbage, which is a fifth of the time: packages are imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are; one process has all tests of a model.

    So each model is traced once (`--dist loadgroup`).
    """
    covered = frozenset(_COVERED.read_text().splitlines())
    for item in items:
        if not covered.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker(pytest.mark.covered)
        if item.nodeid.startswith(("tests/ecosystem/", "docs/recipes/")):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # other libraries' own
            item.add_marker(pytest.mark.xdist_group("ecosystem"))  # which one process imports
        if item.nodeid.startswith("docs/recipes/") and "accelerate" not in item.nodeid:
            item.add_marker(pytest.mark.slow)
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if isinstance(name, str) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(name))
    default = (item for item in items if item.get_closest_marker("slow") is None)
    costly = sum(item.get_closest_marker("costly") is not None for item in default)
    if costly > _COSTLY:
        raise pytest.UsageError(f"{costly} tests have the marker costly; at most {_COSTLY} may.")
    wanted = [
        (item, n) for item in items for mark, n in _GPUS.items() if item.get_closest_marker(mark)
    ]
    if wanted:
        import torch

        have = torch.cuda.device_count()
        if have:
            gc.set_threshold(*_LOOKS)
        for item, n in wanted:
            if have < n:
                item.add_marker(pytest.mark.skip(reason=f"needs {n} GPU(s), and {have} are here"))


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("XDG_CACHE_HOME")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module", autouse=True)
def _no_look_at_what_stays() -> None:
    """Garbage collection leaves alone what there is by now: packages, and what modules keep.

    A look at some million objects takes a second, and many tests ask for one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread, as a worker has: sums are in its order, and no thread waits for another."""
    from baechi.torch_support.torch_devices import torch_threads

    with torch_threads(1):
        yield
