"""The graphs of jobs, in the files of a folder."""

from contextlib import suppress
from pathlib import Path
from typing import final

from baechi.errors import FormatError, InputError
from baechi.records.graph import OpGraph
from baechi.storage.serialization import load


@final
class GraphFolder:
    """The graphs in a folder's `.json` files, by digest; a file that comes later is found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"there is no folder {str(folder)!r} with graphs.")
        self._folder = folder
        self._read: set[tuple[str, int]] = set()
        self._graphs: dict[str, OpGraph] = {}

    def __call__(self, digest: str) -> OpGraph:
        """The graph, or a `KeyError`. Files that hold no graph are passed over."""
        if digest not in self._graphs:
            for file in sorted(self._folder.glob("*.json")):
                with suppress(FormatError, InputError, OSError):
                    stamp = (file.name, file.stat().st_mtime_ns)
                    if stamp not in self._read:
                        self._read.add(stamp)
                        graph = load(file, OpGraph)
                        self._graphs[graph.digest] = graph
        return self._graphs[digest]
