"""The one call: trace, profile, solve and apply, when the shapes are known."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import nn

from baechi.calls import Call, canonical_call, flatten
from baechi.constraints import Constraints
from baechi.costs import Profile
from baechi.devices import Cluster
from baechi.errors import ExecutionError, InputError
from baechi.estimation import estimate
from baechi.optimizers import check_optimizer
from baechi.placers.auto import check_effort
from baechi.probing import probe
from baechi.profiling import profile
from baechi.runtime.module import PlacedModule, Specialization, apply
from baechi.solving import placer_of, solve
from baechi.torch_devices import device_kind, torch_device
from baechi.traced import Traced
from baechi.tracing import trace
from baechi.values import check_positive

MAX_SHAPES: Final = 8


def place(
    model: nn.Module,
    devices: Any = None,
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    placer: Any = "auto",
    training: bool = True,
    optimizer: str | None = None,
    costs: str | Profile = "measure",
    verify: bool = False,
    progress: bool = True,
    threads_per_device: int | None = None,
    max_shapes: int = MAX_SHAPES,
    constraints: Constraints | None = None,
    effort: str | None = None,
) -> PlacedModule:
    """The model, split over devices; call it and train it as before.

    Without example arguments it specializes on the first call, and again on each call of a new
    shape, dtype, constant or mode, up to `max_shapes` times, with a word on each.

    Args:
        model: Any module; it is not copied, and its parameters stay the same objects.
        devices: What `probe` takes: names, torch devices, `baechi.Device` values, a mapping from
            names to capacities, a `Cluster`, or None for all that are visible.
        example_args: Positional arguments of one call, to specialize now.
        example_kwargs: Keyword arguments of that call.
        placer: A name (`"auto"`, `"m-topo"`, `"m-etf"`, `"m-sct"`, ...) or a placer value.
        training: Plan for forward and backward; else for inference, and run without gradients.
        optimizer: Whose state must fit too: a name of `optimizers.OPTIMIZERS`, with options.
        costs: `"measure"`; `"estimate"`, computed for every kind of device in the cluster; or a
            `Profile` of this model at this shape.
        verify: Compare the first call of each shape with the unsplit model's, outputs and
            gradients; needs memory for a copy of the model on its present device.
        progress: Say what is going on.
        threads_per_device: torch threads of every logical CPU device; by default an equal share.
        max_shapes: How many shapes of call to specialize for.
        constraints: What the placement must respect besides memory, as in `solve`.
        effort: `"fast"`, `"balanced"` (the default) or `"thorough"`, as in `solve`.

    Raises:
        InputError: A device, capacity, placer, effort, optimizer or argument is wrong.
        TraceError: The model cannot be traced.
        InfeasibleError: It does not fit; says what is missing.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")
    if isinstance(model, PlacedModule):
        raise InputError("the model is placed already; call model.unplace() first.")
    if costs not in ("measure", "estimate") and not isinstance(costs, Profile):
        raise InputError(
            f'costs is {costs!r}; it must be "measure", "estimate" or a baechi.Profile.'
        )
    check_optimizer(optimizer)
    placer_of(placer)
    if effort is not None:
        check_effort(effort)
    if constraints is not None and not isinstance(constraints, Constraints):
        raise InputError(f"constraints is {constraints!r}; give a baechi.Constraints or None.")
    check_positive(max_shapes, "max_shapes")
    if threads_per_device is not None:
        check_positive(threads_per_device, "threads_per_device")
    cluster = probe(devices)
    maker = _Maker(
        cluster,
        placer,
        training,
        optimizer,
        costs,
        verify,
        progress,
        threads_per_device,
        constraints,
        effort,
    )
    placed = PlacedModule(model, maker, max_shapes)
    if example_args is not None or example_kwargs is not None:
        call = canonical_call(model, () if example_args is None else example_args, example_kwargs)
        placed._special(model, call)
    return placed


