import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import baechi
from baechi import (
    Cluster,
    Device,
    FormatError,
    InputError,
    Link,
    Op,
    OpGraph,
    ReservationError,
    Tensor,
    Topology,
)
from baechi.scheduling.claims import PROFILES, Claim, Use
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.snapshot import claims_of

LINK = Link(10, 10**9)
CLUSTER = Cluster.uniform(3, 100, LINK)
# Every way of sharing, and a pool of two.
MIXED = Cluster.connected(
    (
        Device("part", 100),
        Device("whole", 100, speed=2.0),
        Device("cut", 80, kind="A"),
        Device("twin0", 60, pool="p"),
        Device("twin1", 60, pool="p"),
    ),
    LINK,
)
SHARING = {"whole": "whole", "cut": "mig"}
FORMS = pytest.mark.parametrize("kept", [False, True], ids=["memory", "file"])


def ledger(tmp_path, kept, cluster=CLUSTER, **options):
    return Ledger(cluster, tmp_path / "ledger.sqlite" if kept else None, **options)


def left(book, share=None):
    """Name, memory and speed of what is left."""
    rooms = book.snapshot().rooms(share)
    return {room.device.name: (room.device.memory_bytes, room.device.speed) for room in rooms}


def why(call, *args, **kwargs):
    with pytest.raises(ReservationError) as caught:
        call(*args, **kwargs)
    return caught.value.reason


@FORMS
def test_a_reservation_takes_memory_and_compute_and_a_release_restores_them(tmp_path, kept):
    book = ledger(tmp_path, kept)
    before = book.residual()
    assert before == CLUSTER
    made = book.reserve("a", [Claim("device0", 30, 250), Claim("device1", "1", 1000)])
    assert made.version == 1
    # A device without compute is not offered.
    assert left(book) == {"device0": (70, 0.75), "device2": (100, 1.0)}
    assert len(book.residual().devices) == 2
    assert book.release("a") == made
    assert book.residual() == before
    assert book.snapshot().version == 2
    book.close()


@FORMS
def test_what_does_not_fit_changes_nothing_not_even_the_first_of_its_claims(tmp_path, kept):
    book = ledger(tmp_path, kept)
    book.reserve("a", [Claim("device1", 80, 500)])
    before = book.snapshot()
    assert why(book.reserve, "b", [Claim("device0", 1, 1), Claim("device1", 21, 1)]) == "capacity"
    assert why(book.reserve, "b", [Claim("device0", 1, 1), Claim("device1", 1, 501)]) == "capacity"
    assert why(book.reserve, "a", [Claim("device0", 1, 1)]) == "duplicate"
    assert why(book.release, "b") == "unknown"
    for claims in ([], [Claim("device0", 1, 1)] * 2, [Claim("gpu", 1)]):
        with pytest.raises(InputError):
            book.reserve("b", claims)
    assert book.snapshot() == before
    book.reserve("b", [Claim("device0", 100, 1000), Claim("device1", 20, 500)])
    book.close()


def test_a_refusal_says_what_is_left_and_what_to_do():
    book = Ledger(Cluster.uniform(1, "10GiB", LINK))
    book.reserve("a", [Claim("device0", "9GiB", 300)])
    with pytest.raises(ReservationError, match=r"1\.0 GiB left, but 2\.0 GiB are claimed.*wait"):
        book.reserve("b", [Claim("device0", "2GiB", 1)])
    with pytest.raises(ReservationError, match="700 of 1000 of its compute left, but all"):
        book.reserve("b", [Claim("device0", 1)])


