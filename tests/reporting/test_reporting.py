import builtins
import io
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from strategies import clusters, graphs, placements

from baechi import (
    Cluster,
    Device,
    InputError,
    Link,
    Measurement,
    Op,
    OpGraph,
    Placement,
    Schedule,
    Span,
    Tensor,
    Transfer,
    simulate,
    solve,
)
from baechi.problem.segments import segments_of
from baechi.problem.simulation import memory_profile, peak_holdings
from baechi.reporting import Plan, text_report, write_html, write_trace
from baechi.reporting.figures import (
    COLORS,
    color,
    graph_figure,
    lay_out,
    sections,
    time_figure,
)
from baechi.reporting.perfetto import trace_events
from baechi.traced.operators import Attempt, TracedOp
from baechi.traced.traced_model import Traced

MIB = 1024**2
drawn = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")

# a -> b, a -> c; b on the other device. 1 byte per ns and no latency: a transfer of n bytes, n ns.
GRAPH = OpGraph(
    (
        Op("h.0/a", 10, persistent_bytes=100),
        Op("h.1/<b>", 20, persistent_bytes=200, workspace_bytes=7),
        Op("h.1/c", 5),
    ),
    (Tensor(0, (1, 2), 30), Tensor(1, (), 4, kept=True)),
)
CLUSTER = Cluster.connected(
    [Device("cpu:0", 1000), Device("cpu:1", 2 * MIB)], Link(0, 1_000_000_000)
)
PLACEMENT = Placement(
    GRAPH.digest, (0, 1, 0), (0, 1, 2), "auto",
    {"single/cpu:0": 35, "m-etf/fine": 60, "chosen": "m-etf/fine", "makespan_ns": 60},
)  # fmt: skip
SCHEDULE = simulate(GRAPH, CLUSTER, PLACEMENT)
PARTS = (GRAPH, CLUSTER, PLACEMENT, SCHEDULE)
TRACED = Traced(
    "Toy",
    (
        TracedOp("h.0/a", ("a",), "k", source="toy.py:3 forward: a = <x>"),
        TracedOp("h.1/<b>", ("b",), "k"),
        TracedOp("h.1/c", ("c",), "k"),
    ),
    (),
    (Attempt("torch.export (non-strict)", "ValueError: [bold] toy.py:9"), Attempt("torch.fx")),
    True,
)
MEASURED = Measurement(66, (130, 300), (65, 66, 67), moved_bytes=30)


@st.composite
def plans(draw):
    graph = draw(graphs())
    cluster = draw(clusters())
    placement = draw(placements(graph, cluster))
    try:
        schedule = simulate(graph, cluster, placement)
    except InputError:
        assume(False)
    return graph, cluster, placement, schedule


def test_the_worked_example_runs_as_drawn():
    # cpu:0  a[0,10)        c[10,15)
    # to 1        a[10,40)
    # cpu:1                     b[40,60)
    assert SCHEDULE.spans == (Span(0, 0, 0, 10), Span(1, 1, 40, 60), Span(2, 0, 10, 15))
    assert SCHEDULE.transfers == (Transfer(0, 0, 1, 10, 40),)
    assert memory_profile(GRAPH, CLUSTER, SCHEDULE) == (
        ((0, 130), (40, 100), (60, 100)),
        ((0, 200), (10, 230), (40, 241), (60, 200)),
    )
    assert SCHEDULE.peak_bytes == (130, 241)
    assert peak_holdings(GRAPH, CLUSTER, SCHEDULE)[1] == (
        40,
        {"parameters and optimizer": 200, "workspace": 7, "copies received": 30,
         "tensors made here": 4},
    )  # fmt: skip


@given(plans())
def test_the_highest_step_of_memory_is_the_peak_of_the_clock(plan):
    graph, cluster, _, schedule = plan
    profiles = memory_profile(graph, cluster, schedule)
    assert tuple(max(nbytes for _, nbytes in steps) for steps in profiles) == schedule.peak_bytes
    for steps in profiles:
        times = [time_ns for time_ns, _ in steps]
        assert times == sorted(set(times))
        assert (times[0], times[-1]) == (0, schedule.makespan_ns)
    held = peak_holdings(graph, cluster, schedule)
    assert tuple(sum(parts.values()) for _, parts in held) == schedule.peak_bytes


