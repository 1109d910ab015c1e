import hashlib
import json
import os
import stat
import string
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi.errors import FormatError, InputError
from baechi.records.cluster import PORTS, Cluster, Device, Link
from baechi.records.graph import Op, OpGraph, Tensor
from baechi.records.op_costs import OpCost, Profile
from baechi.records.placement import Measurement, Placement, Schedule, Span, Transfer
from baechi.storage.codec import codec
from baechi.storage.serialization import TYPES, VERSION, dump, dumps, load, loads, write_whole
from baechi.traced.operators import Attempt, TracedOp, TracedTensor
from baechi.traced.traced_model import Traced
from baechi.validation import INT64_MAX

COUNTS = st.integers(0, INT64_MAX)
NAMES = st.text(min_size=1, max_size=12)
DIGESTS = st.text(string.hexdigits, min_size=8, max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SPEEDS = st.floats(1e-3, 1e3)
OPS = st.builds(Op, NAMES, COUNTS, COUNTS, COUNTS, st.none() | NAMES)
TENSORS = st.builds(
    Tensor, st.integers(0, 5), st.lists(st.integers(6, 9)).map(tuple), COUNTS, st.booleans()
)
LINKS = st.builds(Link, COUNTS, st.integers(1, INT64_MAX), st.just(0) | COUNTS)
DEVICES = st.builds(Device, NAMES, COUNTS, SPEEDS, st.text(max_size=5))
SPANS = st.builds(Span, COUNTS, COUNTS, COUNTS, COUNTS)
TRANSFERS = st.builds(Transfer, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
COSTS = st.builds(OpCost, *[COUNTS] * 6)
TRACED_OPS = st.builds(
    TracedOp,
    NAMES,
    st.lists(NAMES, max_size=3).map(tuple),
    NAMES,
    parameters=st.lists(NAMES, max_size=3).map(tuple),
    trained_bytes=COUNTS,
    saves=st.lists(COUNTS, max_size=3).map(tuple),
    differentiable=st.booleans(),
    group=st.none() | NAMES,
    source=st.text(max_size=20),
)
TRACED_TENSORS = st.builds(
    TracedTensor, COUNTS, st.lists(COUNTS, max_size=3).map(tuple), COUNTS, st.booleans()
)


@st.composite
def graphs(draw):
    ops = draw(st.lists(OPS, max_size=6, unique_by=lambda op: op.name))
    tensors = []
    for producer in range(len(ops)):
        later = st.lists(st.integers(producer + 1, len(ops) - 1), max_size=3)
        consumers = draw(later) if producer + 1 < len(ops) else []
        tensors.append(Tensor(producer, tuple(consumers), draw(COUNTS), draw(st.booleans())))
    row = st.lists(COUNTS, min_size=len(ops), max_size=len(ops)).map(tuple)
    return OpGraph(tuple(ops), tuple(tensors), draw(st.dictionaries(NAMES, row, max_size=2)))


@st.composite
def clusters(draw):
    devices = draw(st.lists(DEVICES, min_size=1, max_size=3, unique_by=lambda d: d.name))
    n = len(devices)
    row = st.lists(st.none() | LINKS, min_size=n, max_size=n)
    links = draw(st.lists(row, min_size=n, max_size=n))
    return Cluster(tuple(devices), tuple(map(tuple, links)), draw(st.sampled_from(PORTS)))


@st.composite
def placements(draw):
    n = draw(st.integers(0, 40))
    devices = draw(st.lists(st.integers(0, 7), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    stats = draw(st.dictionaries(NAMES, COUNTS | FLOATS | st.text(max_size=9), max_size=3))
    return Placement(draw(DIGESTS), tuple(devices), tuple(order), draw(NAMES), stats)


VALUES = st.one_of(
    OPS,
    TENSORS,
    LINKS,
    DEVICES,
    graphs(),
    clusters(),
    placements(),
    SPANS,
    TRANSFERS,
    st.builds(
        Schedule,
        st.lists(SPANS, max_size=3).map(tuple),
        st.lists(TRANSFERS, max_size=3).map(tuple),
        st.lists(COUNTS, max_size=3).map(tuple),
        COUNTS,
    ),
    COSTS,
    st.builds(
        Profile,
        DIGESTS,
        st.text(max_size=5),
        st.lists(COSTS, max_size=3).map(tuple),
        st.sampled_from(("measured", "computed")),
    ),
    st.integers(0, 3).flatmap(
        lambda n: st.builds(
            Measurement,
            COUNTS,
            st.tuples(*[COUNTS] * n),
            st.lists(COUNTS, max_size=3).map(tuple),
            COUNTS,
            st.tuples(*[COUNTS] * n),
        )
    ),
    st.builds(
        Traced,
        NAMES,
        st.lists(TRACED_OPS, max_size=3).map(tuple),
        st.lists(TRACED_TENSORS, max_size=3).map(tuple),
        st.lists(st.builds(Attempt, NAMES, NAMES), min_size=1, max_size=2).map(tuple),
        st.booleans(),
    ),
)


def wrapped(kind, value, **changes):
    return json.dumps(
        {"format": "baechi", "type": kind, "version": VERSION, "value": value, **changes}
    )


GRAPH = OpGraph(
    (Op("a", 5, 7), Op("b", 6, group="g"), Op("c", 0)),
    (Tensor(0, (1, 2), 100), Tensor(2, (), 8, kept=True)),
    {"H100": (1, 2, 3)},
)


@given(VALUES)
def test_every_value_survives_a_round_trip_with_the_same_bytes(value):
    text = dumps(value)
    again = loads(text)
    assert type(again) is type(value)
    assert again == value
    assert dumps(again) == text


def test_the_file_of_a_graph_looks_as_documented(tmp_path):
    path = tmp_path / "g.graph.json"
    dump(GRAPH, path)
    envelope = json.loads(path.read_text())
    assert list(envelope) == ["format", "type", "version", "digest", "value"]
    assert (envelope["format"], envelope["type"], envelope["version"]) == ("baechi", "OpGraph", 2)
    assert envelope["value"] == {
        "ops": [
            {"name": "a", "time_ns": 5, "persistent_bytes": 7},
            {"name": "b", "time_ns": 6, "group": "g"},
            {"name": "c", "time_ns": 0},
        ],
        "tensors": [
            {"producer": 0, "consumers": [1, 2], "nbytes": 100},
            {"producer": 2, "consumers": [], "nbytes": 8, "kept": True},
        ],
        "times": {"H100": [1, 2, 3]},
    }
    canonical = json.dumps(envelope["value"], sort_keys=True, separators=(",", ":"))
    assert envelope["digest"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert '   {"name": "a", "time_ns": 5, "persistent_bytes": 7},\n' in path.read_text()
    assert load(path, OpGraph) == GRAPH
    assert load(path, expect=OpGraph).digest == GRAPH.digest


def test_long_lists_of_numbers_fill_their_lines():
    schedule = Schedule((), (), tuple(range(10**6, 10**6 + 100)))
    lines = dumps(schedule).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 25


def test_equal_values_give_equal_bytes_whatever_the_order_of_a_mapping():
    one = Placement("d", (0,), (0,), "auto", {"x": 1, "y": 2})
    two = Placement("d", (0,), (0,), "auto", {"y": 2, "x": 1})
    assert one == two
    assert dumps(one) == dumps(two)


def test_a_traced_model_loses_its_module_only():
    op = TracedOp("a", ("n",), "k", source="model.py:3")
    traced = Traced("M", (op,), (), (Attempt("export"),), True, module=object())
    again = loads(dumps(traced))
    assert again == traced
    assert again.module is None
    assert again.digest == traced.digest


def test_a_link_without_overhead_is_written_as_before():
    written = [dumps(Cluster.uniform(2, 9, link)) for link in (Link(5, 7), Link(5, 7, 3))]
    assert '{"latency_ns": 5, "bytes_per_s": 7}' in " ".join(written[0].split())
    assert "overhead_ns" not in written[0]
    assert loads(written[1]).uniform_link == Link(5, 7, overhead_ns=3)


# As version 1 wrote a training step: a and b, b again, and what none of them belongs to.
OLD_NAMES = ("a", "m/b", "loss", "recompute:m", "backward:m/b", "backward:a")
OLD_TENSORS = (Tensor(0, (1, 3), 8), Tensor(1, (2,), 8), Tensor(1, (3,), 0), Tensor(2, (3, 4), 8),
               Tensor(3, (4,), 5), Tensor(4, (5,), 8))  # fmt: skip


def of_version_1(names):
    ops = tuple(Op(name, 1) for name in names)
    raw = json.loads(dumps(OpGraph(ops, OLD_TENSORS)))
    return loads(json.dumps({**raw, "version": 1}), OpGraph), OpGraph(ops, OLD_TENSORS).digest


def test_a_training_graph_of_version_1_gets_its_phases_and_keeps_its_digest():
    graph, digest = of_version_1(OLD_NAMES)
    assert [(op.phase, op.forward) for op in graph.ops] == [
        *[("forward", ())] * 2,
        ("loss", ()),
        ("recompute", (1,)),
        ("backward", (1,)),
        ("backward", (0,)),
    ]
    assert (graph.n_forward, graph.twins, graph.units) == (2, (5, 4), {3: (1,)})
    assert graph.digest == digest
    assert loads(dumps(graph)) == graph


@pytest.mark.parametrize("other", ["backward of a", "backward:x", "backward:loss", "recompute:"])
def test_a_graph_of_version_1_whose_names_are_no_training_step_has_one_phase(other):
    graph, digest = of_version_1((*OLD_NAMES[:5], other))
    assert {op.phase for op in graph.ops} == {"forward"}
    assert graph.digest == digest


def test_a_file_written_by_hand_needs_no_digest_and_no_defaults():
    text = wrapped("Cluster", {"devices": [{"name": "d", "memory_bytes": 9, "speed": 2}],
                               "links": [[None]]})  # fmt: skip
    assert loads(text) == Cluster((Device("d", 9, 2.0),), ((None,),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ends too early (line 1, column 1)"),
        (dumps(GRAPH)[:200], "ends too early (line 8, column 32)"),
        (dumps(GRAPH)[:163], "ends too early"),
        ("nonsense", "not JSON: Expecting value at line 1, column 1"),
        ('{"format": "baechi" "type"}', "at line 1, column 21"),
        ("[]", 'no JSON object with "format"'),
        ("{}", 'no JSON object with "format"'),
        ('{"format": "onnx"}', "its format is 'onnx', not 'baechi'"),
        ('{"format": "baechi", "format": "x"}', "the key 'format' occurs twice"),
        ('{"format": NaN}', "NaN"),
        ('{"format": ' + "1" * 5000 + "}", "digits"),
        ("[" * 100_000, "nested too deeply"),
        (wrapped("Op", {}, version=3), "written by version 3, this Baechi reads 1 to 2"),
        (wrapped("Op", {}, version="1"), "version is '1'"),
        (wrapped("Op", {}, version=True), "version is True"),
        (wrapped("Job", {}), "type is 'Job'; it must be one of Op, "),
        (wrapped(["Op"], {}), "type is ['Op']"),
        (wrapped("Op", {}, digset=""), "unknown field 'digset'"),
        (wrapped("Op", {}, digest="0"), "the digest does not match"),
        ('{"format": "baechi", "type": "Op", "version": 2}', "the field 'value' is missing"),
        (wrapped("Op", []), "value is a list; it must be an object of type Op"),
        (wrapped("Op", {"name": "a"}), "time_ns is missing"),
        (wrapped("Op", {"name": "a", "time": 1}), "time is unknown; the fields of Op are name, "),
        (wrapped("Op", {"name": "a", "time_ns": -1}), "time_ns of op 'a' is -1"),
        (wrapped("Op", {"name": "a", "time_ns": True}), "time_ns is true; it must be an integer"),
        (wrapped("Op", {"name": "a", "time_ns": 2**70}), "does not fit 64 bits"),
        (wrapped("Op", {"name": None, "time_ns": 1}), "name is null; it must be a string"),
        (wrapped("Op", {"name": "a", "time_ns": 1, "group": 3}), "group is 3, an integer"),
        (wrapped("OpGraph", {"ops": {}}), "ops is an object; it must be a list"),
        (
            wrapped("OpGraph", {"ops": [{"name": "a", "time_ns": 1},
                                        {"name": "b", "time_ns": 1.5}]}),
            "ops[1].time_ns is 1.5, a number; it must be an integer",
        ),
        (
            wrapped("OpGraph", {"ops": [{"name": "a", "time_ns": 1}, {"name": "", "time_ns": 1}]}),
            "ops[1]: op name is ''; it must be a non-empty string",
        ),
        (
            wrapped("OpGraph", {"ops": [{"name": "a", "time_ns": 1}], "times": {"cpu": [1, "2"]}}),
            "times['cpu'][1] is '2', a string",
        ),
        (
            wrapped("OpGraph", {"ops": [{"name": "a", "time_ns": 1}], "times": {"cpu": []}}),
            "times['cpu'] has 0 entries for 1 ops",
        ),
        (
            wrapped("OpGraph", {"ops": [],
                                "tensors": [{"producer": 0, "consumers": [], "nbytes": 1}]}),
            "tensor 0 names op 0, but there are 0 ops",
        ),
        (
            wrapped("Cluster", {"devices": [{"name": "d", "memory_bytes": 1}],
                                "links": [[{"latency_ns": 0, "bytes_per_s": 0}]]}),
            "links[0][0]: bytes_per_s of a link is 0",
        ),
        (
            wrapped("Cluster", {"devices": [{"name": "d", "memory_bytes": 1}], "links": [[7]]}),
            "links[0][0] is 7, an integer; it must be an object of type Link",
        ),
        (wrapped("Cluster", {"devices": [], "links": []}), "a cluster has no devices"),
        (
            wrapped("Placement", {"graph_digest": "d", "devices": [0], "order": [0],
                                  "stats": {"gap": [1]}}),
            "stats['gap'] is a list; it must be an integer or a number or a string",
        ),
        (
            wrapped("Placement", {"graph_digest": "d", "devices": [0], "order": [1]}),
            "no permutation",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name_and_field(tmp_path, text, said):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_another_type_than_expected_is_refused():
    with pytest.raises(FormatError, match="holds type OpGraph, but Cluster is wanted"):
        loads(dumps(GRAPH), Cluster)


def test_every_single_damaged_byte_is_noticed():
    text = dumps(GRAPH)
    start = text.index('"value"')
    for at in range(start, len(text)):
        if text[at].isalnum():
            damaged = text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]
            with pytest.raises(FormatError):
                loads(damaged)


def test_every_truncation_is_noticed():
    text = dumps(GRAPH).rstrip()
    for length in range(len(text)):
        with pytest.raises(FormatError):
            loads(text[:length])


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        load(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot read .*directory"):
        load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b'{"\xff')
    with pytest.raises(FormatError, match=r"binary\.json: byte 2 is not UTF-8"):
        load(tmp_path / "binary.json")


def test_a_value_of_no_type_or_that_json_cannot_hold_is_refused():
    with pytest.raises(InputError, match="type dict cannot be saved; give one of Op, "):
        dumps({})
    with pytest.raises(InputError, match=r"Placement: stats\['gap'\] is inf, which JSON cannot"):
        dumps(Placement("d", (), (), "auto", {"gap": float("inf")}))
    with pytest.raises(InputError, match=r"spans\[0\]\.op is '0', a string"):
        dumps(Schedule((Span("0", 0, 0, 0),), (), ()))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    dump(GRAPH, path)
    before = path.read_bytes()

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match=r"cannot write .*No space left"):
        dump(Op("x", 1), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    with pytest.raises(InputError, match=r"cannot write .*No such file"):
        dump(GRAPH, tmp_path / "no" / "such" / "folder.json")


def test_a_write_follows_links_and_does_not_replace_devices(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_whole(tmp_path / "link.json", "text")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "text"
    write_whole(os.devnull, "text")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_every_type_of_every_field_has_acodec():
    assert set(TYPES) == {
        *("Op", "Tensor", "OpGraph", "Device", "Link", "Cluster", "Placement", "Span"),
        *("Transfer", "Schedule", "OpCost", "Profile", "Traced", "Constraints"),
        "Program",
        "Measurement",
        "Calibration",
        "Topology",
    }
    for kind in TYPES.values():
        assert is_dataclass(kind)
        for field in fields(kind):
            if field.metadata.get("json", True):
                assert codec(get_type_hints(kind)[field.name])


def test_a_hint_without_a_json_form_is_an_error_of_the_dataclass():
    @dataclass(frozen=True)
    class Odd:
        table: Mapping[int, int]

    with pytest.raises(TypeError, match="no JSON form is known"):
        codec(Odd)