def test_a_whole_device_goes_to_one_job_and_an_exclusive_claim_takes_all():
    book = Ledger(MIXED, sharing=SHARING)
    (claim,) = book.reserve("a", [Claim("whole", 1, 1)]).claims
    assert claim == Claim("whole", 100, 1000)
    assert "whole" not in left(book)
    (claim,) = book.reserve("b", [Claim("part", 1, 1, exclusive=True)]).claims
    assert claim == Claim("part", 100, 1000, exclusive=True)
    assert why(book.reserve, "c", [Claim("part", 0, 1)]) == "capacity"
    book.release("b")
    book.reserve("c", [Claim("part", 0, 1)])
    assert why(book.reserve, "b", [Claim("part", 1, 1, exclusive=True)]) == "capacity"
    assert why(book.reserve, "b", [Claim("part", 101, exclusive=True)]) == "capacity"


def test_a_share_that_is_asked_for_is_all_that_is_offered():
    book = Ledger(MIXED, sharing=SHARING)
    book.reserve("a", [Claim("part", 0, 600)])
    assert left(book, 400)["part"] == (100, 0.4)
    assert "part" not in left(book, 401)
    # A whole device is given whole; a MIG device is cut as small as will do.
    assert left(book, 400)["whole"] == (100, 2.0)
    assert [name for name in left(book, 400) if name.startswith("cut")] == ["cut/3g@0", "cut/3g@4"]
    assert len([name for name in left(book, 142) if name.startswith("cut")]) == 7
    assert [name for name in left(book, 1000) if name.startswith("cut")] == ["cut/7g@0"]


def test_mig_instances_go_where_their_profile_may_start():
    book = Ledger(MIXED, sharing=SHARING)
    assert left(book)["cut/7g@0"] == (80, 1.0)
    made = book.reserve("a", [Claim("cut/1g", 5), Claim("cut/2g", 1), Claim("cut/3g@4", 40)])
    assert [claim.device for claim in made.claims] == ["cut/1g@0", "cut/2g@2", "cut/3g@4"]
    assert [claim.memory_bytes for claim in made.claims] == [10, 20, 40]
    assert {name for name in left(book) if name.startswith("cut")} == {"cut/1g@1"}
    assert left(book)["cut/1g@1"] == (10, 1 / 7)
    for name in ("cut/3g", "cut/7g@0", "cut/1g@0", "cut/2g@0"):
        assert why(book.reserve, "b", [Claim(name, 1)]) == "capacity"
    for name in ("cut/3g@1", "cut/5g", "cut", "part/3g"):
        with pytest.raises(InputError):
            book.reserve("b", [Claim(name, 1)])
    assert why(book.reserve, "b", [Claim("cut/1g@1", 11)]) == "capacity"
    book.release("a")
    assert left(book)["cut/7g@0"] == (80, 1.0)


@pytest.mark.parametrize("name", PROFILES)
def test_instances_never_have_more_than_seven_slices_of_compute(name):
    book = Ledger(MIXED, sharing=SHARING)
    book.reserve("a", [Claim(f"cut/{name}", 0)])
    slices = PROFILES[name].compute
    while rooms := [row.device.name for row in book.snapshot().rooms() if row.place == 2]:
        slices += PROFILES[rooms[0].split("/")[1].split("@")[0]].compute
        book.reserve(rooms[0], [Claim(rooms[0], 0)])
    assert slices <= 7


def test_a_pool_has_one_memory():
    book = Ledger(MIXED, sharing=SHARING)
    book.reserve("a", [Claim("twin0", 40, 100), Claim("twin1", 15, 100)])
    assert left(book)["twin0"] == left(book)["twin1"] == (5, 0.9)
    assert why(book.reserve, "b", [Claim("twin0", 3, 1), Claim("twin1", 3, 1)]) == "capacity"
    with pytest.raises(InputError, match="pool"):
        Ledger(MIXED, sharing={"twin0": "whole"})
    with pytest.raises(InputError, match="no device"):
        Ledger(MIXED, sharing={"gpu": "whole"})