@given(plans())
def test_device_facts_add_up(plan):
    graph, cluster, placement, schedule = plan
    facts = Plan(*plan).devices
    assert sum(fact.ops for fact in facts) == len(graph.ops)
    moved = sum(graph.tensors[transfer.tensor].nbytes for transfer in schedule.transfers)
    assert sum(fact.sent_bytes for fact in facts) == moved
    assert sum(fact.received_bytes for fact in facts) == moved
    assert all(0 <= fact.busy_share <= 1 for fact in facts)
    assert [fact.ops for fact in facts] == [
        placement.devices.count(device) for device in range(len(cluster.devices))
    ]


@drawn
@given(plans())
def test_every_plan_can_be_drawn_and_told(plan):
    plan = Plan(*plan)
    str(text_report(plan))
    trace_events(plan)
    graph_figure(plan)
    time_figure(plan)


@given(plans())
def test_no_two_ops_stand_at_one_place_and_edges_point_right(plan):
    graph, cluster, placement, _ = plan
    layout = lay_out(graph, placement.devices, len(cluster.devices))
    places = list(zip(layout.columns, layout.rows, strict=True))
    assert len(set(places)) == len(places)
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            assert layout.columns[tensor.producer] <= layout.columns[consumer]
    for op, device in enumerate(placement.devices):
        first, last = layout.bands[device]
        assert first <= layout.rows[op] <= last
    used = sorted(band for band in layout.bands if band is not None)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(used))


def test_backward_runs_back_below_forward():
    back = (
        Op("b'", 1, phase="backward", forward=(1,)),
        Op("a'", 1, phase="backward", forward=(0,)),
    )
    edges = ((0, 1), (1, 2), (2, 3), (3, 4))
    graph = OpGraph(
        (Op("a", 1), Op("b", 1), Op("loss", 1, phase="loss"), *back),
        tuple(Tensor(a, (b,), 1) for a, b in edges),
    )
    layout = lay_out(graph, (0,) * 5, 1)
    assert layout.columns == (0, 1, 2, 1, 0)
    assert layout.rows == (0, 0, 0, 1, 1)
    assert layout.bands == ((0, 1),)


def test_branches_keep_their_row_and_what_is_alone_stands_beside_its_neighbor():
    #     /-> b -> d -\
    #   a              f      g is used by nobody and uses nothing
    #     \-> c -> e -/
    graph = OpGraph(
        tuple(Op(name, 1) for name in "abcdefg"),
        tuple(Tensor(op, uses, 1) for op, uses in enumerate([(1, 2), (3,), (4,), (5,), (5,)])),
    )
    layout = lay_out(graph, (0,) * 7, 1)
    assert layout.columns == (0, 1, 1, 2, 2, 3, 3)
    assert layout.rows == (0, 0, 1, 0, 1, 0, 1)


def test_sections_name_the_parts_of_a_model_at_a_readable_distance():
    graph = OpGraph(
        tuple(Op(f"h.{block}.{part}/op", 1) for block in range(3) for part in ("attn", "mlp")),
        tuple(Tensor(op, (op + 1,), 1) for op in range(5)),
    )
    columns = tuple(range(6))
    assert sections(graph, columns, most=3) == [(0, "h.0"), (2, "h.1"), (4, "h.2")]
    assert len(sections(graph, columns)) == 6
    assert sections(graph, columns, most=1) == [(0, "h")]
    assert sections(OpGraph((Op("a", 1),)), (0,)) == []
    wide = OpGraph(tuple(Op(f"part{i}/x", 1) for i in range(99)))
    assert sections(wide, tuple(range(99))) == []


def test_the_text_says_what_matters():
    text = str(text_report(Plan(*PARTS, TRACED, MEASURED)))
    flat = " ".join(text.split())
    assert "One step takes 60 ns on 2 of 2 devices; no placement can take less than" in flat
    assert "The fullest device is cpu:0: 130 B of 1000 B (13%)." in flat
    assert "30 B move between devices in 1 transfer." in flat
    assert re.search(r"cpu:0 +2 +25% +130 B +1000 B +13% +0 B +30 B", text)
    assert re.search(r"cpu:1 +1 +33% +241 B +2.0 MiB +0% +30 B +0 B", text)
    assert re.search(r"single/cpu:0 +35 ns *\n", text)
    assert re.search(r"m-etf/fine +60 ns +chosen", text)
    assert "makespan_ns" not in text, "it stands with the candidates"
    assert re.search(r"step +60 ns +66 ns +-9.1 %", text)
    assert re.search(r"peak memory of cpu:1 +241 B +300 B +-19.7 %", text)
    assert re.search(r"bytes moved +30 B +30 B +\+0.0 %", text)
    assert "torch.export (non-strict) ValueError: [bold] toy.py:9" in flat
    assert "torch.fx taken" in flat
    drawn = io.StringIO()
    Console(file=drawn, width=60).print(text_report(Plan(*PARTS)))
    assert max(map(len, drawn.getvalue().splitlines())) <= 60
    assert "\N{HORIZONTAL ELLIPSIS}" not in drawn.getvalue(), "a number that is cut is another"