@final
@dataclass(frozen=True)
class _Maker:
    """Makes a specialization for a call: the steps of `place`, in their order."""

    cluster: Cluster
    placer: Any
    training: bool
    optimizer: str | None
    costs: str | Profile
    verify: bool
    progress: bool
    threads: int | None
    constraints: Constraints | None
    effort: str | None

    def __call__(self, model: nn.Module, call: Call) -> Specialization:
        say = _say if self.progress else _hush
        shapes = ", ".join(
            f"{n} {list(t.shape)}" for n, t in zip(call.names, call.tensors, strict=True)
        )
        say(f"tracing {type(model).__name__} for {shapes}")
        args, kwargs = call.structure.fill(call.tensors)
        traced = trace(model, args, kwargs)
        graph = traced.graph(
            self._profiles(traced), training=self.training, optimizer=self.optimizer
        )
        say(f"placing {len(graph.ops)} operators on {len(self.cluster.devices)} devices")
        placement = solve(
            graph,
            self.cluster,
            self.placer,
            effort=self.effort,
            constraints=self.constraints,
        )
        reference = copy.deepcopy(model) if self.verify else None
        placed = apply(
            traced,
            placement,
            graph=graph,
            cluster=self.cluster,
            threads_per_device=self.threads,
        )
        special = placed._current
        if reference is not None:
            _verify(reference, model, special, call)
        return special

    def _profiles(self, traced: Traced) -> list[Profile]:
        """The costs, or a profile for each kind of device of the cluster, the first one's first."""
        if isinstance(self.costs, Profile):
            return [self.costs]
        if self.costs == "estimate":
            kinds = dict.fromkeys(device.kind for device in self.cluster.devices)
            return [estimate(traced, kind) for kind in kinds]
        places: dict[str, torch.device] = {}
        for device in self.cluster.devices:
            place = torch_device(device.name)
            places.setdefault(device_kind(place), place)
        return [
            profile(traced, place, threads=self._threads(), progress=self.progress)
            for place in places.values()
        ]

    def _threads(self) -> int | None:
        """The threads that an operator will have: its device's share."""
        if self.threads is not None:
            return self.threads
        cpus = sum(torch_device(d.name).type == "cpu" for d in self.cluster.devices)
        return max(torch.get_num_threads() // cpus, 1) if cpus else None


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(f"baechi: {text}", style="dim")


def _hush(text: str) -> None:
    """Say nothing."""


def _verify(reference: nn.Module, model: nn.Module, special: Specialization, call: Call) -> None:
    """Run one step both ways and compare; the model's buffers and gradients stay as they were.

    Raises:
        ExecutionError: An output, a gradient or a buffer differs.
    """
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    args, kwargs = call.structure.fill(_copies(call))
    expected = reference(*args, **kwargs)
    torch.set_rng_state(state)
    actual = special.executable(replace(call, tensors=_copies(call)))
    torch.set_rng_state(state)
    rows = list(zip(_floats(expected), _floats(actual), strict=True))
    if special.executable.training:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        twins = dict(reference.named_parameters())
        ours = [a for _, a in rows if a.requires_grad]
        theirs = [e for e, _ in rows if e.requires_grad]
        if ours and trained:
            grads = torch.autograd.grad(_total(ours), list(trained.values()), allow_unused=True)
            wanted = torch.autograd.grad(
                _total(theirs), [twins[n] for n in trained], allow_unused=True
            )
            pairs = zip(wanted, grads, strict=True)
            # A gradient that only one of them has is compared with zero.
            rows += [
                (torch.zeros_like(g) if w is None else w, torch.zeros_like(w) if g is None else g)
                for w, g in pairs
                if w is not None or g is not None
            ]
    rows += list(zip(dict(reference.named_buffers()).values(), model.buffers(), strict=True))
    try:
        for one, other in rows:
            torch.testing.assert_close(other.to(one.device), one)
    except AssertionError as error:
        raise ExecutionError(
            f"the placed {type(model).__name__} differs from the unsplit one: {error}"
        ) from None
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def _copies(call: Call) -> tuple[torch.Tensor, ...]:
    """The call's tensors anew, for a run that may write into them."""
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors)


def _floats(value: Any) -> list[torch.Tensor]:
    tensors, _ = flatten(value, lambda leaf: isinstance(leaf, torch.Tensor))
    return tensors


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar that every element of every tensor has a say in."""
    return torch.stack([(t.double() ** 2).mean().cpu() for t in tensors]).sum()