def test_a_placement_is_claimed_as_it_was_simulated():
    graph = OpGraph(
        tuple(Op(f"op{i}", 1000, persistent_bytes=60) for i in range(3)),
        (Tensor(0, (1,), 8), Tensor(1, (2,), 8)),
    )
    book = Ledger(CLUSTER)
    view = book.residual(500)
    placement = baechi.solve(graph, view)
    peaks = baechi.simulate(graph, view, placement).peak_bytes
    made = book.reserve("a", claims_of(view, placement, peaks, 500), version=0)
    assert {claim.device: claim.memory_bytes for claim in made.claims} == {
        view.devices[at].name: peaks[at] for at in set(placement.devices)
    }
    # It fits a second time beside the first where memory is left, and not a third time.
    assert left(book)["device0"] == (100 - peaks[0], 0.5)
    pooled = Cluster.connected([Device("a", 200, pool="p"), Device("b", 200, pool="p")], LINK)
    both = baechi.Placement(graph.digest, (0, 1, 0), (0, 1, 2))
    peaks = baechi.simulate(graph, pooled, both).peak_bytes
    claims = claims_of(pooled, both, peaks, {"a": 10, "b": 20})
    assert claims == (Claim("a", peaks[0], 10), Claim("b", 0, 20))


def test_a_snapshot_is_stale_only_where_a_claimed_device_has_changed():
    book = Ledger(MIXED, sharing=SHARING)
    old = book.snapshot().version
    book.reserve("a", [Claim("part", 10, 10), Claim("twin0", 10, 10)])
    for device in ("part", "twin0", "twin1"):
        assert why(book.reserve, "b", [Claim(device, 1, 1)], version=old) == "stale"
    book.reserve("b", [Claim("whole", 1)], version=old)
    book.reserve("c", [Claim("part", 1, 1)], version=book.snapshot().version)
    assert why(book.reserve, "d", [Claim("cut/1g", 1)], version=99) == "stale"
    with pytest.raises(InputError):
        book.reserve("d", [Claim("cut/1g", 1)], version=-1)


def test_what_would_be_left_without_a_job_is_asked_without_side_effects():
    book = Ledger(CLUSTER)
    book.reserve("a", [Claim("device0", 30)])
    now = book.snapshot()
    assert now.without("a").residual().devices[0].name == "device0"
    assert book.snapshot() == now
    assert why(now.without, "b") == "unknown"
    for at in (1, 2):
        book.reserve(f"b{at}", [Claim(f"device{at}", 0)])
    assert why(book.residual) == "capacity"


@FORMS
def test_a_request_is_granted_once_whenever_it_is_repeated(tmp_path, kept):
    book = ledger(tmp_path, kept)
    claims = [Claim("device0", 60, 400)]
    assert why(book.reserve, "b", [Claim("device0", 101, 1)], request_id="r") == "capacity"
    made = book.reserve("a", claims, request_id="r")
    assert book.reserve("a", claims, request_id="r") == made
    assert why(book.reserve, "b", claims, request_id="r") == "duplicate"
    assert why(book.release, "a", request_id="r") == "duplicate"
    if kept:
        book.close()
        book = ledger(tmp_path, kept)
    gone = book.release("a", request_id="s")
    assert book.release("a", request_id="s") == gone == made
    assert book.reserve("a", claims, request_id="r") == made
    assert not book.snapshot().jobs
    with pytest.raises(InputError):
        book.release("a", request_id=7)
    book.close()


# The model: plain sums over who has what.
amounts = st.tuples(st.sampled_from(["part", "whole", "twin0", "twin1"]), st.integers(0, 70),
                    st.sampled_from([1, 250, 333, 500, 1000]), st.booleans())  # fmt: skip
cuts = st.tuples(
    st.sampled_from([f"cut/{name}" for name in PROFILES]), st.integers(0, 30), st.just(1),
    st.just(False),
)  # fmt: skip
steps = st.tuples(st.sampled_from("abcd"), st.lists(amounts | cuts, max_size=3))