def test_a_placement_that_does_not_fit_is_called_so():
    small = Cluster.connected([Device("cpu:0", 100), Device("cpu:1", 2 * MIB)], Link(0, 10**9))
    report = str(text_report(Plan(GRAPH, small, PLACEMENT, SCHEDULE)))
    assert "30 B too much: this placement does not fit" in " ".join(report.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({0: OpGraph((Op("x", 1),))}, "the placement is of graph .* solve this graph"),
        ({1: Cluster.uniform(1, 1000, Link(0, 1))}, "uses device 1, but the cluster has 1 devices"),
        ({3: Schedule((), (), (0, 0))}, "the schedule is not of this placement of 3 ops"),
        ({3: Schedule(SCHEDULE.spans, (), (0,))}, "simulate the placement again"),
        (
            {3: Schedule(SCHEDULE.spans, (Transfer(9, 0, 1, 0, 0),), (0, 0))},
            "simulate the placement again",
        ),
    ],
)
def test_values_that_do_not_belong_together_are_refused(changes, said):
    parts = [changes.get(index, part) for index, part in enumerate(PARTS)]
    with pytest.raises(InputError, match=said):
        Plan(*parts)


def test_a_measurement_of_other_devices_is_refused():
    with pytest.raises(InputError, match="peaks of 1 devices were measured; there are 2"):
        Plan(*PARTS, measured=Measurement(1, (1,), (1,)))


def test_a_state_that_was_not_there_is_taken_off_the_prediction():
    measured = Measurement(60, (100, 241), (60,), 0, absent_bytes=(30, 0))
    text = str(text_report(Plan(*PARTS, measured=measured)))
    assert re.search(
        r"peak memory of cpu:0 without 30 B of optimizer state +100 B +100 B +\+0.0 %", text
    )
    assert re.search(r"peak memory of cpu:1 +241 B +241 B +\+0.0 %", text)
    assert re.search(r"bytes moved +30 B +0 B +- *\n", text)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.stack = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.stack.append(tag)

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text.append(data)


def page_of(path):
    page = _Page()
    page.feed(path.read_text())
    return page


@drawn
def test_the_page_stands_alone_and_says_what_the_text_says(tmp_path):
    path = tmp_path / "plan.html"
    write_html(path, Plan(*PARTS, TRACED, MEASURED))
    page = page_of(path)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img"), attributes
        assert "src" not in attributes
        assert not attributes.get("href", "").startswith("http")
    text = " ".join(" ".join(page.text).split())
    assert "Baechi: Toy on 2 devices" in text
    assert "One step takes 60 ns on 2 of 2 devices" in text
    assert "130 B of 1000 B" in text
    assert "copies received 30 B" in text
    assert "ValueError: [bold] toy.py:9" in text
    assert "m-etf/fine" in text
    assert "-9.1 %" in text
    assert "h.1/<b>" in text
    assert "cpu:0 → cpu:1" in text
    ids = [attributes.get("id") for tag, attributes in page.tags if tag == "div"]
    assert {"graph", "time"} <= set(ids)
    assert "Plotly.newPlot" in path.read_text()


@drawn
def test_the_page_says_what_is_held_beside_what_the_clock_has(tmp_path):
    """In the order in which a training step runs, or by streams."""
    schedule = Schedule(
        *(SCHEDULE.spans, SCHEDULE.transfers, (135, 241)),
        late_bound=lambda: SCHEDULE.lower_bound_ns,
    )
    for name, own in (("clock", SCHEDULE), ("run", schedule)):
        write_html(tmp_path / f"{name}.html", Plan(GRAPH, CLUSTER, PLACEMENT, own))
    assert "as it runs" not in (tmp_path / "clock.html").read_text()
    text = " ".join(" ".join(page_of(tmp_path / "run.html").text).split())
    assert "tensors made here 30 B, more as it runs 5 B" in text


