"""The layers: every import runs downwards, and what needs no torch loads none."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from baechi import _core

SOURCE = Path(__file__).parents[2] / "src" / "baechi"

# Bottom to top: a file imports from its own package and from those above it in this list. Packages
# of one line know nothing of each other.
LAYERS = """
    errors
    validation
    units
    _core
    records
    traced
    problem
    storage
    placers
    program
    reporting torch_support
    tracing
    processes
    costs
    runtime
    probing scheduling cluster_simulation
    checkpointing adapters
    planning
    device_maps placing
    cli
    __main__
"""
RANKS = {name: rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
del FILES["__init__"]  # the names that resolve on first use


def imports(path: Path) -> Iterator[str]:
    """What a file imports of Baechi, inside functions too, but for the lazy names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "baechi":
            parent = (node.module or "").partition(".")[2]
            names = [f"{parent}.{alias.name}".strip(".") for alias in node.names]
            yield from (name if name in FILES or name == "_core" else parent for name in names)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name.partition(".")[2] for name in names if name.startswith("baechi."))


@cache
def graph() -> dict[str, set[str]]:
    """What each file imports."""
    return {name: set(imports(path)) - {""} for name, path in FILES.items()}


def test_every_import_runs_downwards() -> None:
    def package(name: str) -> str:
        return name.split(".", maxsplit=1)[0]

    upwards = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in sorted(others)
        if package(other) != package(name) and RANKS[package(other)] >= RANKS[package(name)]
    ]
    assert not upwards


def test_what_policies_are_made_of_knows_no_policy() -> None:
    known = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in sorted(others)
        if name.startswith("cluster_simulation.policy_support")
        and other.startswith("cluster_simulation.policies")
    ]
    assert not known


def test_no_imports_form_a_circle() -> None:
    assert list(TopologicalSorter(graph()).static_order())


def test_no_two_modules_have_one_name() -> None:
    names = [part for name in FILES for part in [name.rpartition(".")[2]]]
    assert sorted(names) == sorted(set(names))


def test_few_files_lie_beside_the_packages() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_the_package_imports_its_parts_for_types_alone() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    outside = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [ast.unparse(node) for node in outside if "baechi" in ast.unparse(node)]


def loaded_after(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_baechi_loads_neither_torch_nor_numpy() -> None:
    loaded = loaded_after("import baechi; dir(baechi)")
    assert not loaded & {"torch", "scipy", "numpy", "networkx", "highspy", "transformers"}


def test_every_public_name_but_those_on_models_resolves_without_torch() -> None:
    loaded = loaded_after(
        "import baechi\n"
        "torch = {'apply', 'PlacedModule', 'calibrate', 'estimate', 'place', 'probe', 'profile'}\n"
        "torch |= {'device_map', 'skeleton', 'trace', 'ranks', 'clip_grad_norm_'}\n"
        "for name in set(baechi.__all__) - torch: getattr(baechi, name)"
    )
    assert "torch" not in loaded


def test_the_first_names_of_a_scheduler_are_in_its_package() -> None:
    loaded = loaded_after(
        "import baechi\n"
        "import types\n"
        "assert isinstance(baechi.scheduling, types.ModuleType)\n"
        "from baechi.scheduling import Ledger\n"
        "for name in baechi.scheduling.__all__: getattr(baechi.scheduling, name)\n"
        "from baechi.scheduling.ledger import Ledger as same\n"
        "assert Ledger is same\n"
        "try: baechi.scheduling.Leger\n"
        "except AttributeError as error: assert 'Leger' in str(error)\n"
        "else: raise AssertionError"
    )
    assert "torch" not in loaded


def test_solving_a_graph_loads_no_torch() -> None:
    loaded = loaded_after(
        "import baechi\n"
        "graph = baechi.OpGraph((baechi.Op('a', 5), baechi.Op('b', 5)), "
        "(baechi.Tensor(0, (1,), 8),))\n"
        "link = baechi.Link(latency_ns=10, bytes_per_s=10**9)\n"
        "cluster = baechi.Cluster.uniform(2, memory='1GiB', link=link)\n"
        "placement = baechi.solve(graph, cluster)\n"
        "assert baechi.simulate(graph, cluster, placement).makespan_ns == 10"
    )
    assert "torch" not in loaded


def test_simulating_a_cluster_and_the_scheduling_service_load_no_torch() -> None:
    loaded = loaded_after(
        "import pkgutil, baechi.scheduling, baechi.cluster_simulation\n"
        "from importlib import import_module\n"
        "for package in (baechi.scheduling, baechi.cluster_simulation):\n"
        "    names = pkgutil.walk_packages(package.__path__, package.__name__ + '.')\n"
        "    for module in names: import_module(module.name)\n"
        "from baechi.cluster_simulation.policies import policy_named\n"
        "from baechi.cluster_simulation.fleet import Fleet\n"
        "from baechi.cluster_simulation.jobs import Job\n"
        "from baechi.cluster_simulation.simulator import simulate_cluster\n"
        "fleet = Fleet.uniform(1, 1, 2)\n"
        "result = simulate_cluster([Job('a', 2, 0, 5)], fleet, policy_named('fifo'))\n"
        "assert result.outcomes[0].end_time == 5\n"
        "from fastapi.testclient import TestClient\n"
        "from baechi.scheduling.client import Client\n"
        "from baechi.scheduling.ledger import Ledger\n"
        "from baechi.scheduling.service import create_app\n"
        "from baechi.storage.serialization import dumps\n"
        "if __name__ == '__main__':\n"
        "    link = baechi.Link(latency_ns=10, bytes_per_s=10**9)\n"
        "    ledger = Ledger(baechi.Cluster.uniform(2, memory='1GiB', link=link))\n"
        "    graph = baechi.OpGraph((baechi.Op('a', 5),))\n"
        "    with TestClient(create_app(ledger, workers=1)) as web:\n"
        "        digest = web.post('/v1/graphs', content=dumps(graph)).json()['digest']\n"
        "        answer = web.post('/v1/solve', json={'schema': 1, 'graph': digest})\n"
        "        assert answer.json()['status'] == 'placed', answer.text"
    )
    assert "fastapi" in loaded
    assert not loaded & {"torch", "transformers"}


def test_the_command_line_loads_no_web_framework_before_it_serves() -> None:
    assert not loaded_after("import baechi.__main__") & {"fastapi", "uvicorn", "torch"}


def test_what_needs_torch_says_so_where_there_is_none() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import baechi\n"
        "try: baechi.trace\n"
        "except ModuleNotFoundError as error: print(error.name, error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("torch baechi.trace needs torch 2.11 or later")
    assert "pip install" in run.stdout


def test_the_stub_of_the_core_names_what_the_core_has() -> None:
    stub = ast.parse((SOURCE / "_core.pyi").read_text())
    named = {row.name for row in stub.body if isinstance(row, ast.FunctionDef | ast.ClassDef)}
    assert named == {name for name in vars(_core) if not name.startswith("__")}
