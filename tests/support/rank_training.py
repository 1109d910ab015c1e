"""A training of ranks that is killed and goes on: what `docs/ranks.md` shows, as a script.

    torchrun --nproc-per-node 2 --max-restarts 3 rank_training.py FOLDER STEPS [KILLED_AT]

Writes a checkpoint after each step, and at the end the loss of each step. In step KILLED_AT, at its
first try, rank 1 kills itself.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from rank_checks import T, Tied, X, criterion, place
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd

import baechi

FLAT = sd.StateDictOptions(flatten_optimizer_state_dict=True)


def main(folder: Path, steps: int, killed_at: int = -1) -> None:
    torch.set_num_threads(1)
    ranks = baechi.ranks(memory="8GiB")
    placed = place(Tied(), ranks, 1, microbatches=2, example_args=(X,))
    optimizer = torch.optim.AdamW(placed.parameters(), 0.1)
    done, losses = 0, torch.zeros(steps)
    latest = folder / "latest"
    state = {
        "model": placed.state_dict(),
        "optimizer": sd.get_optimizer_state_dict(placed, optimizer, options=FLAT),
        "losses": losses,
    }
    if latest.exists():
        done = int(latest.read_text())
        dcp.load(state, checkpoint_id=folder / str(done))
        placed.load_state_dict(state["model"])
        sd.set_optimizer_state_dict(placed, optimizer, state["optimizer"], options=FLAT)
    for step in range(done, steps):
        if (
            step == killed_at
            and ranks.rank == 1
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        losses[step] = placed.step(X, targets=T, loss=criterion)
        optimizer.step()
        optimizer.zero_grad()
        state["model"] = placed.state_dict()
        state["optimizer"] = sd.get_optimizer_state_dict(placed, optimizer, options=FLAT)
        dcp.save(state, checkpoint_id=folder / str(step + 1))
        if ranks.rank == 0:
            latest.write_text(str(step + 1))
    if ranks.rank == 0:
        (folder / "losses").write_text(" ".join(map(str, losses.tolist())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