@drawn
def test_the_page_is_the_same_every_time(tmp_path):
    for name in ("one.html", "two.html"):
        write_html(tmp_path / name, Plan(*PARTS, TRACED))
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


@drawn
def test_names_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x>"
    graph = OpGraph((Op(evil, 1),))
    cluster = Cluster((Device(evil, 10),), ((None,),))
    placement = solve(graph, cluster, placer="single")
    schedule = simulate(graph, cluster, placement)
    plan = Plan(graph, cluster, placement, schedule)
    write_html(tmp_path / "evil.html", plan, title=evil)
    body = (tmp_path / "evil.html").read_text()
    assert "<script>alert" not in body
    assert all(tag != "img" for tag, _ in page_of(tmp_path / "evil.html").tags)


@drawn
def test_the_pictures_hold_every_op_transfer_and_limit():
    plan = Plan(*PARTS, TRACED)
    points = [t for t in graph_figure(plan).data if t.mode == "markers" and t.name]
    assert [(trace.name, len(trace.x)) for trace in points] == [("cpu:0", 2), ("cpu:1", 1)]
    assert [trace.marker.color for trace in points] == [color(0), color(1)]
    hover = points[0].hovertext[0]
    assert "h.0/a" in hover
    assert "toy.py:3 forward: a = &lt;x&gt;" in hover
    assert "30 B" in hover
    figure = time_figure(plan)
    bars = {trace.name: trace for trace in figure.data if trace.type == "bar"}
    assert list(bars["cpu:0"].base) == [0, 10]
    assert list(bars["cpu:0"].x) == [10, 5]
    assert list(bars["to cpu:1"].base) == [10]
    assert list(bars["to cpu:1"].marker.color) == [color(0)]
    assert bars["to cpu:1"].marker.line.width > 0, "or what takes no time is not drawn"
    assert bars["to cpu:0"].marker.line.width == 0, "or there is a tick where nothing arrives"
    lines = {trace.name: trace for trace in figure.data if trace.type == "scatter"}
    assert list(lines["cpu:1"].y) == [200, 230, 241, 200]
    assert list(lines["limit of cpu:0"].y) == [1000, 1000]
    assert "limit of cpu:1" not in lines  # 2 MiB: it would leave all else at the bottom
    assert figure.layout.yaxis2.title.text == "bytes in memory"
    equal = Cluster.uniform(2, 1000, Link(0, 10**9))
    figure = time_figure(Plan(GRAPH, equal, PLACEMENT, SCHEDULE))
    assert "limit of every device" in [trace.name for trace in figure.data]
    roomy = Cluster.uniform(2, "1GiB", Link(0, 10**9))
    figure = time_figure(Plan(GRAPH, roomy, PLACEMENT, SCHEDULE))
    assert not [trace.name for trace in figure.data if "limit" in trace.name]
    assert figure.layout.yaxis2.title.text == "bytes, far below all limits"


def test_colors_are_told_apart():
    assert len(set(COLORS)) == 8
    assert color(8) == color(0)


def test_without_plotly_the_page_says_how_to_get_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def hide(name, *args, **kwargs):
        if name.partition(".")[0] == "plotly":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", hide)
    with pytest.raises(InputError, match=r"pip install 'baechi\[viz\]'"):
        write_html(tmp_path / "plan.html", Plan(*PARTS))
    assert list(tmp_path.iterdir()) == []


def test_the_trace_is_what_perfetto_reads(tmp_path):
    path = tmp_path / "plan.trace.json"
    write_trace(path, Plan(*PARTS, TRACED))
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert events == trace_events(Plan(*PARTS, TRACED))
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == {"name": "cpu:0"}
    assert names["process_name", 2, 0] == {"name": "cpu:1"}
    threads = {key[1:]: args["name"] for key, args in names.items() if key[0] == "thread_name"}
    assert threads == {(1, 1): "compute", (1, 100): "send", (2, 1): "compute", (2, 200): "receive"}
    slices = [(e["name"], e["cat"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("h.0/a", "compute", 1, 0.0, 0.01),
        ("h.1/<b>", "compute", 2, 0.04, 0.02),
        ("h.1/c", "compute", 1, 0.01, 0.005),
        ("h.0/a", "send", 1, 0.01, 0.03),
        ("h.0/a", "receive", 2, 0.01, 0.03),
    ]
    assert all(type(e[key]) is float for e in events for key in ("ts", "dur") if key in e)
    flow = [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] in "stf"]
    assert flow == [("s", 1, 1, 0.0), ("t", 1, 100, 0.01), ("t", 2, 200, 0.01), ("f", 2, 1, 0.04)]
    memory = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert (2, 0.04, 241) in memory
    first = next(e for e in events if e["ph"] == "X")
    assert first["args"]["source"] == "toy.py:3 forward: a = <x>"


# Two batches: a of the second runs while b of the first does.
TURNS = ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (1, 1))
PIPELINED = replace(
    PLACEMENT, order=(0, 1, 2), microbatches=2, turns=tuple(sorted(TURNS, key=lambda t: t[1]))
)


