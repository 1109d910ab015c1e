"""What crosses streams lives to the end of its phase, and no longer than others keep it."""

import gc
from pathlib import Path

import pytest
import torch

import baechi
from baechi.runtime.executors.held_storages import HeldStorages


def test_what_is_held_lives_and_then_rests_with_its_owner() -> None:
    held = HeldStorages()
    kept, gone = torch.ones(3), torch.ones(4)
    held.add(kept[1:])  # a view holds what it is of
    held.add(gone)
    held.add(kept)
    address = gone.data_ptr()
    assert len(held) == 2
    assert kept in held
    del gone
    gc.collect()
    assert len(held) == 2
    held.rest()
    assert len(held) == 0
    held.wake()
    assert len(held) == 1  # what nobody else kept is gone
    assert kept in held
    assert address != kept.data_ptr()
    held.rest()
    held.wake()
    assert kept in held


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc"])
def test_of_a_sparse_tensor_indices_and_values_are_held(layout: str) -> None:
    held, sparse = HeldStorages(), getattr(torch.eye(3), layout)()
    assert sparse not in held
    held.add(sparse)
    assert sparse in held
    assert len(held) == (2 if layout == "to_sparse_coo" else 3)


def test_a_storage_that_autograd_saved_is_held_again() -> None:
    held = HeldStorages()
    weight = torch.ones(3, requires_grad=True)
    crossed = torch.full((3,), 2.0)
    held.add(crossed)
    product = weight * crossed  # saves it
    del crossed
    held.rest()
    held.wake()
    assert len(held) == 1
    product.sum().backward()
    assert len(held) == 1  # autograd has let go
    held.rest()
    held.wake()
    assert len(held) == 0


def test_the_runtime_tells_no_stream_of_tensors() -> None:
    """Lifetimes follow from waits; `Tensor.record_stream` makes peaks depend on the host's pace."""
    sources = Path(baechi.__file__).parent.rglob("*.py")
    assert not [path for path in sources if ".record_stream(" in path.read_text()]
