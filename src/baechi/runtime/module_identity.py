"""Whether a model still holds the submodules, parameters and buffers that it was placed with.

A placed model runs the tensors that it was traced with. Who replaces one in the model, instead of
writing into it, would train or load what no longer runs. So would who unties a weight that has
several names, of which the graph reads one, and who gives a layer the bias that it did without. And
who casts one: `model.half()` leaves it the same object, and the plan is for the type that it had.
"""

from typing import Any, final

import torch
from torch import fx, nn

from baechi.errors import ExecutionError
from baechi.tracing.subgraph import opaque_leaves


@final
class Identity:
    """What the model holds under the names that its graph reads, and on the way there.

    Of submodules that stay whole these are the parameters; they replace buffers as they like.

    Args:
        model: The user's model.
        graph: What was traced of it, as the submodule `model`.
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
            own = {} if id(module) in whole else module._buffers
            for holder in (module._parameters, own):
                for key, value in holder.items():
                    if value is None or id(value) in read:
                        self._add(holder, key, f"{path}.{key}".lstrip("."))

    def _add_path(self, model: nn.Module, name: str) -> None:
        """What the model holds on the way to what is read under a name, and that itself."""
        owner: Any = model
        for part in name.split("."):
            holders = (owner._modules, owner._parameters, owner._buffers)
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
