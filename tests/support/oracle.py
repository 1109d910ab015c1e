"""The clock and the list schedulers once more: plain, slow, and written from the rules alone.

Nothing is kept up to date here. A question about memory adds up all intervals that exist, and every
step of a scheduler asks every ready op on every device.
"""

import math
from dataclasses import dataclass, field

from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph

FOREVER = 10**30


def spans(timeline):
    """(op, device, start, end) of the core's timeline, in launch order."""
    return _rows(timeline.span_columns())


def transfers(timeline):
    """(tensor, src, dst, start, end), in the order in which they were committed."""
    return _rows(timeline.transfer_columns())


def _rows(columns):
    return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass
class Copy:
    """A tensor in the memory of a pool, received or produced by `holder`."""

    holder: int
    begin: int
    available: int
    last_use: int


@dataclass
class Oracle:
    """What `Timeline` does."""

    graph: OpGraph
    cluster: Cluster
    spans: dict = field(default_factory=dict)  # op -> (device, start, end), in commit order
    transfers: list = field(default_factory=list)  # (tensor, src, dst, start, end)
    launches: list = field(default_factory=list)  # (host, op, start, end)
    copies: dict = field(default_factory=dict)  # (tensor, pool) -> Copy
    group_device: dict = field(default_factory=dict)
    headroom: float = 0.0
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self):
        for op in range(len(self.graph.ops)):
            places = self.places(op)
            if len(places) == 1 < len(self.cluster.devices):
                self.reserve(op, places[0])

    def places(self, op):
        """The devices that the constraints leave the group of an op, by their words alone."""
        rules = self.constraints
        names = {self.graph.ops[o].name for o in self.members(op)} | {self.graph.ops[op].group}
        return [
            d
            for d, row in enumerate(self.cluster.devices)
            if row.name not in rules.excluded
            and all(row.name not in rules.forbidden.get(name, ()) for name in names)
            and all(rules.pins.get(name, row.name) == row.name for name in names)
        ]

    def memory(self, device):
        """What a device's pool may hold."""
        names = [
            row.name
            for d, row in enumerate(self.cluster.devices)
            if self.pool(d) == self.pool(device)
        ]
        margin = max(self.constraints.margins.get(name, 0) for name in names)
        return max(0, self.cluster.devices[device].memory_bytes - margin)

    def pool(self, device):
        return self.cluster.devices[device].pool or device

    def group(self, op):
        name = self.graph.ops[op].group
        return op if name is None else name

    def members(self, op):
        return [o for o in range(len(self.graph.ops)) if self.group(o) == self.group(op)]

    def duration(self, op, device):
        row = self.cluster.devices[device]
        times = self.graph.times.get(row.kind)
        time_ns = self.graph.ops[op].time_ns if times is None else times[op]
        return time_ns if row.speed == 1.0 else math.ceil(float(time_ns) / row.speed)

    def ready(self, op):
        return op not in self.spans and all(
            self.graph.tensors[t].producer in self.spans for t in self.graph.op_inputs[op]
        )

    def device_free(self, device):
        return max((end for d, _, end in self.spans.values() if d == device), default=0)

    def port_free(self, device, *, sends):
        if self.cluster.ports == "none":
            return 0
        both = self.cluster.ports == "shared"
        return max(
            (
                end
                for _, src, dst, _, end in self.transfers
                if (src == device and (sends or both)) or (dst == device and (both or not sends))
            ),
            default=0,
        )

    def work(self, op, device, planned):
        """For how long the op keeps the device and its host busy, and when that is free."""
        row, takes = self.cluster.devices[device], self.duration(op, device)
        launch_ns = self.graph.ops[op].launch_ns
        received = sum(self.cluster.links[src][device].overhead_ns for _, src, *_ in planned)
        if not row.host:
            return takes + received, 0, 0
        free = max((end for host, _, _, end in self.launches if host == row.host), default=0)
        if row.launches_ahead:
            return takes, received + launch_ns, free
        return takes + received, min(launch_ns, takes), free

    def plan(self, op, device):
        """Start of the op, and the transfers that it needs; `None` where there is no path."""
        arrival, missing = 0, []
        for t in self.graph.op_inputs[op]:
            copy = self.copies.get((t, self.pool(device)))
            if copy is None:
                missing.append((self.spans[self.graph.tensors[t].producer][2], t))
            elif copy.holder == device:
                arrival = max(arrival, copy.available)
            else:
                link = self.cluster.links[copy.holder][device]
                if link is None:
                    return None
                arrival = max(arrival, copy.available + link.latency_ns)
        sends = {d: self.port_free(d, sends=True) for d in range(len(self.cluster.devices))}
        receives = {d: self.port_free(d, sends=False) for d in range(len(self.cluster.devices))}
        planned = []
        for produced, t in sorted(missing):
            tensor = self.graph.tensors[t]
            src = self.spans[tensor.producer][0]
            link = self.cluster.links[src][device]
            if link is None:
                return None
            start = max(produced, sends[src], receives[device])
            end = (
                start
                + link.latency_ns
                + math.ceil(
                    # Exact: integers on both sides of the division.
                    -(-tensor.nbytes * 10**9 // link.bytes_per_s)
                )
            )
            if self.cluster.ports != "none":
                sends[src] = receives[device] = end
                if self.cluster.ports == "shared":
                    receives[src] = sends[device] = end
            planned.append((t, src, device, start, end))
            arrival = max(arrival, end)
        _, launch_ns, free = self.work(op, device, planned)
        launched = free + launch_ns * self.cluster.devices[device].launches_ahead
        return max(arrival, self.device_free(device), launched if launch_ns else 0), planned

    def earliest_start(self, op, device):
        plan = self.plan(op, device)
        return None if plan is None else plan[0]

    def earliest_end(self, op, device):
        """With what the device is busy to receive."""
        start, planned = self.plan(op, device)
        return start + self.work(op, device, planned)[0]

    def reserve(self, op, device):
        self.group_device.setdefault(self.group(op), device)

    def commit(self, op, device):
        start, planned = self.plan(op, device)
        end = self.earliest_end(op, device)
        self.reserve(op, device)
        for t, src, dst, sent, arrived in planned:
            self.transfers.append((t, src, dst, sent, arrived))
            home = self.copies[t, self.pool(src)]
            home.last_use = max(home.last_use, arrived)
            self.copies[t, self.pool(dst)] = Copy(dst, sent, arrived, arrived)
        _, launch_ns, free = self.work(op, device, planned)
        if launch_ns:
            row = self.cluster.devices[device]
            begin = free if row.launches_ahead else start
            self.launches.append((row.host, op, begin, begin + launch_ns))
        self.spans[op] = (device, start, end)
        for t in self.graph.op_inputs[op]:
            copy = self.copies[t, self.pool(device)]
            copy.last_use = max(copy.last_use, end)
        for t in self.graph.op_outputs[op]:
            self.copies[t, self.pool(device)] = Copy(device, start, end, end)
        return start, end

    def fits(self, op, device):
        group = self.group(op)
        fresh = group not in self.group_device and len(self.members(op)) > 1
        if self.group_device.get(self.group(op), device) != device:
            return False
        used = set(self.group_device.values())
        limit = self.constraints.max_devices
        full_house = limit is not None and len(used) >= limit and device not in used
        if device not in self.places(op) or full_house:
            return False
        if self.plan(op, device) is None:
            return False
        after = Oracle(
            self.graph,
            self.cluster,
            dict(self.spans),
            list(self.transfers),
            list(self.launches),
            {key: Copy(**vars(copy)) for key, copy in self.copies.items()},
            dict(self.group_device),
        )
        after.commit(op, device)
        memory = self.memory(device)
        memory -= int(memory * self.headroom) if fresh else 0
        return after.peak(self.pool(device), final=False) <= memory

    def intervals(self, pool, *, final):
        """All (begin, end, bytes) in the memory of a pool, without persistent bytes."""
        step = max((end for _, _, end in self.spans.values()), default=0) if final else FOREVER
        rows = []
        for (t, where), copy in self.copies.items():
            tensor = self.graph.tensors[t]
            home = self.pool(self.spans[tensor.producer][0])
            waits = not final and any(c not in self.spans for c in tensor.consumers)
            stays = waits or (where == home and (tensor.kept or not tensor.consumers))
            if where == pool:
                rows.append((copy.begin, step if stays else copy.last_use, tensor.nbytes))
        launched = {}
        for op, (device, start, end) in self.spans.items():
            row, here = self.graph.ops[op], self.pool(device)
            apart = sum(size for other, size in row.beside if launched.get(other, here) != here)
            launched[op] = here
            if here == pool:
                rows.append((start, end, row.net_workspace_bytes - apart))
        return rows

    def persistent(self, pool):
        return sum(
            row.persistent_bytes
            for op, row in enumerate(self.graph.ops)
            if self.group(op) in self.group_device
            and self.pool(self.group_device[self.group(op)]) == pool
        )

    def peak(self, pool, *, final=True):
        rows = self.intervals(pool, final=final)
        # Room that is used again is taken when its op ends.
        at = {begin if size > 0 else end for begin, end, size in rows if begin < end}
        levels = [sum(size for b, e, size in rows if b <= time < e) for time in at]
        return self.persistent(pool) + max(levels, default=0)

    @property
    def makespan(self):
        return max((end for _, _, end in self.spans.values()), default=0)

    def peaks(self):
        return [self.peak(self.pool(device)) for device in range(len(self.cluster.devices))]


def list_schedule(oracle, favorites=None):
    """Commits by ETF's rule, or SCT's where there are favorites; whether all ops have a place."""
    n, devices = len(oracle.graph.ops), range(len(oracle.cluster.devices))
    last = dict.fromkeys(devices)
    while True:
        starts = {
            (op, d): oracle.earliest_start(op, d)
            for op in range(n)
            if oracle.ready(op)
            for d in devices
            if oracle.fits(op, d)
        }
        if not starts:
            return len(oracle.spans) == n
        pairs = sorted((start, op, d) for (op, d), start in starts.items())
        if favorites is not None:
            awaited = {}
            for d in devices:
                child = None if last[d] is None else favorites[last[d]]
                if child is not None:
                    best = min(((s, e) for s, op, e in pairs if op == child), default=None)
                    if best is not None and best[1] == d:
                        awaited[d] = child
            pairs = [
                (start, op, d)
                for start, op, d in pairs
                if d not in awaited
                or op == awaited[d]
                or max(starts[op, e] for e in devices if (op, e) in starts) <= start
            ]
        _, op, d = pairs[0]
        oracle.commit(op, d)
        last[d] = op