@given(st.lists(steps, max_size=12))
def test_never_over_capacity_and_a_release_restores_exactly(script):
    book = Ledger(MIXED, sharing=SHARING)
    empty = book.snapshot()
    undo = {}
    for job, rows in script:
        before = book.snapshot()
        if job in undo:
            book.release(job)
            others = before.without(job)
            assert book.snapshot().uses == others.uses
            assert book.snapshot().jobs == others.jobs
            del undo[job]
            continue
        try:
            made = book.reserve(job, [Claim(*row) for row in rows])
        except (ReservationError, InputError):
            assert book.snapshot() == before
            continue
        undo[job] = made
        now = book.snapshot()
        assert now.without(job).uses == before.uses
        held = [claim for row in now.jobs.values() for claim in row.claims]
        for device in MIXED.devices:
            mine = [claim for claim in held if claim.device == device.name]
            assert sum(claim.share_milli for claim in mine) <= 1000
            assert len(mine) == 1 or not any(claim.exclusive for claim in mine)
            pool = [row.name for row in MIXED.devices if row.pool == device.pool != ""]
            shared = [claim for claim in held if claim.device in (pool or [device.name])]
            assert sum(claim.memory_bytes for claim in shared) <= device.memory_bytes
        pieces = [claim for claim in held if claim.device.startswith("cut/")]
        assert sum(claim.memory_bytes for claim in pieces) <= 80
        assert len({claim.device for claim in pieces}) == len(pieces)
        # What is offered can be had.
        for room in now.rooms():
            claim = Claim(room.device.name, room.device.memory_bytes, room.share_milli)
            now.site.take(now.uses, [claim])
    for job in sorted(undo):
        book.release(job)
    assert book.snapshot().uses == empty.uses


def serial(cluster, version, jobs, sharing=SHARING):
    """Whether reservations, one by one in the order of their versions, all fit."""
    again = Ledger(cluster, sharing=sharing)
    for row in sorted(jobs.values(), key=lambda row: row.version):
        again.reserve(row.job, row.claims)
    return again.snapshot().version <= version


@FORMS
def test_threads_that_reserve_at_once_have_the_effect_of_some_order(tmp_path, kept):
    book = ledger(tmp_path, kept, MIXED, sharing=SHARING)
    draw = random.Random(3)
    names = ["part", "whole", "cut/2g", "twin0", "twin1"]
    wishes = [
        (f"job{i}", [Claim(draw.choice(names), draw.randrange(30), draw.randrange(1, 400))])
        for i in range(60)
    ]

    def ask(wish):
        try:
            return book.reserve(*wish)
        except ReservationError:
            return None

    with ThreadPoolExecutor(8) as pool:
        answers = [row for row in pool.map(ask, wishes) if row is not None]
    now = book.snapshot()
    assert sorted(row.version for row in answers) == list(range(1, len(answers) + 1))
    assert {row.job: row for row in answers} == dict(now.jobs)
    assert 0 < len(answers) < len(wishes)
    assert serial(MIXED, now.version, now.jobs)
    book.close()


CHILD = """
import sys
from baechi import ReservationError
from baechi.scheduling.claims import Claim
from baechi.scheduling.ledger import Ledger

path, name, count, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
book = Ledger(path=path)
print("ready", flush=True)
sys.stdin.readline()
for i in range(count):
    try:
        # Two devices, so that half of a reservation would be seen.
        book.reserve(f"{name}{i}", [Claim("device0", nbytes, 1), Claim("device1", nbytes, 1)])
    except ReservationError:
        print("refused", flush=True)
    else:
        print(f"{name}{i}", flush=True)
"""


def child(path, name, count, nbytes):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), name, str(count), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_of_processes_that_want_the_last_gigabyte_one_gets_it(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(Cluster.uniform(2, "1GiB", LINK), path).close()
    children = [child(path, name, 1, 2**30) for name in "abc"]
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate()[0].strip() for process in children]
    assert sorted(said)[1:] == ["refused"] * 2 or sorted(said).count("refused") == 2
    (job,) = Ledger(path=path).snapshot().jobs
    assert [job] == [line for line in said if line != "refused"]


