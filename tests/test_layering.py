"""The layers hold: a file imports only from lower layers, and `import baechi` loads no torch.

Inside a layer only the imports in `ALLOWED` may be. A new file gets a row in `LAYERS`.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from baechi import _core

SOURCE = Path(__file__).parents[1] / "src" / "baechi"

LAYERS = {
    0: "errors units values _core arrays graph devices topology constraints placement costs "
    "measurement optimizers efficiency signatures runtime.program",
    1: "serialization codec traced training coarsening restrictions problem linkage bounds "
    "linear_programs granularity link_fits profile_store device_kinds recomputation "
    "late_gradients",
    2: "simulation solving placers.*",
    3: "checkpointing reporting.* scheduling.* runtime.cutting runtime.writing "
    "runtime.compiling runtime.checking runtime.lifetimes runtime.fitting",
    4: "tracing rungs repeated_reads eager_branches known_values asked_values "
    "attributes effectless autocast objects structures calls ctc_loss faithfulness gradient_mode "
    "custom_functions leftovers model_state propagation partition naming "
    "lowering extraction metering saving profiling bench passes copying torch_devices overlaps "
    "timing cuda_graphs cuda_timing operands operators value_dependence isolation in_place "
    "workspace kernels workload estimation calibration recurrent runtime.edges",
    5: "runtime.*",
    6: "probing placing demo demo_models named_models console profile_commands estimate_commands "
    "cluster_command serving __main__",
}

# The imports inside a layer: file -> the files of its layer that it may import. They form no cycle
# but one: `Traced.graph` is a method of the value for the caller's sake, and `training` reads it.
ALLOWED = {
    # Layer 0: values are built on the errors and on the checks that all share.
    "units": {"errors", "values"},
    "values": {"errors"},
    "arrays": {"_core"},
    "graph": {"arrays", "errors", "units", "values"},
    "devices": {"errors", "units", "values"},
    "topology": {"devices", "errors", "units", "values"},
    "constraints": {"errors", "units", "values"},
    "placement": {"errors", "values"},
    "costs": {"errors", "values"},
    "optimizers": {"errors", "values"},
    "measurement": {"errors", "values"},
    "efficiency": {"errors", "values"},
    "runtime.program": {"errors", "values"},
    # Layer 1: a problem is what the core reads; bounds and coarsening are about a problem.
    "problem": {"restrictions"},
    "bounds": {"problem"},
    "coarsening": {"problem"},
    "linkage": {"problem", "restrictions"},
    "granularity": {"problem"},
    "traced": {"training"},
    "late_gradients": {"traced"},
    "training": {"late_gradients", "recomputation", "traced"},
    "recomputation": {"traced"},
    "serialization": {"codec", "traced"},
    # Layer 2: placers use the one clock; `auto` and `packing` try others; `solving` knows all.
    "placers.base": {"simulation"},
    "placers.baselines": {"placers.base", "placers.choices"},
    "placers.topo": {"placers.base"},
    "placers.etf": {"placers.base"},
    "placers.favorites": {"placers.favorite_program"},
    "placers.sct": {"placers.base", "placers.etf", "placers.favorites"},
    "placers.assignments": {"placers.base", "simulation"},
    "placers.contiguous": {"placers.assignments", "placers.base"},
    "placers.heft": {"placers.assignments", "placers.base", "placers.etf", "simulation"},
    "placers.mincut": {"placers.assignments", "placers.base"},
    "placers.peft": {"placers.base", "placers.heft"},
    "placers.backtracking": {"placers.assignments", "placers.base", "simulation"},
    "placers.packing": {
        "placers.assignments",
        "placers.backtracking",
        "placers.base",
        "placers.baselines",
        "placers.etf",
        "placers.topo",
    },
    "placers.search": {
        "placers.assignments",
        "placers.base",
        "placers.etf",
        "placers.heft",
        "simulation",
    },
    "placers.auto": {
        "placers.base",
        "placers.baselines",
        "placers.choices",
        "placers.contiguous",
        "placers.etf",
        "placers.heft",
        "placers.mincut",
        "placers.packing",
        "placers.peft",
        "placers.sct",
        "placers.search",
        "placers.topo",
        "simulation",
    },
    "placers.named": {
        "placers.auto",
        "placers.base",
        "placers.baselines",
        "placers.contiguous",
        "placers.etf",
        "placers.heft",
        "placers.mincut",
        "placers.peft",
        "placers.sct",
        "placers.search",
        "placers.topo",
    },
    "solving": {
        "placers.assignments",
        "placers.auto",
        "placers.backtracking",
        "placers.base",
        "placers.baselines",
        "placers.choices",
        "placers.named",
        "placers.packing",
        "simulation",
    },
    # Layer 3: a report is facts, then figures, then a page.
    "reporting": {
        "reporting.facts",
        "reporting.occupancy",
        "reporting.page",
        "reporting.perfetto",
        "reporting.text",
    },
    "reporting.figures": {"reporting.facts", "reporting.layout", "reporting.occupancy"},
    "reporting.page": {"reporting.facts", "reporting.figures", "reporting.occupancy"},
    "reporting.perfetto": {"reporting.facts", "reporting.occupancy"},
    "reporting.text": {"reporting.facts"},
    # The program of a placement: cut, and then written.
    "runtime.compiling": {"runtime.cutting", "runtime.writing"},
    # What streams hold is added to the memory that a report draws, and solved for.
    "runtime.lifetimes": {"reporting.occupancy"},
    "runtime.fitting": {"runtime.compiling", "runtime.lifetimes"},
    # A simulated cluster: jobs, then machines, then who gets them, then the clock, then results.
    "scheduling": {
        "scheduling.claims",
        "scheduling.client",
        "scheduling.decision",
        "scheduling.ledger",
        "scheduling.wishes",
    },
    "scheduling.fleet": {"scheduling.jobs"},
    "scheduling.sharing": {"scheduling.jobs"},
    "scheduling.rooms": {"scheduling.fleet", "scheduling.jobs", "scheduling.sharing"},
    "scheduling.runs": {"scheduling.jobs", "scheduling.rooms", "scheduling.sharing"},
    "scheduling.ends": {"scheduling.runs"},
    "scheduling.progress": {"scheduling.runs"},
    "scheduling.schemes": {"scheduling.jobs", "scheduling.rooms", "scheduling.sharing"},
    "scheduling.policies": {"scheduling.rooms", "scheduling.runs"},
    "scheduling.shortest": {"scheduling.policies", "scheduling.runs"},
    "scheduling.las": {"scheduling.policies", "scheduling.runs"},
    "scheduling.slicing": {"scheduling.policies", "scheduling.runs"},
    "scheduling.packing": {"scheduling.policies"},
    "scheduling.steps": {
        "scheduling.fleet",
        "scheduling.jobs",
        "scheduling.rooms",
        "scheduling.sharing",
    },
    "scheduling.splitting": {
        "scheduling.jobs",
        "scheduling.policies",
        "scheduling.rooms",
        "scheduling.runs",
        "scheduling.schemes",
        "scheduling.sharing",
        "scheduling.steps",
    },
    "scheduling.catalog": {
        "scheduling.las",
        "scheduling.packing",
        "scheduling.policies",
        "scheduling.schemes",
        "scheduling.sharing",
        "scheduling.shortest",
        "scheduling.slicing",
        "scheduling.splitting",
    },
    "scheduling.results": {"scheduling.jobs"},
    "scheduling.offers": {
        "scheduling.jobs",
        "scheduling.policies",
        "scheduling.rooms",
        "scheduling.runs",
    },
    "scheduling.simulator": {
        "scheduling.ends",
        "scheduling.fleet",
        "scheduling.jobs",
        "scheduling.offers",
        "scheduling.policies",
        "scheduling.progress",
        "scheduling.results",
        "scheduling.rooms",
        "scheduling.runs",
        "scheduling.schemes",
        "scheduling.sharing",
    },
    "scheduling.outputs": {"scheduling.results"},
    "scheduling.charts": {"reporting.figures", "scheduling.results"},
    "scheduling.generators": {"scheduling.jobs"},
    "scheduling.trace_entries": {"scheduling.jobs"},
    "scheduling.trace_formats": {"scheduling.jobs", "scheduling.trace_entries"},
    "scheduling.traces": {
        "scheduling.jobs",
        "scheduling.trace_entries",
        "scheduling.trace_formats",
    },
    # Claims, then what is left, then who has it, then what fits there, then who asks.
    "scheduling.snapshot": {"scheduling.claims"},
    "scheduling.store": {"scheduling.claims", "scheduling.snapshot"},
    "scheduling.ledger": {"scheduling.claims", "scheduling.snapshot", "scheduling.store"},
    "scheduling.wishes": {"scheduling.claims", "scheduling.snapshot"},
    "scheduling.candidates": {
        "scheduling.claims",
        "scheduling.snapshot",
        "scheduling.wishes",
    },
    "scheduling.decision": {
        "scheduling.candidates",
        "scheduling.claims",
        "scheduling.snapshot",
        "scheduling.wishes",
    },
    "scheduling.whatif": {
        "scheduling.decision",
        "scheduling.snapshot",
        "scheduling.wishes",
    },
    "scheduling.messages": {
        "scheduling.claims",
        "scheduling.decision",
        "scheduling.snapshot",
        "scheduling.whatif",
        "scheduling.wishes",
    },
    "scheduling.workers": {
        "scheduling.claims",
        "scheduling.decision",
        "scheduling.messages",
        "scheduling.snapshot",
        "scheduling.whatif",
    },
    "scheduling.service": {
        "scheduling.ledger",
        "scheduling.messages",
        "scheduling.snapshot",
        "scheduling.whatif",
        "scheduling.workers",
    },
    "scheduling.client": {
        "scheduling.claims",
        "scheduling.messages",
        "scheduling.snapshot",
        "scheduling.whatif",
        "scheduling.wishes",
    },
    # Layer 4: calls, then what every node does, then operators; what measures reads those.
    "structures": {"objects"},
    "calls": {"autocast", "objects", "structures"},
    "leftovers": {"objects"},
    "propagation": {"asked_values", "leftovers", "operators", "structures"},
    "kernels": {"structures"},
    "extraction": {"asked_values"},
    "effectless": {"operators"},
    "partition": {"propagation"},
    "naming": {"propagation"},
    "lowering": {"attributes", "calls", "naming", "partition", "propagation", "structures"},
    "model_state": {"asked_values", "leftovers", "objects", "propagation"},
    "faithfulness": {"calls", "custom_functions", "gradient_mode"},
    "eager_branches": {"known_values"},
    "rungs": {
        "asked_values",
        "calls",
        "eager_branches",
        "effectless",
        "extraction",
        "faithfulness",
        "gradient_mode",
        "leftovers",
        "model_state",
        "operators",
        "propagation",
        "structures",
    },
    "tracing": {
        "attributes",
        "calls",
        "ctc_loss",
        "faithfulness",
        "gradient_mode",
        "lowering",
        "model_state",
        "propagation",
        "repeated_reads",
        "rungs",
    },
    "operands": {"structures", "lowering", "operators", "partition", "propagation"},
    "value_dependence": {"operands", "operators"},
    "isolation": {"extraction", "lowering", "structures", "timing"},
    "in_place": {"lowering"},
    "cuda_timing": {"cuda_graphs", "timing"},
    "metering": {"overlaps"},
    "workspace": {"isolation", "metering", "runtime.edges", "saving"},
    "bench": {
        "cuda_timing",
        "in_place",
        "isolation",
        "lowering",
        "operands",
        "timing",
        "torch_devices",
        "workspace",
    },
    "passes": {"timing"},
    "profiling": {"bench", "lowering", "passes", "torch_devices", "value_dependence"},
    "workload": {
        "structures",
        "extraction",
        "in_place",
        "kernels",
        "leftovers",
        "lowering",
        "metering",
        "partition",
        "propagation",
    },
    "estimation": {"torch_devices", "workload"},
    "calibration": {"estimation", "workload"},
    # Layer 5: tapes and what binds a program to them, then those who run it, then the module.
    "runtime.steps": {"runtime.again", "runtime.watching"},
    "runtime.failures": {"runtime.compiled"},
    "runtime.tapes": {
        "runtime.again",
        "runtime.compiled",
        "runtime.ends",
        "runtime.failures",
        "runtime.steps",
        "runtime.watching",
    },
    "runtime.gradients": {"runtime.ends", "runtime.strided"},
    "runtime.binding": {
        "runtime.aliases",
        "runtime.again",
        "runtime.compiled",
        "runtime.ends",
        "runtime.gradients",
        "runtime.steps",
        "runtime.tapes",
    },
    "runtime.capturing": {"runtime.compiled", "runtime.tapes"},
    "runtime.graphed": {"runtime.steps", "runtime.tapes"},
    "runtime.replays": {
        "runtime.capturing",
        "runtime.graphed",
        "runtime.steps",
        "runtime.tapes",
    },
    "runtime.workers": {"runtime.binding", "runtime.steps", "runtime.tapes"},
    "runtime.landings": {"runtime.binding", "runtime.graphed", "runtime.steps"},
    "runtime.streams": {
        "runtime.binding",
        "runtime.fencing",
        "runtime.graphed",
        "runtime.holding",
        "runtime.landings",
        "runtime.replays",
        "runtime.steps",
        "runtime.workers",
    },
    "runtime.executors": {
        "runtime.binding",
        "runtime.capturing",
        "runtime.graphed",
        "runtime.replays",
        "runtime.steps",
        "runtime.streams",
        "runtime.workers",
    },
    "runtime.nodes": {
        "runtime.aliases",
        "runtime.binding",
        "runtime.compiled",
        "runtime.executors",
        "runtime.results",
        "runtime.steps",
        "runtime.tickets",
        "runtime.watching",
    },
    "runtime.executables": {
        "runtime.binding",
        "runtime.capturing",
        "runtime.compiled",
        "runtime.executors",
        "runtime.homes",
        "runtime.identity",
        "runtime.nodes",
        "runtime.replays",
        "runtime.sharing",
        "runtime.steps",
        "runtime.streams",
        "runtime.tickets",
        "runtime.workers",
    },
    "runtime.measuring": {"runtime.executables"},
    "runtime.handover": {"runtime.module"},
    "runtime.stepwise": {"runtime.binding", "runtime.tapes"},
    "runtime.verifying": {"runtime.executables", "runtime.stepwise"},
    "runtime.module": {
        "runtime.capturing",
        "runtime.compiled",
        "runtime.executables",
        "runtime.matching",
        "runtime.measuring",
        "runtime.methods",
        "runtime.specialization",
        "runtime.turns",
    },
    "runtime.specialization": {"runtime.executables"},
    # Layer 6. What the runtime does is what `probe` measures.
    "placing": {"probing"},
    "demo": {"demo_models"},
    "console": {"named_models"},
    "profile_commands": {"console"},
    "estimate_commands": {"console"},
    "cluster_command": {"console"},
    "serving": {"console"},
    "__main__": {
        "cluster_command",
        "console",
        "demo",
        "estimate_commands",
        "probing",
        "profile_commands",
        "serving",
    },
}


def layer_of(module: str) -> int:
    """The layer of a module such as `placers.etf`; an exact name goes before a pattern."""
    patterns = {pattern: layer for layer, row in LAYERS.items() for pattern in row.split()}
    package = module.rpartition(".")[0]
    for pattern in (module, f"{module}.*", f"{package}.*"):
        if pattern in patterns:
            return patterns[pattern]
    raise LookupError(f"{module} is in no layer; give it a place in LAYERS")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> set[str]:
    """The modules of Baechi that a file imports, inside functions and for types alone too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = SOURCE.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                is_module |= alias.name == "_core"
                if alias.name != "__version__":
                    found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return {
        name.removeprefix("baechi.").removeprefix("baechi") or PACKAGE
        for name in found
        if name.split(".")[0] == "baechi"
    }


