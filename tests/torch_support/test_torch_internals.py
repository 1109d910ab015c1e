"""The private names of torch that Baechi uses: a test for each, which names the one that broke."""

import emulated
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from baechi.torch_support import torch_internals as internals
from baechi.torch_support.storages import key_of


def graded() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("keep", [False, True])
def test_the_engine_without_checks(keep: bool) -> None:
    x, y = graded(), graded()
    out = x.sin().exp()
    found = internals.gradients([get_gradient_edge(out)], [torch.ones(3)], [x, y], keep=keep)
    assert torch.allclose(found[0], out.detach() * x.detach().cos())
    assert found[1] is None
    if keep:
        out.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


def test_the_beginning_of_a_graph() -> None:
    given = torch.ones(2)
    one, two = internals.cut_off([given, torch.zeros(3)])
    assert one.requires_grad
    assert two.requires_grad
    assert one.data_ptr() == given.data_ptr()
    one.add_(1)  # no leaf
    with pytest.raises(RuntimeError, match="gradients flow from the model"):
        one.sum().backward()


def test_the_number_of_a_backward_and_whether_its_graph_is_kept() -> None:
    seen: list[tuple[int, bool]] = []

    def note(gradient: torch.Tensor) -> None:
        del gradient
        seen.append((internals.backward_id(), internals.is_graph_kept()))

    out = graded().exp()
    out.register_hook(note)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert internals.backward_id() == -1
    (first, kept), (second, freed) = seen
    assert -1 not in (first, second)
    assert first != second
    assert kept
    assert not freed


def test_the_count_of_writes() -> None:
    x = torch.zeros(2)
    alias, before = x.detach(), internals.version_of(x)
    x.add_(1)
    assert internals.version_of(alias) == before + 1
    internals.set_version(x, before + 7)
    assert internals.version_of(alias) == before + 7


def test_a_view_of_a_function_may_be_written() -> None:
    class Row(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            del ctx
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            del ctx
            return gradient

    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Row.apply(graded() * 1).add_(1)


def test_hooks_of_a_tensor() -> None:
    x = graded()
    assert not internals.gradient_hooks(x)
    handle = x.register_hook(lambda gradient: gradient)
    assert len(internals.gradient_hooks(x)) == 1
    handle.remove()
    assert not internals.gradient_hooks(x)


def test_hooks_that_a_tensor_is_given_later() -> None:
    x, seen = graded(), []
    y = x * 2
    hooks = internals.watch_hooks(y)
    assert not hooks
    y.register_hook(seen.append)
    assert len(hooks) == 1
    loss = y.sum()
    del y
    loss.backward()
    assert len(seen) == 1
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_hooks_of_saved_tensors() -> None:
    seen = []
    with saved_tensors_hooks(seen.append, torch.sin), saved_tensors_hooks(seen.append, torch.sin):
        assert internals.is_hooked()
        assert not internals.is_checkpointed()
        with internals.unhooked():
            assert not internals.is_hooked()
            graded().exp()
        assert not seen
        graded().exp()
        assert len(seen) == 1
    assert not internals.is_hooked()


def test_hooks_of_a_checkpoint() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        assert internals.is_checkpointed()
        return x.exp()

    checkpoint(block, graded(), use_reentrant=False)
    assert not internals.is_checkpointed()


def test_the_key_of_a_storage() -> None:
    x = torch.ones(3)
    assert key_of(x.untyped_storage()) == key_of(x[1:].untyped_storage())
    assert key_of(x.untyped_storage()) != key_of(torch.ones(3).untyped_storage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_copies_in_one_call_have_every_bit(dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1.1, -1e-42, float("inf"), float("-inf"), float("nan")]
    dense = torch.tensor(values, dtype=dtype)
    sources = [dense, dense.repeat(3, 1).t(), torch.full((), -0.0, dtype=dtype)]
    for sparse in ([], [torch.eye(2, dtype=dtype).to_sparse()]):
        for source, copy in zip(sources + sparse, internals.copies(sources + sparse), strict=True):
            assert copy.dtype is dtype
            if source.layout is torch.strided:
                assert copy.stride() == source.stride()
                assert copy.data_ptr() != source.data_ptr()
                bits = [t.contiguous().view(torch.uint8) for t in (source[None], copy[None])]
                assert torch.equal(*bits)


@pytest.mark.gpu
def test_a_pool_without_a_capture() -> None:
    with pytest.raises(RuntimeError):
        internals.abandon_pool(0, torch.cuda.graph_pool_handle())


def test_names_of_the_compiler() -> None:
    assert callable(internals.backend_named("eager"))
    assert internals.backend_named(len) is len
    assert all(issubclass(kind, Exception) for kind in internals.refusals())
    assert internals.inductor_options("reduce-overhead")["triton.cudagraphs"]
    assert internals.inductor_options(None) == {"triton.cudagraphs": False}
    with internals.keeping_graphs(force_non_lazy_backward_lowering=True):
        pass


def test_names_of_modules() -> None:
    own = nn.BatchNorm1d(2)
    buffers = internals.buffers_of(own)
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(map(list, internals.state_of(own))) == [[], ["weight", "bias"], list(buffers)]
    assert list(internals.state_of(nn.Sequential(own))[0]) == ["0"]
    own.register_forward_hook(lambda *_: None)
    assert len(internals.hooks_of(own, "_forward_hooks")) == 1
    assert not internals.hooks_of(None, "_forward_hooks")
    vars(own)[internals.CALL] = lambda x: x * 2
    assert own(torch.ones(1)).item() == 2


@pytest.mark.gpu
def test_a_spinning_stream_is_busy() -> None:
    with emulated.on_the_clock():
        internals.spin(100_000_000)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