def test_processes_that_reserve_at_once_have_the_effect_of_some_order(tmp_path):
    path = tmp_path / "ledger.sqlite"
    cluster = Cluster.uniform(2, 30, LINK)
    Ledger(cluster, path).close()
    children = [child(path, name, 15, 1) for name in "abc"]
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = " ".join(process.communicate()[0] for process in children).split()
    now = Ledger(path=path).snapshot()
    assert set(now.jobs) == set(said) - {"refused"}
    assert len(now.jobs) == now.version == 30
    assert sorted(row.version for row in now.jobs.values()) == list(range(1, 31))
    assert now.uses == (Use(30, 30),) * 2


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_killed_process_leaves_all_that_it_was_granted_and_nothing_half(tmp_path, after):
    path = tmp_path / "ledger.sqlite"
    Ledger(Cluster.uniform(2, 10**6, LINK), path).close()
    process = child(path, "job", 10**6, 3)
    process.stdin.write("go\n")
    process.stdin.flush()
    granted = [process.stdout.readline().strip() for _ in range(after)]
    os.kill(process.pid, signal.SIGKILL)
    granted += process.stdout.read().split()  # `communicate` would lose what `readline` holds
    process.communicate()
    if granted[-1] != f"job{len(granted) - 1}":
        granted.pop()  # a line cut off by the kill
    book = Ledger(path=path)
    now = book.snapshot()
    # At most one more was written whose answer was not.
    assert set(granted) <= set(now.jobs)
    assert len(now.jobs) - len(granted) in (0, 1)
    assert now.version == len(now.jobs)
    used = len(now.jobs)
    assert now.uses == (Use(3 * used, used),) * 2
    assert all(len(row.claims) == 2 for row in now.jobs.values())
    for job in now.jobs:
        book.release(job)
    assert book.residual() == Cluster.uniform(2, 10**6, LINK)
    book.close()


def test_a_failed_write_changes_nothing_in_memory_or_on_disk(tmp_path):
    path = tmp_path / "ledger.sqlite"
    book = Ledger(CLUSTER, path)
    book.reserve("a", [Claim("device0", 1, 1)])
    before = book.snapshot()
    other = sqlite3.connect(path)
    other.execute("CREATE TRIGGER full BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'no'); END")
    other.commit()
    with pytest.raises(FormatError):
        book.reserve("b", [Claim("device0", 1, 1)])
    assert book.snapshot() == before
    other.execute("DROP TRIGGER full")
    other.commit()
    other.close()
    book.reserve("b", [Claim("device0", 1, 1)])
    assert Ledger(path=path).snapshot() == book.snapshot()
    book.close()


def test_a_file_that_is_held_for_too_long_is_unavailable_and_not_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr("baechi.storage.sqlite_file.PATIENCE", 0.01)
    path = tmp_path / "ledger.sqlite"
    book = Ledger(CLUSTER, path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert why(book.reserve, "a", [Claim("device0", 1)]) == "unavailable"
    assert why(book.release, "a") == "unavailable"
    assert Ledger(CLUSTER, path).snapshot() == book.snapshot()
    assert book.snapshot().version == 0
    holder.execute("COMMIT")
    holder.close()
    with sqlite3.connect(tmp_path / "new.sqlite", isolation_level=None) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match="held by another process"):
            Ledger(CLUSTER, tmp_path / "new.sqlite")
    holder.close()
    assert book.reserve("a", [Claim("device0", 1)]).version == 1
    book.close()


