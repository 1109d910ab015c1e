"""Comparison of a placed model with the unsplit one over one step.

    the model itself ──step──► outputs, gradients, buffers ◄──step── the placed model

`docs/runtime.md` (Verifying) says what follows if these differ, or draw random numbers in another
order.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import fx, nn

from baechi.errors import ExecutionError, InputError
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.tape import TapeCode
from baechi.runtime.executable import Executable
from baechi.torch_support.torch_internals import without_gradient_hooks
from baechi.tracing.alias_analysis import copy_of
from baechi.tracing.calling_convention import Call
from baechi.tracing.fx_nodes import op_and_line, op_name, operator_name
from baechi.tracing.model_notes import notes_kept
from baechi.tracing.observers import without_observers
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.recurrent_layers import compact

# What these give is whatever was in memory.
_UNWRITTEN: Final = ("empty", "new_empty")

# Kernels of another kind of device add up in another order, and may multiply in TF32 (10 bits).
_OTHER_KIND: Final = (1e-3, 1e-4)  # relative, absolute
_WIDE: Final = (torch.float32, torch.float64, torch.complex64, torch.complex128)

# A node, a leaf of its value, and whether it is the gradient of that leaf.
_Key = tuple[fx.Node, int, bool]
_Note = Callable[[_Key, torch.Tensor], None]

# When a value was made, forward or then backward, and how it differs.
_Difference = tuple[tuple[int, int], str]
# Outputs, gradients and buffers of a step by name, in this order.
_Outcome = dict[str, torch.Tensor | None]


@final
class Unsplit:
    """A copy of a model as it is before it is placed; takes memory for it on its present device."""

    def __init__(self, model: nn.Module) -> None:
        self._memo: dict[int, Any] = {}
        with torch.inference_mode(False):
            self.model = copy.deepcopy(model, self._memo)
            compact(self.model)

    def twin(self, value: Any) -> Any:
        """The copy of one of the model's tensors or submodules; other tensors beside the copy."""
        found = self._memo.get(id(value))
        if found is not None or not isinstance(value, torch.Tensor):
            return value if found is None else found
        home = next(iter([*self.model.parameters(), *self.model.buffers()]), value).device
        return value.to(home)


def verify(unsplit: Unsplit, executable: Executable, call: Call) -> None:
    """Compare a step of the placed model with one of the unsplit model.

    Gradients, buffers and the random state stay as they were, and the call's arguments are copied.

    Raises:
        ExecutionError: An output, a gradient or a buffer differs; names the first operator.
        InputError: The model draws random numbers, and its devices draw others than its present
            one.
    """
    mode = executable.module.gradients
    gpus = sorted({place.index for place in executable.places if place.type == "cuda"})
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(executable.training if mode is None else mode),
        torch.random.fork_rng(gpus),
        without_observers(unsplit.model),
        without_observers(executable.module.model),
    ):
        _Verification(unsplit, executable, call).run()


