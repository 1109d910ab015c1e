"""What is read off the graphs that autograd records."""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from baechi.torch_support.autograd_graphs import gradients_sent


def test_gradients_are_counted_where_a_graph_ends() -> None:
    x, leaf = torch.randn(4, 8, requires_grad=True).exp(), torch.randn(4, 8, requires_grad=True)
    ends = [get_gradient_edge(x), get_gradient_edge(leaf)]
    assert gradients_sent([nn.functional.rms_norm(x, (8,)) * leaf], ends) == [2, 1]
    assert gradients_sent([leaf * leaf, leaf.sin(), x], ends) == [0, 3]
    assert gradients_sent([torch.ones(1)], ends) == [0, 0]
    assert gradients_sent([x * leaf], [*ends, ends[0]]) == [1, 1, 1]  # of two names of one tensor