def test_two_ledgers_of_one_file_see_each_others_changes(tmp_path):
    path = tmp_path / "ledger.sqlite"
    one, two = Ledger(CLUSTER, path), Ledger(CLUSTER, path)
    one.reserve("a", [Claim("device0", 60, 1)])
    assert why(two.reserve, "b", [Claim("device0", 60, 1)]) == "capacity"
    two.release("a")
    assert one.snapshot() == two.snapshot()
    assert one.snapshot().version == 2


def test_a_file_keeps_its_cluster_and_refuses_another(tmp_path):
    path = tmp_path / "ledger.sqlite"
    link = Link(1, 10**9)
    topology = Topology.grid(2, 2, 2, 100, node_link=link, switch_link=link)
    Ledger(topology, path, sharing="whole").close()
    assert Ledger(path=path).site == Ledger(topology, path).site
    assert Ledger(path=path).site.sharing == ("whole",) * 8
    for cluster, sharing in ((CLUSTER, None), (topology, "fractional")):
        with pytest.raises(InputError, match=r"another (cluster|way)"):
            Ledger(cluster, path, sharing=sharing)
    assert Ledger(path=path).snapshot().version == 0


def test_what_is_no_ledger_is_refused_and_stays_as_it_was(tmp_path):
    text, foreign, cut = tmp_path / "text", tmp_path / "foreign", tmp_path / "cut"
    text.write_text("these are the notes of a lifetime " * 100)
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE diary (day TEXT)")
    other.close()
    good = tmp_path / "good"
    book = Ledger(Cluster.uniform(40, 100, LINK), good)
    for at in range(40):
        book.reserve(f"job{at}", [Claim(f"device{at}", 1, 1)])
    book.close()
    whole = good.read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    newer = tmp_path / "newer"
    newer.write_bytes(whole)
    with sqlite3.connect(newer) as other:
        other.execute("PRAGMA user_version = 7")
    other.close()
    for path in (text, foreign, cut, newer):
        before = path.read_bytes()
        for cluster in (CLUSTER, None):
            with pytest.raises(FormatError, match=path.name):
                Ledger(cluster, path)
        assert path.read_bytes() == before
    with pytest.raises(InputError, match="no ledger"):
        Ledger(path=tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    with pytest.raises(InputError):
        Ledger(CLUSTER, tmp_path / "no" / "folder")
    with pytest.raises(InputError):
        Ledger()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE jobs SET claims = '[{}]'",
        "UPDATE jobs SET claims = 'x'",
        'UPDATE jobs SET claims = \'[{"device":"device0","memory_bytes":900}]\'',
        'UPDATE jobs SET claims = \'[{"device":"gpu","memory_bytes":1}]\'',
        "UPDATE jobs SET version = 99",
        "UPDATE site SET cluster = '{}'",
        "DELETE FROM site",
        "DELETE FROM state",
        "DROP TABLE jobs",
    ],
)
def test_a_ledger_whose_rows_are_wrong_is_refused(tmp_path, statement):
    path = tmp_path / "ledger.sqlite"
    book = Ledger(CLUSTER, path)
    book.reserve("a", [Claim("device0", 1, 1)])
    book.close()
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    with pytest.raises(InputError, match=r"ledger\.sqlite"):
        Ledger(CLUSTER, path)


def test_who_finds_the_file_held_by_another_waits_for_its_turn(tmp_path):
    path = tmp_path / "ledger.sqlite"
    book = Ledger(CLUSTER, path)
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(book.reserve, "a", [Claim("device0", 1)])
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.05)
        holder.execute("COMMIT")
        assert answer.result().version == 1
    holder.close()
    book.close()


