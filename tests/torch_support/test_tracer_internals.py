"""The private names of torch of its tracers: a test for each, which names the one that broke."""

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from baechi.torch_support import tracer_internals as internals


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
        torch.ones(3, requires_grad=True).exp()
    assert hooks == known


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


def test_an_export_keeps_what_switches_modes() -> None:
    class Switching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                return x @ x

    with internals.switches_kept():
        graph = torch.export.export(Switching(), (torch.ones(2, 2),), strict=False).module().graph
    switches = [node.target for node in graph.nodes if node.op == "call_function"]
    assert switches == [
        internals.SET_GRADIENTS,
        internals.ENTER_AUTOCAST,
        torch.ops.aten.matmul.default,
        internals.EXIT_AUTOCAST,
        internals.SET_GRADIENTS,
    ]
