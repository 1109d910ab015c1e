"""Writer of the instructions of a phase in launch order, with waits and frees.

It keeps a vector clock per lane: the number of instructions of every lane that have ended before
its next one. `docs/runtime.md` (Waits and frees) says where it writes these.

Complexity: O((instructions + reads) * lanes), with a binary search per free.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from typing import Final, TypeAlias, final

from baechi.records.instructions import Copy, Free, Instruction, Place, Run, Segment, Wait

# The instructions of every lane, and the lanes in launch order of the instructions.
Written: TypeAlias = tuple[tuple[tuple[Instruction, ...], ...], tuple[int, ...]]
_STATE: Final = -1  # the "device" of state updated in place: the device of its readers


@final
class InstructionWriter:
    """Writer of a phase's instructions in launch order."""

    def __init__(
        self, given: Iterable[Place], n_lanes: int, copy_lanes: bool, one_thread: bool
    ) -> None:
        self._copy_lanes = copy_lanes
        self._one_thread = one_thread
        self._lanes: list[list[Instruction]] = [[] for _ in range(n_lanes)]
        # After each: [lane][other] counts the ended instructions of the other lane, ascending.
        self._known: list[list[list[int]]] = [[[] for _ in range(n_lanes)] for _ in range(n_lanes)]
        self._now = [[0] * n_lanes for _ in range(n_lanes)]
        self._launch: list[tuple[int, int]] = []  # (lane, position)
        self._launched: list[list[int]] = [[] for _ in range(n_lanes)]  # position in `_launch`
        # (lane, position) of every access to a place; its last write.
        self._uses: dict[Place, list[tuple[int, int]]] = {place: [] for place in given}
        self._written: dict[Place, tuple[int, int]] = {}

    def run(self, row: Run, segment: Segment) -> None:
        """Write the turn of a segment, after the writes of its inputs."""
        device = segment.device
        reads = [Place(tensor, device, row.batch) for tensor in segment.reads]
        writes = [Place(tensor, device, row.batch) for tensor in segment.writes]
        state = [Place(index, _STATE) for index in segment.updates]
        self._write(device, row, [*reads, *state], [*writes, *state])

    def copy(self, row: Copy) -> None:
        """Write a copy, after the write of its source."""
        lane = row.dst + (len(self._lanes) // 2 if self._copy_lanes else 0)
        src, dst = (Place(row.tensor, device, row.batch) for device in (row.src, row.dst))
        self._write(lane, row, [src], [dst])

    def _write(
        self, lane: int, row: Instruction, reads: Sequence[Place], writes: Sequence[Place]
    ) -> None:
        """Write an instruction after the last writes of what it reads."""
        self._wait(lane, [self._written[place] for place in reads if place in self._written])
        done = lane, len(self._lanes[lane])
        self._append(lane, row)
        for place in reads:
            if place.device != _STATE:
                self._uses[place].append(done)
        for place in writes:
            self._written[place] = done
            if place.device != _STATE:
                self._uses[place] = [done]

    def _wait(self, lane: int, events: Sequence[tuple[int, int]]) -> None:
        """Wait for events not yet known to have ended, latest launched first."""
        now = self._now[lane]
        for other, position in sorted(events, key=lambda e: -self._launched[e[0]][e[1]]):
            if now[other] <= position:
                theirs = [row[position] for row in self._known[other]]
                self._now[lane] = list(map(max, now, theirs))
                self._append(lane, Wait(other, position))
                now = self._now[lane]

    def _append(self, lane: int, row: Instruction) -> None:
        position = len(self._lanes[lane])
        self._lanes[lane].append(row)
        self._now[lane][lane] = position + 1
        for row_of_other, ended in zip(self._known[lane], self._now[lane], strict=True):
            row_of_other.append(ended)
        self._launched[lane].append(len(self._launch))
        self._launch.append((lane, position))

    def written(self, kept: Set[Place]) -> Written:
        """The lanes and the launch order, with all frees."""
        if self._one_thread:
            return self._freed_at_once(kept)
        after: dict[tuple[int, int], list[Free]] = {}
        late: dict[int, list[tuple[Free, list[int]]]] = {}
        for place, uses in self._uses.items():
            if place in kept:
                continue
            need = [0] * len(self._lanes)
            for lane, position in uses:
                need[lane] = max(need[lane], position + 1)
            free = Free(place.tensor, place.device, place.batch)
            spot = self._first_to_know(place.device, need)
            if spot is None:
                late.setdefault(place.device, []).append((free, need))
            else:
                after.setdefault(spot, []).append(free)
        for lane in sorted(late):
            needs = list(map(max, zip(*(need for _, need in late[lane]), strict=True)))
            self._wait(lane, [(other, n - 1) for other, n in enumerate(needs) if n])
            last = (lane, len(self._lanes[lane]) - 1)
            after.setdefault(last, []).extend(free for free, _ in late[lane])
        return self._with_frees({}, after)

    def _freed_at_once(self, kept: Set[Place]) -> Written:
        """The same, with each free right after the last use, which waits for the other uses."""
        before: dict[tuple[int, int], list[Wait]] = {}
        after: dict[tuple[int, int], list[Free]] = {}
        left = self._uses.keys() - kept
        for place in sorted(left, key=lambda p: (p.batch, p.tensor, p.device)):
            uses = self._uses[place]
            last = max(uses, key=lambda use: self._launched[use[0]][use[1]])
            after.setdefault(last, []).append(Free(place.tensor, place.device, place.batch))
            before.setdefault(last, []).extend(
                Wait(lane, position)
                for lane, position in uses
                if lane != last[0] and self._known[last[0]][lane][last[1]] <= position
            )
        return self._with_frees(before, after)

    def _first_to_know(self, holder: int, need: Sequence[int]) -> tuple[int, int] | None:
        """The first launched instruction after which its lane knows that all of this has ended."""
        best: tuple[int, int] | None = None
        lanes = [holder] if self._copy_lanes else range(len(self._lanes))
        for lane in lanes:
            known = zip(self._known[lane], need, strict=True)
            position = max(bisect_left(ended, n) for ended, n in known if n)
            if position < len(self._lanes[lane]) and (
                best is None or self._launched[lane][position] < self._launched[best[0]][best[1]]
            ):
                best = (lane, position)
        return best

    def _with_frees(
        self,
        before: dict[tuple[int, int], list[Wait]],
        after: dict[tuple[int, int], list[Free]],
    ) -> Written:
        """Insert waits and frees, and renumber the positions in waits accordingly."""
        moved: list[list[int]] = []
        for lane, rows in enumerate(self._lanes):
            shift, places = 0, []
            for position in range(len(rows)):
                shift += len(before.get((lane, position), ()))
                places.append(position + shift)
                shift += len(after.get((lane, position), ()))
            moved.append(places)
        lanes: list[list[Instruction]] = [[] for _ in self._lanes]
        launch: list[int] = []
        for lane, position in self._launch:
            rows = [*before.get((lane, position), ()), self._lanes[lane][position]]
            lanes[lane] += [
                Wait(row.lane, moved[row.lane][row.position]) if isinstance(row, Wait) else row
                for row in rows
            ]
            frees = after.get((lane, position), ())
            lanes[lane] += frees
            launch += [lane] * (len(rows) + len(frees))
        return tuple(map(tuple, lanes)), tuple(launch)
