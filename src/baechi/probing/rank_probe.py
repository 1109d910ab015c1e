"""`ranks`: the processes that `torchrun` started as devices of one cluster, with measured links."""

import atexit
import json
import os
import time
from statistics import median
from typing import Any, Final

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from baechi.errors import InputError
from baechi.probing.cluster_probe import free_bytes
from baechi.probing.link_probe import fit_link
from baechi.processes.tensor_messages import Message, receive, send
from baechi.processes.world import TRANSPORTS, Ranks
from baechi.records.cluster import Cluster, Device, Link
from baechi.torch_support.torch_devices import device_kind, usable_gpus
from baechi.units import parse_bytes
from baechi.validation import check_choice, check_positive

_SIZES: Final = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
_ROUND_TRIPS: Final = 12
_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"


def ranks(
    *,
    memory: int | str | None = None,
    timeout_s: int = 60,
    transport: str = "auto",
    replicas: int = 1,
) -> Ranks:
    """The ranks of this job as devices for `place`: one logical device in each process.

    Every process of the job calls this, and then `place` and the placed model in the same order
    with arguments of the same shapes; each runs its part. Start them with
    `torchrun --nproc-per-node 2 train.py`, or as a job of Slurm, Kubernetes or Ray that sets its
    variables.

    Args:
        memory: What each device may hold, such as `"8GiB"`; by default what is free there.
        timeout_s: How long a rank may take beyond the longest predicted step, before the others
            give up with an error.
        transport: `"auto"` is shared memory between ranks of a host and gloo between hosts;
            `"gloo"` is gloo alone.
        replicas: Number of copies of the model, each on as many consecutive ranks. Each gets a
            batch of its own, and gradients are the mean over all.

    Raises:
        InputError: No launcher has started this process, or an argument is wrong.
    """
    check_choice(transport, TRANSPORTS, "transport")
    check_positive(timeout_s, "timeout_s"), check_positive(replicas, "replicas")
    capacity = None if memory is None else parse_bytes(memory, what="memory")
    gpus, _ = usable_gpus()
    if not distributed.is_initialized():
        if not distributed.is_torchelastic_launched() and "RANK" not in os.environ:
            raise InputError(
                "baechi.ranks() is for processes that a launcher started, and this one has no RANK "
                "in its environment: torchrun --nproc-per-node 2 train.py."
            )
        # One store serves all attempts of a launcher that restarts ranks, and what an earlier one
        # left there makes torch hang (pytorch#135712): so each has names of its own.
        store, rank, size = next(rendezvous("env://"))
        store = PrefixStore(f"attempt {os.environ.get(_ATTEMPT, '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(_leave)
    local = int(os.environ.get("LOCAL_RANK", distributed.get_rank()))
    place = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if distributed.get_world_size() % replicas:
        raise InputError(
            f"{distributed.get_world_size()} ranks cannot hold {replicas} replicas of equal size; "
            f"start a multiple of {replicas} ranks."
        )
    found = Ranks(place, timeout_s, transport, replicas)
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_bytes(place, -(-beside // max(gpus, 1))) if capacity is None else capacity
    told = found.exchange("devices", json.dumps([device_kind(place), free]))
    rows = [json.loads(row) for row in told]
    devices = tuple(
        Device(f"rank{rank}", min(row[1] for row in rows[rank :: found.size]), kind=rows[rank][0])
        for rank in range(found.size)
    )
    found.cluster = Cluster(devices, _links(found))
    return found


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _links(ranks: Ranks) -> tuple[tuple[Link | None, ...], ...]:
    """The links, each way as the pair's ping-pong says; one pair after the other."""
    rows: list[list[Link | None]] = [[None] * ranks.size for _ in range(ranks.size)]
    for one in range(ranks.size):
        for two in range(one + 1, ranks.size):
            times = _ping_pong(ranks, one, two) if ranks.rank in (one, two) else []
            told = json.loads(ranks.exchange("the times of a link", json.dumps(times))[one])
            rows[one][two] = rows[two][one] = fit_link(_SIZES, told).link
    return tuple(map(tuple, rows))


def _ping_pong(ranks: Ranks, one: int, two: int) -> list[int]:
    """The median time one way for each size."""
    first, peer = ranks.rank == one, two if ranks.rank == one else one
    times = []
    for nbytes in _SIZES:
        tensor: Any = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
        readings = []
        for number in range(_ROUND_TRIPS):
            start = time.perf_counter_ns()
            if first:
                send(ranks.senders[peer], Message((number,), [tensor]))
            receive(ranks.receivers[peer], (number,), ranks.device)
            if not first:
                send(ranks.senders[peer], Message((number,), [tensor]))
            readings.append((time.perf_counter_ns() - start) // 2)
        times.append(max(int(median(readings[2:])), 1))
    return times
