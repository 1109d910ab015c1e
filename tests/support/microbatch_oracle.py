"""Steps of several micro-batches once more: plain, slow, and written from the rules alone."""

from oracle import Oracle

from baechi import Op, OpGraph, Tensor


def copies(graph, segments, microbatches, *, joined=False):
    """The graph of all micro-batches, and the index in it of every (op, batch).

    Late bytes are a kept tensor of the first batch that goes backward; the others' live to the end
    of their segment, or of its last op that may read a tensor of theirs: of no lower index. Or of
    the last segment that has their group, if that ends later. The second's are then added in new
    memory, one op's after the other.
    """
    n, batches = len(graph.ops), range(microbatches)
    loss = graph.n_forward if joined and graph.is_training else None
    if loss is None:
        keys = [(op, batch) for batch in batches for op in range(n)]
    else:
        keys = [(op, batch) for batch in batches for op in range(loss)]
        keys += [(loss, 0)]
        keys += [(op, batch) for batch in reversed(batches) for op in range(loss + 1, n)]
    index = {key: at for at, key in enumerate(keys)}
    index.update({(loss, batch): index[loss, 0] for batch in batches if loss is not None})
    first = 0 if loss is None else microbatches - 1
    held = {op: row.group or row.name for op, row in enumerate(graph.ops)}
    last = {op: [other for other in row if other >= op][-1] for row in segments for op in row}
    own = dict(last)
    for at, row in enumerate(segments):
        for op in row:
            mates = [other for later in segments[at + 1 :][::-1] for other in later]
            mates = [own[other] for other in mates if held[other] == held[op]]
            last[op] = max([own[op], *mates[:1]])  # the last segment's
    late = dict.fromkeys(held.values(), 0)
    for op, row in enumerate(graph.ops):
        late[held[op]] += row.late_bytes
    ops, added = [], []
    for op, batch in keys:
        row, many = graph.ops[op], microbatches if op == loss else 1
        taken = min(late[held[op]], row.persistent_bytes) if batch == 0 else 0
        late[held[op]] -= taken
        workspace = (row.workspace_bytes - row.reused_bytes) * many
        if abs(batch - first) == 1:
            ended = (graph.ops[other].late_bytes for other in last if last[other] == op)
            workspace = max([workspace, *filter(None, ended)])
        if row.late_bytes and (batch == first or last[op] != op):
            ends = () if batch == first else (index[last[op], batch],)
            added.append(Tensor(index[op, batch], ends, row.late_bytes, kept=batch == first))
        elif row.late_bytes:
            workspace += row.late_bytes
        ops.append(
            Op(
                f"{op} of {batch}",
                row.time_ns * many,
                row.persistent_bytes - taken if batch == 0 else 0,
                max(0, workspace),
                f"group of {held[op]}",
                reused_bytes=max(0, -workspace),
                launch_ns=row.launch_ns * many,
            )
        )

    tensors = [
        Tensor(
            index[tensor.producer, batch],
            tuple(sorted({index[reader, batch] for reader in tensor.consumers})),
            tensor.nbytes,
            tensor.kept,
        )
        for batch in batches
        for tensor in graph.tensors
    ]
    return OpGraph(tuple(ops), (*tensors, *added), _times(graph, keys, microbatches, loss)), index


def _times(graph, keys, microbatches, loss):
    return {
        kind: tuple(row[op] * (microbatches if op == loss else 1) for op, _ in keys)
        for kind, row in graph.times.items()
    }


def run(graph, cluster, devices, segments, turns, microbatches, *, joined=False):
    """The oracle's clock after all turns."""
    whole, index = copies(graph, segments, microbatches, joined=joined)
    oracle = Oracle(whole, cluster)
    for op, (home, _) in enumerate(zip(devices, graph.ops, strict=True)):
        oracle.reserve(index[op, 0], home)
    for segment, batch in turns:
        for op in segments[segment]:
            oracle.commit(index[op, batch], devices[op])
    return oracle


def launched_peaks(
    graph, cluster, devices, segments, turns, microbatches, *, joined=False, gpus=None
):
    """Peaks of devices where turns run one by one, and send what they made when they end.

    On GPUs what is sent stays until the turns that read it have ended. What arrives from another
    stays until a turn reads another arrival, made after a turn began that has nothing to do with it
    any more; what arrives from another lane, or with a loss for all, to the end.
    """
    gpus = gpus or [None] * len(cluster.devices)
    whole, index = copies(graph, segments, microbatches, joined=joined)
    home = {at: devices[op] for (op, _), at in index.items()}
    pools = [row.pool or number for number, row in enumerate(cluster.devices)]
    pool = {at: pools[device] for at, device in home.items()}
    live = dict.fromkeys(pools, 0)
    for at, op in enumerate(whole.ops):
        live[pool[at]] += op.persistent_bytes
    peaks, there, ran, ended = dict(live), {}, set(), set()

    def may_go(number, place):
        tensor = whole.tensors[number]
        maker = tensor.producer
        arrived = [r for r in tensor.consumers if pool[r] == place and home[r] != home[maker]]
        for reader in arrived:
            gpu = gpus[home[reader]]
            if gpu and (joined or gpu == gpus[home[maker]] or (number, home[reader]) not in passed):
                return False
        if place != pool[maker]:
            return there[number, place] <= ran
        if tensor.kept or not tensor.consumers or not there[number, place] <= ran:
            return False
        if all(pool[r] == place for r in tensor.consumers):
            return True
        others = {r for r in tensor.consumers if home[r] != home[maker]}
        return maker in ended and (not gpus[home[maker]] or others <= ended)

    def go():
        for number, place in [key for key in there if may_go(*key)]:
            live[place] -= whole.tensors[number].nbytes
            del there[number, place]

    def come(number, place):
        readers = whole.tensors[number].consumers
        there[number, place] = {r for r in readers if pool[r] == place}
        live[place] += whole.tensors[number].nbytes

    turn_of = {
        index[op, batch]: number
        for number, (segment, batch) in enumerate(turns)
        for op in segments[segment]
    }
    passed = set()

    def arrivals(device):
        for number, tensor in enumerate(whole.tensors):
            readers = [turn_of[r] for r in tensor.consumers if home[r] == device]
            other = gpus[home[tensor.producer]] != gpus[device]
            if readers and home[tensor.producer] != device and other:
                yield number, readers, turn_of[tensor.producer]

    def begin(turn, device):
        made = [made for _, readers, made in arrivals(device) if min(readers) == turn]
        mine = [t for t, row in enumerate(turns) if devices[segments[row[0]][0]] == device]
        for number, readers, _ in arrivals(device):
            behind = [t for t in mine if t > max(readers)][:1]
            if behind and any(other > behind[0] for other in made):
                passed.add((number, device))
        go()

    for turn, (segment, batch) in enumerate(turns):
        own = [index[op, batch] for op in segments[segment]]
        begin(turn, home[own[0]])
        for at in own:
            for number, tensor in enumerate(whole.tensors):
                if tensor.producer == at:
                    come(number, pool[at])
            op = whole.ops[at]
            for place, nbytes in live.items():
                scratch = op.workspace_bytes - op.reused_bytes if place == pool[at] else 0
                peaks[place] = max(peaks[place], nbytes + scratch)
            ran.add(at)
            go()
        ended.update(own)
        for number, tensor in enumerate(whole.tensors):
            if tensor.producer in own:
                for place in {pool[r] for r in tensor.consumers} - {pool[tensor.producer]}:
                    come(number, place)
        go()
    return [peaks[place] for place in pools]
