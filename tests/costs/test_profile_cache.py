"""The store of measured costs: nothing is lost, whatever happens to the file or the process."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baechi
from baechi.costs.profile_cache import Conditions, Measured, ProfileStore, default_path

HERE = Conditions("cpu", "processor", 1, "2.13", "warm", 1)
COST = Measured(5, 6, 7, 8, 1, 2, 3, 4, "a remark", 9)


def test_what_is_kept_is_found_again_under_the_same_conditions_only(tmp_path):
    path = tmp_path / "new" / "folder" / "costs.sqlite"
    with ProfileStore(path) as store:
        assert store.find("op", HERE) is None
        store.keep("op", HERE, COST)
    others = [
        Conditions("cuda", "processor", 1, "2.13", "warm", 1),
        Conditions("cpu", "another", 1, "2.13", "warm", 1),
        Conditions("cpu", "processor", 2, "2.13", "warm", 1),
        Conditions("cpu", "processor", 1, "2.12", "warm", 1),
        Conditions("cpu", "processor", 1, "2.13", "cold", 1),
        Conditions("cpu", "processor", 1, "2.13", "warm", 2),
    ]
    with ProfileStore(path) as store:
        assert store.find("op", HERE) == COST
        assert store.find("another op", HERE) is None
        assert not any(store.find("op", other) for other in others)


@given(st.text(), st.text())
def test_a_key_is_as_stable_as_the_words_and_parts_what_they_part(one, other):
    assert (HERE.key(one) == HERE.key(other)) == (one == other)


def test_keys_are_equal_in_every_process():
    code = (
        "from baechi.costs.profile_cache import Conditions; "
        "print(Conditions('cpu', 'processor', 1, '2.13', 'warm', 1).key('op'))"
    )
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=environment,
        )  # fmt: skip
        assert run.stdout.strip() == HERE.key("op")


def test_holdings_and_clear(tmp_path):
    with ProfileStore(tmp_path / "costs") as store:
        for name in ("a", "b"):
            store.keep(name, HERE, COST)
        store.keep("a", Conditions("cuda", "GPU", 1, "2.13", "warm", 1), COST)
        rows = [(row.kind, row.operators) for row in store.holdings()]
        assert rows == [("cpu", 2), ("cuda", 1)]
        assert store.clear() == 3
        assert store.holdings() == ()
        assert store.find("a", HERE) is None


def test_the_default_is_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "baechi" / "profiles.sqlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_path() == Path("/home/somebody/.cache/baechi/profiles.sqlite")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_path() == Path("/home/somebody/Library/Caches/baechi/profiles.sqlite")


def test_a_foreign_file_that_was_named_is_refused_and_left_alone(tmp_path):
    text = tmp_path / "thesis.txt"
    text.write_text("not a word of this may be lost")
    database = tmp_path / "photos.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    connection.close()
    for path in (text, database):
        before = path.read_bytes()
        with pytest.raises(baechi.FormatError, match="no store of profiles"):
            ProfileStore(path)
        assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos.sqlite", "thesis.txt"]


def damaged(path):
    """A store whose pages after the first are overwritten."""
    with ProfileStore(path) as store:
        for index in range(200):
            store.keep(f"op {index}", HERE, COST)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    return bytes(data)


def test_a_damaged_store_is_set_aside_and_begun_anew(tmp_path):
    path = tmp_path / "costs"
    for count in (1, 2):
        data = damaged(path)
        with pytest.warns(RuntimeWarning, match=rf"damaged.*costs\.damaged-{count}"):
            store = ProfileStore(path)
        with store:
            assert store.holdings() == ()
            store.keep("op", HERE, COST)
            assert store.find("op", HERE) == COST
        assert (tmp_path / f"costs.damaged-{count}").read_bytes() == data


@pytest.mark.parametrize("version", [1, 99])
def test_a_store_of_another_layout_is_set_aside(tmp_path, version):
    path = tmp_path / "costs"
    ProfileStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.warns(RuntimeWarning, match=f"version {version}"):
        ProfileStore(path).close()
    assert (tmp_path / "costs.damaged-1").exists()


def test_garbage_in_the_users_cache_is_set_aside_too(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "baechi.costs.profile_cache.default_path", lambda: tmp_path / "profiles.sqlite"
    )
    (tmp_path / "profiles.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.warns(RuntimeWarning, match="damaged"):
        store = ProfileStore()
    with store:
        store.keep("op", HERE, COST)
        assert store.find("op", HERE) == COST
    assert (tmp_path / "profiles.sqlite.damaged-1").read_bytes() == b"garbage" * 1000


def test_a_folder_that_cannot_be_made_means_a_word_and_no_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="not kept"):
        store = ProfileStore(tmp_path / "file" / "costs")
    with store:
        store.keep("op", HERE, COST)
        assert store.find("op", HERE) is None
        assert store.holdings() == ()


def test_a_full_disk_means_one_word_and_what_was_kept_stays(tmp_path):
    path = tmp_path / "costs"
    with ProfileStore(path) as store:
        store.keep("before", HERE, COST)
        ((pages,),) = store._file.execute("PRAGMA page_count")
        store._file.execute(f"PRAGMA max_page_count = {pages}")  # what a full disk answers
        with warnings.catch_warnings(record=True) as words:
            warnings.simplefilter("always")
            for index in range(100):
                store.keep(f"op {index}" + "x" * 500, HERE, COST)
        (word,) = words
        assert "full" in str(word.message)
        assert "not kept" in str(word.message)
        assert store.find("before", HERE) == COST
    with ProfileStore(path) as store:
        assert store.find("before", HERE) == COST


def test_a_read_only_store_is_read(tmp_path):
    path = tmp_path / "costs"
    with ProfileStore(path) as store:
        store.keep("op", HERE, COST)
    with ProfileStore(path) as store:
        store._file.execute("PRAGMA query_only = 1")  # root may write to any file
        with pytest.warns(RuntimeWarning, match=r"readonly.*not kept"):
            store.keep("another", HERE, COST)
        assert store.find("op", HERE) == COST


def child(path, code):
    head = (
        "import sys, time\n"
        "from baechi.costs.profile_cache import *\n"
        "here = Conditions('cpu', 'processor', 1, '2.13', 'warm', 1)\n"
        f"store = ProfileStore({str(path)!r})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_use_one_file_at_once(tmp_path):
    """They begin with no file, so that they make it at once, too."""
    path = tmp_path / "costs"
    code = "for i in range(100): store.keep(f'{sys.argv[0]} NAME {i}', here, Measured(i))"
    children = [child(path, code.replace("NAME", str(n))) for n in range(3)]
    assert [process.wait(timeout=120) for process in children] == [0, 0, 0]
    for process in children:
        process.stdout.close()
    with ProfileStore(path) as store:
        assert sum(row.operators for row in store.holdings()) == 300
        assert store.find("-c 2 99", HERE) == Measured(99)


def test_a_killed_process_keeps_what_it_measured(tmp_path):
    path = tmp_path / "costs"
    code = """
        for i in range(1_000_000):
            store.keep(f'op {i}', here, Measured(i))
            print(i, flush=True)
    """
    process = child(path, code)
    for line in process.stdout:
        if int(line) >= 20:
            os.kill(process.pid, signal.SIGKILL)
            break
    said = [int(line) for line in process.stdout]
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGKILL
    with ProfileStore(path) as store:
        for i in range(max([20, *said]) + 1):
            assert store.find(f"op {i}", HERE) == Measured(i)