def pipelined_plan():
    segments = segments_of(GRAPH, PIPELINED)
    assert segments == ((0,), (1,), (2,))
    return Plan(GRAPH, CLUSTER, PIPELINED, simulate(GRAPH, CLUSTER, PIPELINED), TRACED)


def test_a_plan_of_micro_batches_is_of_all_and_knows_one():
    plan = pipelined_plan()
    assert plan.microbatches == 2
    assert plan.placement.devices == (0, 1, 0) * 2
    assert plan.sources == Plan(*PARTS, TRACED).sources * 2
    assert plan.one.graph is GRAPH
    assert plan.one.schedule == SCHEDULE
    text = " ".join(str(text_report(plan)).split())
    assert "One step of 2 micro-batches takes" in text
    assert "3 segments take turns" in text
    assert "one micro-batch after the other would take 120 ns" in text
    assert "micro-batch" not in str(text_report(Plan(*PARTS, TRACED)))


def test_a_trace_of_micro_batches_has_their_turns():
    plan = pipelined_plan()
    events = trace_events(plan)
    turns = [e for e in events if e.get("cat") == "turn"]
    assert [(e["args"]["segment"], e["args"]["batch"]) for e in turns] == list(PIPELINED.turns)
    assert {e["name"] for e in turns} == {"forward of batch 0", "forward of batch 1"}
    spans = {s.op: s for s in plan.schedule.spans}
    assert [(e["pid"], e["ts"], e["dur"]) for e in turns] == [
        (s.device + 1, s.start_ns / 1000, (s.end_ns - s.start_ns) / 1000)
        for segment, batch in PIPELINED.turns
        for s in [spans[3 * batch + segment]]
    ]
    batches = [(e["name"], e["args"]["batch"]) for e in events if e.get("cat") == "compute"]
    assert ("h.0/a", 0) in batches
    assert ("h.0/a@1", 1) in batches


@drawn
def test_a_page_of_micro_batches_draws_the_graph_once(tmp_path):
    write_html(tmp_path / "plan.html", pipelined_plan())
    graph, _, rest = (tmp_path / "plan.html").read_text().partition("<h2>The step over time</h2>")
    assert "a@1" not in graph.partition("<h2>The graph by device</h2>")[2]
    assert "a@1" in rest.partition("<h2>Details</h2>")[0]


@drawn
def test_the_tables_of_micro_batches_have_each_op_and_each_transfer_once(tmp_path):
    write_html(tmp_path / "plan.html", pipelined_plan())
    tables = (tmp_path / "plan.html").read_text().partition("<h2>Details</h2>")[2]
    assert tables.count("<td>h.0/a</td>") == 3  # slowest, largest, sent
    assert "@1" not in tables


# One host launches a, b and c in 0 to 30, 30 to 60 and 60 to 90; nothing waits for anything else.
LAUNCHED = replace(GRAPH, ops=tuple(replace(op, launch_ns=30) for op in GRAPH.ops))
HOSTED = replace(
    CLUSTER, devices=tuple(replace(device, host="python") for device in CLUSTER.devices)
)


def launched_plan(graph=LAUNCHED, cluster=HOSTED):
    placement = replace(PLACEMENT, graph_digest=graph.digest)
    return Plan(graph, cluster, placement, simulate(graph, cluster, placement))


def test_a_host_has_a_row_in_text_and_trace():
    plan = launched_plan()
    assert re.search(r"host python +3 +95%", str(text_report(plan)))
    events = trace_events(plan)
    names = [e["args"].get("name") for e in events if e["ph"] == "M" and e["pid"] == 3]
    assert names == ["host python", None, "launch"]
    slices = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 3]
    assert slices == [("h.0/a", 0.0, 0.03), ("h.1/<b>", 0.03, 0.03), ("h.1/c", 0.06, 0.03)]


