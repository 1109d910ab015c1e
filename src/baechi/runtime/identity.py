"""Whether a model still holds the submodules, parameters and buffers that it was placed with.

A placed model runs the tensors that it was traced with. Who replaces one in the model, instead of
writing into it, would train or load what no longer runs.
"""

from typing import Any, final

from torch import fx, nn

from baechi.errors import ExecutionError
from baechi.extraction import opaque_leaves


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
        names = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
        for path, leaf in opaque_leaves(graph, graph.graph.nodes).items():
            names += [f"{path}.{name}" for name, _ in leaf.named_parameters()]
        seen: set[tuple[int, str]] = set()
        for name in names:
            owner = model
            for part in name.removeprefix("model.").split("."):
                holders = (owner._modules, owner._parameters, owner._buffers)
                holder = next((h for h in holders if h.get(part) is not None), None)
                if holder is None:
                    break  # a constant of the graph
                value: Any = holder[part]
                if (id(holder), part) not in seen:
                    seen.add((id(holder), part))
                    self._rows.append((holder, part, value, name.removeprefix("model.")))
                owner = value

    def check(self) -> None:
        """Nothing, 50 ns a name.

        Raises:
            ExecutionError: One of them was replaced.
        """
        for holder, key, value, name in self._rows:
            if holder.get(key) is not value:
                raise ExecutionError(
                    f"{name!r} of {self._model} was replaced after the model was placed, by an "
                    "assignment, load_state_dict(assign=True) or functional_call: what was placed "
                    "would run without it. Write into the tensor that is there (load_state_dict "
                    "does), or call model = placed.unplace(), change the model, and place it again."
                )
