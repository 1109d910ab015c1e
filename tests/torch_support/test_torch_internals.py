"""The private names of torch that Baechi uses: a test for each, which names the one that broke."""

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from torch import fx, nn
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


def test_operators_are_seen_with_what_their_schemas_say() -> None:
    seen: list[tuple[str, bool, float]] = []

    def see(func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        assert isinstance(func, internals.OpOverload)
        assert not kwargs
        assert isinstance(args[0], torch.Tensor)
        name = func.overloadpacket.__name__
        seen.append((name, func._schema.is_mutable, float(result.sum())))

    x = torch.ones(2, 3)
    with internals.Watch(see):
        x.t().add_(1)
    assert seen == [("t", False, 6), ("add_", True, 12)]
    assert torch.ops.aten.mm.default.overloadpacket is torch.ops.aten.mm


def test_fake_tensors_have_shapes_and_no_memory() -> None:
    with internals.FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.ones(1 << 40, 1 << 10) @ torch.ones(1 << 10, 2)
    assert made.shape == (1 << 40, 2)


def test_operators_and_their_schemas() -> None:
    add = torch.ops.aten.add.Tensor
    assert isinstance(add, internals.OpOverload)
    assert isinstance(torch.ops.aten.add, internals.OpOverloadPacket)
    assert add._schema.name == "aten::add"
    assert not add._schema.is_mutable
    assert [row.name for row in add._schema.arguments] == ["self", "other", "alpha"]


def test_fake_tensors_and_their_kernels() -> None:
    with internals.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3), static_shapes=True)
        assert isinstance(fake, internals.FakeTensor)
        assert isinstance(torch.ones(2), internals.FakeTensor)
        with internals.untraced():
            assert not isinstance(torch.ones(2), internals.FakeTensor)
    assert torch.ops.aten.empty_like.default in internals.fake_kernels


def test_dispatch_sees_operators() -> None:
    class Names(internals.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    seen: list[str] = []
    with Names():
        torch.ones(2).exp_()
    assert "aten.exp_.default" in seen


def test_the_base_of_autograd_functions() -> None:
    assert "apply" in dir(internals.FunctionBase)
    assert issubclass(torch.autograd.Function, internals.FunctionBase)
    assert callable(super(internals.FunctionBase, torch.autograd.Function).apply)


def test_recording_below_an_export() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append(internals.export_mode())
            with internals.below_export():
                hidden = x.sin()
            assert hidden.shape == x.shape
            node = modes[-1].tracer.create_proxy(
                "call_function", internals.held_function, ("0",), {}
            )
            internals.track_tensor_tree(hidden, node, constant=None, tracer=modes[-1].tracer)
            return hidden + 1

    modes: list[object] = []
    assert internals.export_mode() is None
    program = torch.export.export(Asks(), (torch.ones(2),), strict=False)
    names = [str(node.target) for node in program.graph.nodes]
    assert modes[0] is not None
    assert not any("sin" in name for name in names)
    assert any("held" in name or "custom_autograd" in name for name in names)


def test_a_composite_operator_in_cpp() -> None:
    cell = nn.GRUCell(3, 4)
    x, hidden = torch.randn(2, 3), torch.randn(2, 4)
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    operator: Any = torch.ops.aten.gru_cell.default
    assert torch.equal(internals.decomposed_in_cpp(operator, x, hidden, *weights), cell(x, hidden))


def test_autograd_sees_what_a_composite_operator_calls() -> None:
    aten = torch.ops.aten
    assert all(map(internals.is_composite, (aten.rms_norm.default, aten.linear.default)))
    assert not any(map(internals.is_composite, (aten.mm.default, aten.mean.dim)))


def test_classes_with_operators_of_their_own() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    assert internals.has_own_operators(Own)
    assert not internals.has_own_operators(nn.Parameter)
    assert not internals.has_own_operators(type("Plain", (torch.Tensor,), {}))


def test_what_a_failed_tracer_began_is_ended() -> None:
    levels = torch._C._functorch
    for begin in (levels._grad_increment_nesting, partial(levels._func_increment_nesting, True)):
        depth = levels.get_dynamic_layer_stack_depth()
        with internals.tracers_ended():
            begin()
            levels._vmap_increment_nesting(2, "error")
            with internals.tracers_ended():
                levels._grad_increment_nesting()
            assert levels.get_dynamic_layer_stack_depth() == depth + 2
        assert levels.get_dynamic_layer_stack_depth() == depth
    hooks = nn.modules.module._global_buffer_registration_hooks
    known = dict(hooks)  # torch 2.11 leaves one where a caller's own export fails
    with internals.tracers_ended():
        torch._C._autograd._saved_tensors_hooks_disable("no")
        nn.modules.module.register_module_buffer_registration_hook(lambda *_: None)
    with saved_tensors_hooks(torch.clone, torch.clone):
        graded().exp()
    assert hooks == known


@pytest.mark.gpu
def test_a_spinning_stream_is_busy() -> None:
    with emulated.on_the_clock():
        internals.spin(100_000_000)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()


def test_the_tracer_that_runs_is_named() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(internals.foreign_tracer())
        return x * 2

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return f(x)

    x = torch.ones(2)
    f(x)
    torch.func.vmap(f)(x)
    torch.export.export(Module(), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        torch.jit.trace(f, x, check_trace=False)
    assert list(dict.fromkeys(seen)) == ["", "torch.func", "torch.export", "torch.jit.trace"]


def test_while_exporting_code_is_generated_when_it_is_called() -> None:
    with internals.frugal_export():
        module = fx.symbolic_trace(nn.ReLU())
        assert not hasattr(module, "_code")
        assert module(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
        assert "relu" in module.code
    module.recompile()
    assert module(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


def test_while_exporting_stacks_are_of_the_models_lines() -> None:
    model, own = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), Path(torch.__file__)

    def stacks() -> list[list[tuple[str, ...]]]:
        program = torch.export.export(model, (torch.ones(2, 2),))
        texts = [node.stack_trace for node in program.graph.nodes if node.op == "call_function"]
        return [re.findall(r'File "(.+)", line (\d+), in (.+)', text) for text in texts]

    usual = stacks()
    with internals.frugal_export():
        found = stacks()
    assert found == [
        [row for row in rows if row[2] == "forward" or not row[0].startswith(str(own.parent))]
        for rows in usual
    ]
    assert [rows[-1][2] for rows in found] == ["forward"] * 3
    assert stacks() == usual


def test_what_keeps_attention_from_its_fused_kernel_in_a_trace() -> None:
    owner, name = internals.TRACER_CHECK
    seen: list[bool] = []

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(getattr(owner, name)())
            return x * 2

    x = torch.ones(2)
    torch.export.export(Module(), (x,))
    Module()(x)
    assert seen[0]
    assert not seen[-1]