@final
class _Verification:
    """The state of one verification."""

    def __init__(self, unsplit: Unsplit, executable: Executable, call: Call) -> None:
        module = executable.module
        self._unsplit = unsplit
        self._executable = executable
        self._module = module
        self._call = call
        self._seed = torch.initial_seed()
        self._model = module.model
        self._name = type(module.model).__name__
        both = zip(self._model.buffers(), unsplit.model.buffers(), strict=True)
        self._buffers = [(one, two, two.detach().clone()) for one, two in both]
        self._facts = module.facts.nodes
        self._rank = {node: i for i, node in enumerate(module.graph_module.graph.nodes)}
        own = [n for row in module.nodes for n in row if n.op not in ("placeholder", "get_attr")]
        self.operators = {n.name: n for n in sorted(own, key=self._rank.__getitem__)}
        self._draws = [name for name, n in self.operators.items() if self._facts[n].random]
        self.seeds: dict[str, int] = {}  # of operators that draw, where their order differs
        self._values: dict[_Key, torch.Tensor] = {}  # of the unsplit run, operator by operator

    def run(self) -> None:
        """Compare, and name what differs."""
        with without_gradient_hooks(self._model.parameters()):  # the copy has none
            try:
                self._compare()
            finally:
                self._put_back()

    def _compare(self) -> None:
        expected = self._step(self._eager)
        text = ""
        if self._draws and self._is_drawn_elsewhere():
            untrue = _difference(expected, self._step(self._traced()))
            if untrue:
                raise self._untrue(untrue)
            draws = enumerate(self._draws)
            self.seeds = {name: (self._seed + i) % 2**63 for i, name in draws}
        else:
            text = _difference(expected, self._step(self._executable))
            if not text:
                return
        alone = self._step(self._traced())
        found: list[_Difference] = []
        with self._executable.running(lambda bound: self._compared(bound, found)):
            placed = self._step(self._executable)
        text = text or _difference(alone, placed)
        if not found and not text:
            return
        again: list[_Difference] = []
        self._step(self._traced(again))
        if again and (not found or min(again)[0] <= min(found)[0]):
            raise ExecutionError(
                f"the placed {self._name} differs from the unsplit one ({text}), and the unsplit "
                f"one differs from itself: {min(again)[1]} the second time. Its result depends on "
                "more than its inputs; verify it with a fixed seed and without such state."
            )
        untrue = "" if self.seeds else _difference(expected, alone)
        raise self._untrue(untrue) if untrue and not found else self._differs(found, text)

    def _is_drawn_elsewhere(self) -> bool:
        """True if random numbers are drawn in another order than on the unsplit model.

        On CPUs they are not; every GPU has a generator of its own.

        Raises:
            InputError: They are others.
        """
        used = {tape.device for tape in self._executable.program.tapes}
        kinds = {self._executable.places[device].type for device in used}
        tensors = [*self._unsplit.model.parameters(), *self._unsplit.model.buffers()]
        present = {tensor.device.type for tensor in [*tensors, *self._call.tensors]}
        if present and kinds != present:
            raise InputError(
                f"verify cannot compare {self._name}: {op_name(self.operators[self._draws[0]])} "
                f"draws random numbers, and {'/'.join(sorted(kinds))} draws others than "
                f"{'/'.join(sorted(present))}, where the model is now. Move the model there before "
                "it is placed, or verify it without dropout (model.eval())."
            )
        return len(used) > 1 and "cuda" in kinds

    def _untrue(self, text: str) -> ExecutionError:
        return ExecutionError(
            f"the placed {self._name} differs from the unsplit one as its trace does, before it is "
            f"split: {text}. The model's Python reads something that changes from call to call, or "
            "that tracing does not see; make it an argument or a buffer."
        )

    def _differs(self, found: list[_Difference], text: str) -> ExecutionError:
        first = f", first at {min(found)[1]}" if found else ""
        return ExecutionError(
            f"the placed {self._name} differs from the unsplit one{first} "
            f"({text or 'a value has another result'}). An operator "
            "that depends on its device, its thread or on what ran before cannot be split off: "
            "keep it on the model's own device with constraints, or make it a function of its "
            "inputs."
        )

    # Steps.

    def _step(self, forward: Callable[[Call], Any]) -> _Outcome:
        owner = self._model if forward is self._executable else self._unsplit.model
        self._put_back()
        with notes_kept(self._model), notes_kept(self._unsplit.model):
            torch.manual_seed(self._seed)
            # Anew, since a run may write into them.
            call = replace(self._call, tensors=tuple(map(copy_of, self._call.tensors)))
            outputs = tensors_in(forward(call))
            leaves = {f"argument {n}": t for n, t in zip(call.names, call.tensors, strict=True)}
            leaves |= dict(owner.named_parameters())
            leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            outcome: _Outcome = {f"output {i}": one.detach() for i, one in enumerate(outputs)}
            if self._executable.training and roots and leaves:
                found = torch.autograd.grad(_total(roots), list(leaves.values()), allow_unused=True)
                named = zip(leaves, found, strict=True)
                outcome |= {f"the gradient of {name}": gradient for name, gradient in named}
            buffers = owner.named_buffers()
            return outcome | {f"buffer {name}": value.detach().clone() for name, value in buffers}

    def _put_back(self) -> None:
        with torch.no_grad():
            for one, two, value in self._buffers:
                one.copy_(value)
                two.copy_(value)

    def _eager(self, call: Call) -> Any:
        args, kwargs = call.structure.fill(call.tensors)
        return self._unsplit.model(*args, **kwargs)

    def _traced(self, found: list[_Difference] | None = None) -> Callable[[Call], Any]:
        """The trace, with the copy's state; notes values, or `found` gets how they differ now."""
        written = self._module.facts.written

        def keep(key: _Key, tensor: torch.Tensor) -> None:
            node, leaf, is_gradient = key
            own = not is_gradient and self._facts[node].values[leaf].storage in written
            self._values[key] = tensor.detach().clone() if own else tensor.detach()

        note = keep if found is None else self._comparing(found, "")

        def forward(call: Call) -> Any:
            module = self._module.graph_module
            runner = _Runner(module, self, note, self._unsplit.twin)
            returned = runner.run(*call.tensors, enable_io_processing=False)
            result, _ = self._module.returned.fill(list(returned), call.objects)
            return result

        return forward

    def _compared(self, bound: Bound, found: list[_Difference]) -> Bound:
        """The placed model's code, where each operator is compared as it runs."""

        def compared(tape: TapeCode) -> TapeCode:
            module: fx.GraphModule = tape.function.__self__  # type: ignore[attr-defined]
            note = self._comparing(found, f" on logical device {tape.device}")

            def function(arguments: list[Any]) -> tuple[Any, ...]:
                runner = _Runner(module, self, note)
                return tuple(runner.run(arguments, enable_io_processing=False))

            return replace(tape, function=function)

        return replace(bound, tapes=tuple(map(compared, bound.tapes)))

    # Comparisons.

    def _comparing(self, found: list[_Difference], where: str) -> _Note:
        def compare(key: _Key, tensor: torch.Tensor) -> None:
            node, _, is_gradient = key
            called = operator_name(node) if node.op == "call_function" else ""
            if key not in self._values or (called.startswith(_UNWRITTEN) and not is_gradient):
                return
            text = _distance(self._values[key], tensor)
            if text:
                rank = (1, -self._rank[node]) if is_gradient else (0, self._rank[node])
                what = "the gradient of " if is_gradient else ""
                found.append((rank, f"{what}{op_and_line(node)}{where}: {text}"))

        return compare


