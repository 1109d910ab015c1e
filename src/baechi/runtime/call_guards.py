"""Guards of a call: the model still holds what was placed, and arguments share what they shared.

A placed model runs the tensors that it was traced with. If the caller replaces one instead of
writing into it, unties a weight that has several names, or gives a layer the bias that it lacked,
the caller trains or loads another model than the placed one. `model.half()` keeps the object, but
the plan is for its former type.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import fx, nn

from baechi.errors import ExecutionError
from baechi.torch_support.module_internals import buffers_of, parameters_of, submodules_of
from baechi.tracing.lowering import TracedModule
from baechi.tracing.subgraph import opaque_leaves


@final
class StateGuard:
    """The objects that the model held under the names that its graph reads, and on the way there.

    Of submodules that stay whole these are the parameters; they replace buffers as they like.

    Args:
        model: The user's model.
        graph: Its trace, as the submodule `model`.
    """

    def __init__(self, model: nn.Module, graph: fx.GraphModule) -> None:
        self._model = type(model).__name__
        self._rows: list[tuple[dict[str, Any], str, Any, str]] = []
        self._types: list[tuple[torch.Tensor, torch.dtype, str]] = []
        self._seen: set[tuple[int, str]] = set()
        names = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
        leaves = opaque_leaves(graph, graph.graph.nodes)
        for path, leaf in leaves.items():
            names += [f"{path}.{name}" for name, _ in leaf.named_parameters()]
        for name in names:
            self._add_path(model, name.removeprefix("model."))
        whole = {id(module) for leaf in leaves.values() for module in leaf.modules()}
        read = {id(value) for _, _, value, _ in self._rows}
        for path, module in model.named_modules():
            own = {} if id(module) in whole else buffers_of(module)
            for holder in (parameters_of(module), own):
                for key, value in holder.items():
                    if value is None or id(value) in read:
                        self._add(holder, key, f"{path}.{key}".lstrip("."))

    def _add_path(self, model: nn.Module, name: str) -> None:
        """Add the objects on the path to a name that the graph reads, and the value itself."""
        owner: Any = model
        for part in name.split("."):
            holders = (submodules_of(owner), parameters_of(owner), buffers_of(owner))
            holder = next((h for h in holders if h.get(part) is not None), None)
            if holder is None:
                break  # a constant of the graph, or in a plain attribute (`attributes`)
            self._add(holder, part, name)
            owner = holder[part]

    def _add(self, holder: dict[str, Any], key: str, name: str) -> None:
        if (id(holder), key) not in self._seen:
            self._seen.add((id(holder), key))
            value = holder[key]
            self._rows.append((holder, key, value, name))
            if isinstance(value, torch.Tensor):
                self._types.append((value, value.dtype, name))

    def check(self) -> None:
        """Nothing, 100 ns a name.

        Raises:
            ExecutionError: One of them was replaced, or cast to another type.
        """
        for holder, key, value, name in self._rows:
            if holder.get(key) is not value:
                raise ExecutionError(
                    f"{name!r} of {self._model} was replaced after the model was placed, by an "
                    "assignment, load_state_dict(assign=True) or functional_call: what was placed "
                    "would run without it. Write into the tensor that is there (load_state_dict "
                    "does), or call model = placed.unplace(), change the model, and place it again."
                )
        for tensor, dtype, name in self._types:
            if tensor.dtype is not dtype:
                raise ExecutionError(
                    f"{name!r} of {self._model} was {dtype} when the model was placed, and is "
                    f"{tensor.dtype}: .half(), .double() or .to() cast it. Call model = "
                    "placed.unplace(), cast the model, and place it again."
                )


@final
class SharingGuard:
    """The arguments of the example that share memory; allows calls that share alike.

    A trace with one tensor for two arguments does not distinguish them, and one that writes into an
    argument covers only the readers that shared its memory then.

    Args:
        module: The traced model.
    """

    def __init__(self, module: TracedModule) -> None:
        tensors = module.call.tensors
        first: dict[int, int] = {}
        for i, tensor in enumerate(tensors):
            first.setdefault(id(tensor), i)
        # (i, j): the argument i is the very tensor that j is.
        self._one = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]
        facts = module.facts.nodes
        given = [facts[n].values for n in module.graph_module.graph.find_nodes(op="placeholder")]
        storages = [{value.storage for value in values} for values in given]
        written = {storage for fact in facts.values() for storage in fact.writes}
        # (i, j): i is written, and shares nothing with j.
        self._apart = [
            (i, j)
            for i, mine in enumerate(storages)
            for j, others in enumerate(storages)
            if mine & written and not mine & others
        ]

    def allows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if identical arguments still are, and written memory is not newly shared."""
        if any(tensors[i] is not tensors[j] for i, j in self._one):
            return False
        return not any(_share(tensors[i], tensors[j]) for i, j in self._apart)


def _share(one: torch.Tensor, two: torch.Tensor) -> bool:
    dense = one.layout is two.layout is torch.strided
    if not (dense and one.numel() and two.numel()):
        return False
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