@drawn
def test_a_host_is_drawn(tmp_path):
    bars = {trace.name: trace for trace in time_figure(launched_plan()).data if trace.type == "bar"}
    lane = bars["host python"]
    assert (list(lane.base), list(lane.x)) == ([0, 30, 60], [30, 30, 30])
    assert list(lane.marker.color) == [color(0), color(1), color(0)]
    devices = tuple(replace(device, host="a&b") for device in HOSTED.devices)
    write_html(tmp_path / "plan.html", launched_plan(cluster=replace(HOSTED, devices=devices)))
    assert '<td>host a&amp;b</td><td class="n">3</td>' in (tmp_path / "plan.html").read_text()
    assert not [name for name in time_figure(Plan(*PARTS)).data if name.name == "host python"]


def test_who_is_bound_by_launches_is_told_what_ends_that():
    said = str(text_report(launched_plan())).split()
    text = " ".join(said)
    assert "bound by launches: host python is busy with them for 90 ns, and if they took no" in text
    assert "a step would take 60 ns" in text
    for way in ('cuda_graphs="auto"', "compile=True", "larger batch", "fewer devices"):
        assert way in text
    alone = replace(PLACEMENT, graph_digest=LAUNCHED.digest, devices=(0, 0, 0))
    plan = Plan(LAUNCHED, HOSTED, alone, simulate(LAUNCHED, HOSTED, alone))
    text = " ".join(str(text_report(plan)).split())
    assert "a larger batch." in text
    assert "fewer devices" not in text
    # As many launches that all but the first hide behind work are not worth a word.
    short = replace(LAUNCHED, ops=tuple(replace(op, launch_ns=2) for op in GRAPH.ops))
    assert "bound by launches" not in str(text_report(launched_plan(short)))
    assert "bound by launches" not in str(text_report(Plan(*PARTS)))


def test_who_is_bound_by_hand_overs_is_told_so():
    # Two tensors of 30 bytes, and 40 of the host for each; b and c wait for nothing else.
    link = Link(0, 1_000_000_000, overhead_ns=40)
    cluster = replace(HOSTED, links=((None, link), (link, None)))
    graph = replace(GRAPH, tensors=(Tensor(0, (1,), 30), Tensor(1, (2,), 30)))
    plan = launched_plan(graph, cluster)
    assert plan.schedule.makespan_ns == 95  # c is handed over after 80, its input comes at 90
    assert plan.unlaunched_ns == 95
    assert "bound by launches" not in str(text_report(plan))
    slow = replace(link, overhead_ns=400)
    plan = launched_plan(graph, replace(cluster, links=((None, slow), (slow, None))))
    assert (plan.schedule.makespan_ns, plan.unlaunched_ns) == (805, 95)
    text = " ".join(str(text_report(plan)).split())
    assert "host python is busy with them for 800 ns, and if they took no time" in text
    assert "a larger batch or fewer devices end that" in text
    assert "compile=True" not in text
    assert [(row.op, row.end_ns) for row in plan.launches["python"]] == [(1, 400), (2, 800)]


@given(plans())
def test_slices_of_one_thread_never_overlap(plan):
    threads = {}
    for event in trace_events(Plan(*plan)):
        if event["ph"] == "X":
            ends = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(ends)
    for slices in threads.values():
        slices.sort()
        for one, other in itertools.pairwise(slices):
            assert one[1] <= other[0] + 1e-9


def test_pools_share_one_profile():
    cluster = Cluster.connected(
        [Device("a", 1000, pool="gpu"), Device("b", 1000, pool="gpu")], Link(3, 10**9)
    )
    schedule = simulate(GRAPH, cluster, PLACEMENT)
    one, other = memory_profile(GRAPH, cluster, schedule)
    assert one == other
    assert max(nbytes for _, nbytes in one) == schedule.peak_bytes[0] == schedule.peak_bytes[1]


def test_what_was_measured_comes_before_what_else_there_was():
    placement = Placement(GRAPH.digest, (0, 1, 0), (0, 1, 2), "auto", {"m-etf/fine": 1})
    measured = Measurement(35, (300, 241), (35,))
    text = str(text_report(Plan(GRAPH, CLUSTER, placement, SCHEDULE, measured=measured)))
    headings = ("Devices", "Predicted beside measured", "What auto chose from")
    assert sorted(headings, key=text.index) == list(headings)
