"""m-ETF in plain Python: what the C++ list scheduler's speed is compared with.

As one would write it first: at every step, every ready op is asked on every device, with the clock
of `baechi.problem.simulation` (one send and one receive port per device, a tensor sent at most once
to a device). Memory is persistent bytes alone, devices have speed 1 and no pools, links have no
overhead, and there are no groups. So it is O(ops * ready ops * devices * inputs), where
`tests/support/oracle.py`, which keeps nothing up to date, is slower by orders of magnitude.
"""

from baechi import Cluster, OpGraph


def place(graph: OpGraph, cluster: Cluster) -> tuple[list[int], list[int]]:
    """The device of every op, and the order of commits.

    Raises:
        ValueError: No device has room for any op that is ready.
    """
    return _Schedule(graph, cluster).run()


class _Schedule:
    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        devices = range(len(cluster.devices))
        self.graph, self.cluster, self.devices = graph, cluster, devices
        self.inputs = graph.op_inputs
        self.placed: list[int] = [-1] * len(graph.ops)
        self.ends = [0] * len(graph.ops)
        self.free = [0 for _ in devices]
        self.sends = [0 for _ in devices]
        self.receives = [0 for _ in devices]
        self.room = [device.memory_bytes for device in cluster.devices]
        self.arrived: dict[tuple[int, int], int] = {}  # (tensor, device) -> time

    def run(self) -> tuple[list[int], list[int]]:
        waiting = [len(row) for row in self.inputs]
        ready = [op for op, count in enumerate(waiting) if not count]
        order: list[int] = []
        while ready:
            pairs = [
                (self.plan(op, device)[0], op, device)
                for op in ready
                for device in self.devices
                if self.graph.ops[op].persistent_bytes <= self.room[device]
            ]
            if not pairs:
                raise ValueError(f"no device has room for any of {len(ready)} ops that are ready.")
            _, op, device = min(pairs)
            self.commit(op, device)
            order.append(op)
            ready.remove(op)
            for tensor in self.graph.op_outputs[op]:
                for consumer in self.graph.tensors[tensor].consumers:
                    waiting[consumer] -= 1
                    if not waiting[consumer]:
                        ready.append(consumer)
        return self.placed, order

    def plan(self, op: int, device: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The earliest start of the op there; and tensor, source and arrival of its transfers."""
        start, missing = self.free[device], []
        for tensor in self.inputs[op]:
            known = self.arrived.get((tensor, device))
            if known is None:
                missing.append((self.ends[self.graph.tensors[tensor].producer], tensor))
            elif known > start:
                start = known
        missing.sort()
        sent: dict[int, int] = {}
        received, transfers = self.receives[device], []
        for produced, tensor in missing:
            row = self.graph.tensors[tensor]
            src = self.placed[row.producer]
            link = self.cluster.links[src][device]
            begin = max(produced, sent.get(src, self.sends[src]), received)
            received = sent[src] = begin + link.transfer_ns(row.nbytes)
            transfers.append((tensor, src, received))
        return max(start, received) if missing else start, transfers

    def commit(self, op: int, device: int) -> None:
        start, transfers = self.plan(op, device)
        for tensor, src, arrival in transfers:
            self.sends[src] = self.receives[device] = self.arrived[tensor, device] = arrival
        self.free[device] = self.ends[op] = start + self.graph.ops[op].time_ns
        for tensor in self.graph.op_outputs[op]:
            self.arrived[tensor, device] = self.ends[op]
        self.room[device] -= self.graph.ops[op].persistent_bytes
        self.placed[op] = device