# The package names every public thing and resolves it lazily, so it counts as the top.
PACKAGE = "__init__"
FILES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@pytest.mark.parametrize("module", sorted(FILES.keys() - {PACKAGE}))
def test_a_file_imports_only_from_lower_layers(module: str) -> None:
    own = layer_of(module)
    for imported in imports_of(FILES[module]):
        if imported == PACKAGE:
            assert own == max(LAYERS), f"{module} (layer {own}) imports from the whole package"
            continue
        allowed = layer_of(imported) < own or imported in ALLOWED.get(module, set())
        assert allowed, f"{module} (layer {own}) imports {imported} (layer {layer_of(imported)})"


def test_what_is_allowed_inside_a_layer_is_inside_one_and_is_used() -> None:
    for module, imported in ALLOWED.items():
        for name in imported:
            assert layer_of(name) == layer_of(module)
            assert name in imports_of(FILES[module]), f"{module} no longer imports {name}"


def test_what_is_allowed_inside_a_layer_forms_no_cycle_but_one() -> None:
    without = {**ALLOWED, "traced": ALLOWED["traced"] - {"training"}}
    assert list(TopologicalSorter(without).static_order())


def test_the_package_imports_its_parts_for_types_alone() -> None:
    tree = ast.parse(FILES[PACKAGE].read_text())
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
        "torch |= {'trace'}\n"
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


def test_simulating_a_cluster_loads_no_torch() -> None:
    loaded = loaded_after(
        "import pkgutil, baechi.scheduling\n"
        "from importlib import import_module\n"
        "for module in pkgutil.iter_modules(baechi.scheduling.__path__, 'baechi.scheduling.'):\n"
        "    import_module(module.name)\n"
        "from baechi.scheduling.catalog import policy_named\n"
        "from baechi.scheduling.fleet import Fleet\n"
        "from baechi.scheduling.jobs import Job\n"
        "from baechi.scheduling.simulator import simulate_cluster\n"
        "fleet = Fleet.uniform(1, 1, 2)\n"
        "result = simulate_cluster([Job('a', 2, 0, 5)], fleet, policy_named('fifo'))\n"
        "assert result.outcomes[0].end_time == 5"
    )
    assert "torch" not in loaded


def test_the_scheduling_service_loads_no_torch() -> None:
    loaded = loaded_after(
        "import baechi\n"
        "from fastapi.testclient import TestClient\n"
        "from baechi.scheduling.client import Client\n"
        "from baechi.scheduling.ledger import Ledger\n"
        "from baechi.scheduling.service import create_app\n"
        "from baechi.serialization import dumps\n"
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