@final
class _Runner(fx.Interpreter):
    """Runs a graph node by node, and notes the tensors that each operator makes.

    Where one gets a gradient of its own, that is noted, too, when it is complete.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        verification: _Verification,
        note: _Note,
        twin: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        super().__init__(module)
        self._operators, self._seeds = verification.operators, verification.seeds
        self._note, self._twin = note, twin

    def fetch_attr(self, target: str) -> Any:
        return self._twin(super().fetch_attr(target))

    def run_node(self, n: fx.Node) -> Any:
        node = self._operators.get(n.name)
        # A tape's code takes what other tapes made under the name that it has there.
        if node is None or (n.op, n.target) != (node.op, node.target):
            return super().run_node(n)
        if n.name in self._seeds:
            torch.manual_seed(self._seeds[n.name])
        given = [tensor for arg in n.all_input_nodes for tensor in tensors_in(self.env[arg])]
        result = super().run_node(n)
        for leaf, tensor in enumerate(tensors_in(result)):
            self._note((node, leaf, False), tensor)
            if tensor.grad_fn is not None and not any(tensor is other for other in given):
                key = (node, leaf, True)
                tensor.register_hook(functools.partial(self._note, key))  # type: ignore[no-untyped-call]
        return result


def _difference(expected: _Outcome, actual: _Outcome) -> str:
    """The first difference of two steps; empty if there is none."""
    for name, one in expected.items():
        pair = (one, actual[name])
        known = next((tensor for tensor in pair if tensor is not None), None)
        if known is not None:
            # A gradient that only one of them has is compared with zero.
            text = _distance(*(torch.zeros_like(known) if t is None else t for t in pair))
            if text:
                return f"{name} has {text}"
    return ""


def _distance(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """The distance of two tensors, if it exceeds rounding in their dtype; else empty."""
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"{_kind(actual)} instead of {_kind(expected)}"
    other_kind = expected.device.type != actual.device.type and expected.dtype in _WIDE
    rtol, atol = _OTHER_KIND if other_kind else (None, None)
    one, two = expected.detach(), actual.detach().to(expected.device)
    try:
        torch.testing.assert_close(two, one, equal_nan=True, rtol=rtol, atol=atol)
    except AssertionError:
        wide = torch.complex128 if one.is_complex() else torch.float64
        one, two = one.to_dense().to(wide), two.to_dense().to(wide)
        error, size = (two - one).abs(), one.abs()
        ratios = (error / size)[size > 0]
        relative = f", max rel error {float(ratios.max()):.3g}" if ratios.numel() else ""
        return f"max abs error {float(error.max()):.3g}{relative}"
    return ""


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar that depends on every element of every tensor."""
    rows = [(t.abs() if t.is_complex() else t).double() for t in tensors]
    return torch.stack([(row**2).mean().cpu() for row in rows]).sum()
