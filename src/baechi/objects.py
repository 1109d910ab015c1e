"""What a forward does to objects among its arguments, such as a cache of keys and values.

A trace runs on copies of them. What it finds in their attributes afterwards is what a call has to
leave in the caller's own: tensors that it computed, numbers as they were in the trace.
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch.utils import _pytree as pytree

Change = tuple[dict[str, Any], tuple[str, ...]]  # attributes with other values, and those gone


@final
class Watched:
    """Objects with their attributes as they are now.

    Args:
        objects: Each with a `__dict__`.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = tuple(objects)
        self._before = [
            {name: pytree.tree_flatten(value) for name, value in vars(each).items()}
            for each in self.objects
        ]

    def changes(self) -> list[Change]:
        """What has become of each since; what was only written into is no change."""
        return [
            (
                {n: v for n, v in vars(each).items() if n not in before or _differs(before[n], v)},
                tuple(name for name in before if name not in vars(each)),
            )
            for each, before in zip(self.objects, self._before, strict=True)
        ]


def _differs(before: tuple[list[Any], pytree.TreeSpec], value: Any) -> bool:
    leaves, spec = pytree.tree_flatten(value)
    return spec != before[1] or any(a is not b for a, b in zip(leaves, before[0], strict=True))


def change(objects: Iterable[Any], changes: Iterable[Change]) -> None:
    """Let the objects' attributes become what they became in `changes`."""
    for each, (values, gone) in zip(objects, changes, strict=True):
        vars(each).update(values)
        for name in gone:
            vars(each).pop(name, None)
