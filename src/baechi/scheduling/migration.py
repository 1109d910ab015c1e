"""Migration of a running job: what its devices send each other from one decision to the next.

A job's state moves, which is what is persistent without gradients, since a step makes these anew.

Source: Tenplex (Wagenlaender et al., SOSP 2024, https://arxiv.org/abs/2312.05181), whose plan is
the difference of two placements; here these are of any graph, and its devices are named anew so
that little moves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import networkx as nx

from baechi.errors import InputError
from baechi.problem.simulation import fits_memory, replay
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import WHOLE_MILLI, Room, Wish
from baechi.scheduling.decision import Decision, decided, problem_of
from baechi.scheduling.device_sets import levels, resolved
from baechi.scheduling.snapshot import Snapshot
from baechi.validation import check_count, check_row


@final
@dataclass(frozen=True, slots=True)
class Move:
    """State that goes to another device.

    Attributes:
        subject: The group, or the op that is in none.
        source: The name of the device that has it; empty where it is gone, or has no path to the
            target: then a checkpoint has it.
        target: The name of the device that gets it.
        nbytes: Its size.
    """

    subject: str
    source: str
    target: str
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Migration:
    """All moves of a job, in the order of its graph.

    Attributes:
        moves: What moves.
        time_ns: What devices send each other takes so long: each pair in one transfer, and the
            transfers of a port one after another. Without what a checkpoint has.
    """

    moves: tuple[Move, ...]
    time_ns: int

    @property
    def nbytes(self) -> int:
        """The bytes of all moves."""
        return sum(move.nbytes for move in self.moves)

    def worth_after(self, gain_ns: int) -> int | None:
        """The number of steps, each shorter by `gain_ns`, that make up for it; `None`: none do."""
        return self.time_ns // gain_ns + 1 if check_count(gain_ns, "gain_ns") else None


def migration(
    graph: OpGraph,
    before: Decision,
    after: Decision,
    snapshot: Snapshot,
    *,
    gone: Iterable[str] = (),
) -> Migration:
    """What a job moves that leaves one decision for another; `gone` has lost devices, by name.

    O(ops).
    """
    lost = {*check_row(gone, "devices that are gone")}
    homes, targets = _homes(graph, before), _homes(graph, after)
    moving = {
        name: ((homes[name], targets[name]), nbytes)
        for name, nbytes in _state(graph).items()
        if nbytes and homes[name] != targets[name]
    }
    pairs = Counter[tuple[str, str]]()
    for pair, nbytes in moving.values():
        pairs[pair] += nbytes
    sent = dict(_sent(pairs, snapshot, lost))
    moves = tuple(
        Move(name, pair[0] if pair in sent else "", pair[1], nbytes)
        for name, (pair, nbytes) in moving.items()
    )
    return Migration(moves, _time_ns(sent, snapshot.site.base.ports))


def staying(
    graph: OpGraph,
    before: Decision,
    after: Decision,
    snapshot: Snapshot,
    wish: Wish | None = None,
) -> Decision:
    """The decision `after`, or that on other free devices with which less state moves.

    Its parts are given to the devices of `before`, or exchanged among its own, so that the most
    bytes stay. No step is longer than that of `after`, and what moves no less state is not taken.

    Args:
        graph: The job's.
        before: Where the job is.
        after: What was decided for it.
        snapshot: What is free without it: `ledger.snapshot().without(job)`.
        wish: That of `after`.
    """
    wish = Wish() if wish is None else wish
    rooms = snapshot.rooms(wish.share_milli)
    wish = resolved(wish, graph, snapshot.site, rooms)
    rooms = tuple(room for room in rooms if room.device.name not in wish.constraints.excluded)
    part_of = levels(snapshot.site, wish.same)[-1]  # the part that it may not leave
    best, most = after, _kept(graph, before, after)
    for names in (before.devices, after.devices):
        chosen = [room for room in rooms if room.device.name in names]
        if len(chosen) != len(after.devices) or len({part_of[room.place] for room in chosen}) > 1:
            continue
        problem = problem_of(graph, snapshot, chosen, wish)
        devices = _matched(graph, before, after, chosen)
        try:
            timeline = replay(problem, devices, after.placement.order)
        except InputError:  # a constraint, or a path that is not there
            continue
        if not fits_memory(problem, timeline):
            continue
        other = decided(problem, replace(after.placement, devices=devices), snapshot, chosen)
        kept = _kept(graph, before, other)
        if other.step_ns <= after.step_ns and kept > most:
            best, most = other, kept
    return best


def _matched(
    graph: OpGraph, before: Decision, after: Decision, rooms: Sequence[Room]
) -> tuple[int, ...]:
    """A room for every op, one for each device of `after`, with the most bytes where they were."""
    homes, parts = _homes(graph, before), _homes(graph, after)
    stays = Counter[tuple[str, str]]()
    for name, nbytes in _state(graph).items():
        stays[parts[name], homes[name]] += nbytes
    pairs = nx.Graph()
    pairs.add_weighted_edges_from(
        (part, at, stays[part, room.device.name])
        for part in after.devices
        for at, room in enumerate(rooms)
    )
    matching = nx.max_weight_matching(pairs, maxcardinality=True)
    place = dict(row if isinstance(row[0], str) else row[::-1] for row in matching)
    return tuple(place[after.devices[device]] for device in after.placement.devices)


def _state(graph: OpGraph) -> Mapping[str, int]:
    """The bytes of every group, and of every op in none, by name."""
    sizes = Counter[str]()
    for op in graph.ops:
        sizes[op.group or op.name] += op.persistent_bytes - op.late_bytes
    return sizes


def _homes(graph: OpGraph, decision: Decision) -> Mapping[str, str]:
    """The name of the device of every group, and of every op in none."""
    rows = zip(graph.ops, decision.placement.devices, strict=True)
    return {op.group or op.name: decision.devices[device] for op, device in rows}


def _kept(graph: OpGraph, before: Decision, after: Decision) -> int:
    """The bytes that stay where they are."""
    homes, targets = _homes(graph, before), _homes(graph, after)
    return sum(n for name, n in _state(graph).items() if homes[name] == targets[name])


def _sent(
    pairs: Mapping[tuple[str, str], int], snapshot: Snapshot, lost: set[str]
) -> Iterator[tuple[tuple[str, str], int]]:
    """What each pair of devices with a path takes for its bytes."""
    index, base = snapshot.site.index, snapshot.site.base
    names = sorted({name for pair in pairs for name in pair} - lost)
    # An instance is on the device that the rest of its name names.
    homes = {name: index.get(name, index.get(name.rpartition("/")[0])) for name in names}
    places = {name: place for name, place in homes.items() if place is not None}
    known = [Room(place, base.devices[place], WHOLE_MILLI) for place in places.values()]
    links = snapshot.part(known).links if known else ()
    at = {name: row for row, name in enumerate(places)}
    for (source, target), nbytes in pairs.items():
        if source in places and places[source] == places[target]:
            yield (source, target), 0
        elif source in places and (link := links[at[source]][at[target]]) is not None:
            yield (source, target), link.transfer_ns(nbytes)


def _time_ns(sent: Mapping[tuple[str, str], int], ports: str) -> int:
    """Until the last of transfers ends, if no port ever waits."""
    if ports == "none":
        return max(sent.values(), default=0)
    way_out, way_in = ("out", "in") if ports == "duplex" else ("", "")
    busy = Counter[tuple[str, str]]()
    for (source, target), ns in sent.items():
        busy[source, way_out] += ns
        busy[target, way_in] += ns
    return max(busy.values(), default=0)
