"""Free parts of a machine's GPUs, as `nvidia-smi` prints them."""

import csv
import socket
from typing import Final

from baechi.adapters.free_devices import MIB, FreeDevice, kind_named, reading
from baechi.errors import InputError
from baechi.scheduling.claims import WHOLE_MILLI

COMMAND: Final = (
    "nvidia-smi --query-gpu=index,uuid,name,memory.free,utilization.gpu,mig.mode.current "
    "--format=csv,noheader,nounits"
)


def smi_devices(text: str, node: str | None = None) -> tuple[FreeDevice, ...]:
    """What is left of the GPUs in the output of `COMMAND`.

    The compute that others leave is what the last sample's utilization leaves, a rough guess: it is
    the time in which any kernel ran.

    Args:
        text: The output.
        node: The name of the machine; this one's if absent.

    Raises:
        InputError: A line is none of that command's, or a GPU is cut into MIG instances.
    """
    free = []
    for row in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        if len(row) != 6:
            raise InputError(f"the line {row!r} has no six fields; print them with\n  {COMMAND}")
        index, uid, name, free_mib, percent, mig = row
        if mig == "Enabled":
            raise InputError(
                f"GPU {index} is cut into MIG instances, which this output does not list. Read "
                "ResourceSlices instead, or give a ledger that shares it as 'mig'."
            )
        with reading(f"the line {row!r}"):
            used = 0 if percent.startswith("[") else int(percent)
            left = int(free_mib) * MIB
        share = (100 - used) * WHOLE_MILLI // 100
        host = node or socket.gethostname()
        free.append(FreeDevice(host, f"cuda:{index}", left, share, kind_named(name), uid))
    return tuple(free)
