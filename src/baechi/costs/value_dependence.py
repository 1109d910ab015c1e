"""Which operators take as long as their values say: the same shapes may cost more or less."""

from collections.abc import Sequence
from typing import Final

from torch import fx

from baechi.costs.example_inputs import GROUPED
from baechi.tracing.fx_operators import operator_name

# Operator -> what its time depends on. Their backwards add up where indices repeat.
_REASONS: Final = {
    **dict.fromkeys(("embedding", "embedding_bag"), "which rows are read, and how often each"),
    **dict.fromkeys(
        (
            *("index", "index_put", "index_select", "index_add", "index_copy", "gather", "take"),
            *("take_along_dim", "scatter", "scatter_add", "scatter_reduce"),
        ),
        "which places are indexed, and how often each",
    ),
    **dict.fromkeys(
        ("nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "histc"),
        "how many elements are found",
    ),
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "median"), "how sorted the values are"),
    **dict.fromkeys(("argmax", "argmin"), "where the extreme values are"),
    **dict.fromkeys(("masked_fill", "masked_scatter", "where"), "how many elements are masked"),
    **dict.fromkeys(("cond", "while_loop", "scan"), "which branch is taken, and how often"),
    **dict.fromkeys(GROUPED, "how many rows each expert gets"),
}
_ATTENTION: Final = (
    "scaled_dot_product_attention",
    "flex_attention",
    "multi_head_attention_forward",
)


def value_remark(nodes: Sequence[fx.Node]) -> str:
    """What the time of an operator depends on besides its shapes; empty for most."""
    reasons = []
    for node in nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = operator_name(node).rstrip("_")
        if name in _REASONS:
            reasons.append(_REASONS[name])
        if name in _ATTENTION and _has_mask(node):
            reasons.append("what the attention mask hides")
    unique = dict.fromkeys(reasons)
    return f"time depends on values: {'; '.join(unique)}" if unique else ""


def _has_mask(node: fx.Node) -> bool:
    """Whether an attention gets more than query, key and value."""
    return any(isinstance(a, fx.Node) for a in [*node.args[3:], *node.kwargs.values()])
