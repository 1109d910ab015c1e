"""Networks of PyTorch Geometric over batches of graphs of any size."""

from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit
from torch import nn

pytestmark = pytest.mark.slow


def graphs(seed: int) -> list[Any]:
    """Graphs of several sizes, some of whose edges are loops."""
    from torch_geometric.data import Data

    torch.manual_seed(seed)
    sizes = torch.randint(5, 15, (12,)).tolist()
    return [Data(torch.randn(n, 8), torch.randint(n, (2, 3 * n))) for n in sizes]


def layer(kind: str) -> nn.Module:
    from torch_geometric import nn as layers

    makers: dict[str, Any] = {
        "GCN": lambda: layers.GCNConv(8, 8),
        "GAT": lambda: layers.GATConv(8, 4, heads=2),
        "GATv2": lambda: layers.GATv2Conv(8, 4, heads=2),
        "SAGE": lambda: layers.SAGEConv(8, 8),
        "GIN": lambda: layers.GINConv(nn.Linear(8, 8)),
        "Cheb": lambda: layers.ChebConv(8, 8, 3),
        "Cluster": lambda: layers.ClusterGCNConv(8, 8),
        "Transformer": lambda: layers.TransformerConv(8, 4, heads=2),
    }
    made: nn.Module = makers[kind]()
    return made


class Network(nn.Module):
    """Two layers, and the mean of each graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = layer(kind), layer(kind), nn.Linear(8, 3)

    def forward(self, data: Any) -> Any:
        from torch_geometric.nn import global_mean_pool

        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch, data.num_graphs))


@pytest.mark.parametrize(
    "kind", ["GCN", "GAT", "GATv2", "SAGE", "GIN", "Cheb", "Cluster", "Transformer"]
)
def test_an_epoch_has_one_plan(kind: str) -> None:
    from torch_geometric.loader import DataLoader

    plans = []

    def script(place: Place) -> Any:
        torch.manual_seed(0)
        model = place(Network(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in DataLoader(graphs(1), batch_size=3):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        plans.append(len(getattr(model, "_specializations", ())))
        return losses, dict(model.state_dict())

    equal_in_every_bit(script)
    assert plans == [0, 1]