def test_a_topology_is_a_cluster_by_levels():
    near, middle, far = Link(1, 10**9), Link(2, 10**9), Link(3, 10**9)
    grid = Topology.grid(2, 2, 2, "1GiB", node_link=near, switch_link=middle, site_link=far)
    cluster = grid.cluster()
    assert [device.name for device in cluster.devices][:3] == ["node0/0", "node0/1", "node1/0"]
    expected = {(0, 1): near, (0, 2): middle, (3, 1): middle, (0, 4): far, (7, 6): near}
    assert {pair: cluster.links[pair[0]][pair[1]] for pair in expected} == expected
    part = grid.cluster([5, 0])
    assert [device.name for device in part.devices] == ["node2/1", "node0/0"]
    assert part.links[0][1] == part.links[1][0] == far
    text = baechi.storage.serialization.dumps(grid)
    assert baechi.storage.serialization.loads(text) == grid
    assert json.loads(text)["type"] == "Topology"
    row = grid.devices[0]
    for fields in (
        {"devices": (), "nodes": (), "switches": ()},
        {"devices": (row,), "nodes": (), "switches": ("s",)},
        {"devices": (row, row), "nodes": ("n", "n"), "switches": ("s", "s")},
        {"devices": (row, Device("b", 1)), "nodes": ("n", "n"), "switches": ("s", "t")},
        {"devices": (row,), "nodes": ("",), "switches": ("s",)},
        {"devices": ("gpu",), "nodes": ("n",), "switches": ("s",)},
    ):
        with pytest.raises(InputError):
            Topology(**fields, node_link=near)
    with pytest.raises(InputError):
        Topology((row,), ("n",), ("s",), near, ports="one")
    with pytest.raises(InputError):
        Topology((row,), ("n",), ("s",), None)
    with pytest.raises(InputError):
        Topology((row,), ("n",), ("s",), near, site_link=5)
    with pytest.raises(InputError):
        Topology.grid(0, 1, 1, 1, node_link=near)


@pytest.mark.parametrize(
    "fields", [{"device": ""}, {"memory_bytes": -1}, {"share_milli": 0}, {"share_milli": 1001},
               {"exclusive": 1}, {"share_milli": 0.5}],
)  # fmt: skip
def test_a_claim_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InputError):
        Claim(**{"device": "a", "memory_bytes": 1, **fields})


def test_a_ledger_that_is_closed_says_so(tmp_path):
    book = Ledger(CLUSTER, tmp_path / "ledger.sqlite")
    book.close()
    for ask in (book.snapshot, lambda: book.release("a")):
        with pytest.raises(InputError, match="is closed"):
            ask()


def test_a_file_that_is_shared_in_another_way_is_refused_without_a_cluster_too(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(CLUSTER, path, sharing="whole").close()
    with pytest.raises(InputError, match="shared in another way"):
        Ledger(path=path, sharing="mig")
    book = Ledger(path=path, sharing="whole")
    assert book.reserve("a", [Claim("device0", 1)], version=np.int64(0)).version == 1
    book.close()


def test_who_is_interrupted_after_a_change_reads_it_again(tmp_path):
    class Interrupted(dict):
        def pop(self, *_):
            raise KeyboardInterrupt

    book = Ledger(CLUSTER, tmp_path / "ledger.sqlite")
    book._jobs = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        book.reserve("a", [Claim("device0", 60)])
    assert book.snapshot().jobs["a"].version == 1
    assert why(book.reserve, "b", [Claim("device0", 60)]) == "capacity"
    book.close()


def test_many_may_make_one_ledger_at_once(tmp_path):
    for turn in range(30):
        path = tmp_path / f"{turn}.sqlite"
        barrier = threading.Barrier(4)

        def make(path=path, barrier=barrier):
            barrier.wait()
            book = Ledger(CLUSTER, path)
            book.close()
            return book.site

        with ThreadPoolExecutor(4) as pool:
            sites = [future.result() for future in [pool.submit(make) for _ in range(4)]]
        assert all(site.base == CLUSTER for site in sites)


def test_devices_of_a_pool_have_one_memory_in_a_topology_too():
    devices = (Device("a", 100, pool="p"), Device("b", 50, pool="p"))
    with pytest.raises(InputError, match="share pool 'p'"):
        Topology(devices, ("n", "n"), ("s", "s"), LINK)
