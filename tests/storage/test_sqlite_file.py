"""Files of SQLite."""

import gc
import sqlite3

import pytest

from baechi.storage.sqlite_file import SqliteFile


def test_a_file_that_nobody_holds_is_closed() -> None:
    """Python 3.13 warns of one that is left open."""
    file = SqliteFile(None, 1, 1, lambda _: None, durable=False)
    database = file._database
    assert database.execute("SELECT 1").fetchall() == [(1,)]
    del file
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.execute("SELECT 1")
