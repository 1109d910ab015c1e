"""What forward writes into the lists and dicts of its caller is in them after a placed call too."""

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from placed import again_at_random, at_random, lazily
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, _deregister_pytree_node, register_pytree_node
from transformers.modeling_outputs import BaseModelOutputWithPooling

import baechi
from baechi.tracing.pytrees import ObjectChanges


@dataclass
class Batch:
    x: Tensor
    hidden: Tensor | None = None


class Writing(nn.Module):
    """Writes into a dict, a list in it and a dataclass; removes; returns one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, batch: dict[str, Any], rows: OrderedDict[str, Tensor], record: Batch
    ) -> tuple[Any, Tensor]:
        batch["hidden"] = self.first(batch.pop("x"))
        batch["kept"].append(torch.relu(batch["hidden"]))
        batch["note"] = "seen"
        rows["y"] = rows["y"] * 2
        record.hidden = self.last(record.x + rows["y"])
        return batch, batch["kept"][-1] + record.hidden


def arguments() -> tuple[dict[str, Any], OrderedDict[str, Tensor], Batch]:
    torch.manual_seed(2)
    x, y, z, kept = torch.randn(4, 2, 4)
    return {"x": x, "kept": [kept]}, OrderedDict(z=z, y=y), Batch(x.clone().requires_grad_())


def step(model: nn.Module) -> dict[str, Any]:
    """What a call leaves in everything that the caller has."""
    batch, rows, record = given = arguments()
    kept = batch["kept"]
    returned, out = model(*given)
    assert returned is batch
    assert batch["kept"] is kept
    assert batch["note"] == "seen"
    (out.sum() + batch["hidden"].square().sum() + record.hidden.mean()).backward()
    left = {f"batch {k}": v for k, v in batch.items() if k not in ("kept", "note")}
    left |= {f"kept {i}": t for i, t in enumerate(kept)} | {f"rows {k}": v for k, v in rows.items()}
    left |= {"record": record.hidden, "gradient of x": record.x.grad, "out": out}
    left |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return left


def test_the_caller_finds_what_forward_wrote() -> None:
    model = Writing()
    wanted = step(model)
    placed = at_random(model, arguments(), seed=1)
    for _ in range(2):
        got = step(placed)
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            assert torch.equal(got[name], value), name


def test_tracing_and_measuring_write_nothing() -> None:
    given = arguments()
    placed = again_at_random(baechi.trace(Writing(), given), seed=1, devices=2)
    placed.measure(steps=1)
    assert list(given[0]) == ["x", "kept"]
    assert len(given[0]["kept"]) == 1
    assert given[2].hidden is None


class Passing(nn.Module):
    """Returns what it is given, in another container."""

    def forward(self, x: Tensor, rows: list[Tensor]) -> dict[str, Any]:
        return {"y": x * 2, "rows": rows, "copy": list(rows)}


def test_an_argument_that_is_returned_is_the_callers_own() -> None:
    rows = [torch.randn(3), torch.randn(3)]
    placed = at_random(Passing(), (torch.randn(3), rows), seed=0)
    out = placed(torch.ones(3), rows)
    assert out["rows"] is rows
    assert out["copy"] is not rows
    assert all(map(torch.equal, out["copy"], rows))


@pytest.mark.parametrize("kind", [list, dict])
def test_what_holds_the_same_in_another_order_has_changed(kind: type) -> None:
    held = [1.5, 2.5] if kind is list else {"a": 1.5, "b": 2.5}
    changes = ObjectChanges([held])
    assert not changes.found()
    if kind is list:
        held.reverse()
    else:
        held["a"] = held.pop("a")
    assert [number for number, *_ in changes.found()] == [0]


class Options(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


@dataclass
class Noted:
    x: Tensor
    y: Tensor | None = None


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Rows(list[Tensor]):
    """A list with an attribute."""

    total: Tensor | None = None


class Kinds(nn.Module):
    """Writes into what is like a dict or a list, but has a class of its own."""

    def forward(self, noted: Noted, last: deque[Tensor], sums: Any) -> Tensor:
        noted.y = noted.x + last[0]
        last.append(noted.y)
        sums["new"] += noted.y
        return last[0] * 3


def of_every_kind() -> tuple[Noted, deque[Tensor], defaultdict[str, Any]]:
    a, b = torch.arange(4.0).view(2, 2)
    return Noted(a), deque([b], 1), defaultdict(lambda: 0)


def test_containers_of_other_classes() -> None:
    model = Kinds()
    placed = again_at_random(baechi.trace(model, of_every_kind()), seed=0, devices=2)
    wanted, got = of_every_kind(), of_every_kind()
    assert torch.equal(copy.deepcopy(model)(*wanted), placed(*got))
    for theirs, ours in zip(wanted[1:], got[1:], strict=True):
        assert len(theirs) == len(ours)
    assert torch.equal(wanted[0].y, got[0].y)  # type: ignore[arg-type]
    assert torch.equal(wanted[1][0], got[1][0])
    assert got[1].maxlen == 1
    assert torch.equal(wanted[2]["new"], got[2]["new"])
    assert got[2].default_factory is not None


class Store:
    """Tensors by name, and the one whose they are."""

    def __init__(self, parent: "Graph", **tensors: Tensor) -> None:
        self.tensors, self.parent = tensors, weakref.ref(parent)


class Graph:
    """What a batch of graphs is like: it can be called, and has a weak reference to itself."""

    def __init__(self, **tensors: Tensor) -> None:
        self.store = Store(self, **tensors)

    def __call__(self) -> list[Tensor]:
        return list(self.store.tensors.values())


class OfGraph(nn.Module):
    def forward(self, graph: Graph) -> Tensor:
        parent = graph.store.parent()
        assert parent is graph
        return sum(parent(), torch.ones(())).exp()


def test_an_object_that_can_be_called_is_taken_apart_where_it_holds_tensors() -> None:
    placed = lazily(OfGraph(), placer="round-robin")
    for n in (3, 4, 5, 5):
        graph = Graph(x=torch.randn(n), y=torch.randn(n))
        assert torch.equal(placed(graph), OfGraph()(graph))
    assert len(placed._specializations) == 1
    placed.unplace()


class Table:
    """An object that pytree takes apart, as it does a TensorDict, and makes anew."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns


class Filling(nn.Module):
    """Writes a column of its argument, and returns the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, table: Table) -> Table:
        table.columns["hidden"] = self.first(table.columns["x"])
        table.columns["x"] = self.last(table.columns["hidden"])
        return table


def test_an_object_that_pytree_makes_anew_is_the_callers_own() -> None:
    register_pytree_node(
        Table,
        lambda table: (list(table.columns.values()), list(table.columns)),
        lambda values, names: Table(dict(zip(names, values, strict=True))),
        flatten_with_keys_fn=lambda table: (
            [(MappingKey(name), value) for name, value in table.columns.items()],
            list(table.columns),
        ),
    )
    try:
        model, x = Filling(), torch.randn(3, 4)
        wanted, got = Table({"x": x}), Table({"x": x})
        placed = at_random(copy.deepcopy(model), (Table({"x": x}),), seed=1)
        model(wanted)
        assert placed(got) is got
        assert list(got.columns) == list(wanted.columns)
        assert all(torch.equal(got.columns[name], wanted.columns[name]) for name in got.columns)
    finally:
        _deregister_pytree_node(Table)


class Wrapping(nn.Module):
    """Returns its argument in another class."""

    def forward(self, x: Tensor) -> Rows:
        return Rows([x])


@pytest.mark.parametrize(
    "given", [Options(x=torch.ones(2)), Rows([torch.ones(2)]), Slotted(torch.ones(2))]
)
def test_what_has_slots_or_is_like_a_list_or_a_dict_is_refused_by_name(given: Any) -> None:
    with pytest.raises(baechi.InputError, match=f"holds a {type(given).__name__}, which cannot"):
        baechi.trace(nn.Identity(), (given,))
    with pytest.raises(baechi.TraceError, match="forward returns a Rows, which cannot"):
        baechi.trace(Wrapping(), (torch.ones(2),))


class OfSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given: Slotted) -> Tensor:
        return self.last(self.first(given.x))


def test_a_class_that_pytree_knows_without_names_of_its_parts_is_taken_apart() -> None:
    register_pytree_node(Slotted, lambda own: ([own.x], None), lambda rows, _: Slotted(*rows))
    try:
        model, x = OfSlots(), torch.randn(3, 4)
        placed = at_random(model, (Slotted(x),), seed=1)
        assert placed.traced.module.call.names == ("given.0",)
        assert torch.equal(placed(Slotted(x * 2)), placed.unplace()(Slotted(x * 2)))
    finally:
        _deregister_pytree_node(Slotted)


class Sized(nn.Module):
    """Takes a size and returns one."""

    def forward(self, x: Tensor, size: torch.Size) -> tuple[Tensor, torch.Size]:
        return x.expand(size), x.shape


def test_sizes_stay_sizes() -> None:
    size = torch.Size([3, 2])
    placed = at_random(Sized(), (torch.ones(1, 2), size), seed=0)
    out, shape = placed(torch.ones(1, 2), size)
    assert out.shape == size
    assert type(shape) is torch.Size
    assert shape == (1, 2)


class Twice(nn.Module):
    """Is given one list under two names."""

    def forward(self, x: Tensor, one: list[Tensor], two: list[Tensor]) -> Tensor:
        one.append(x)
        return two[-1] * len(two)


def test_one_list_under_two_names_stays_one() -> None:
    x = torch.ones(2)
    same: list[Tensor] = [torch.zeros(2)]
    module = lazily(Twice())
    assert module(x, same, same).tolist() == [2, 2]
    assert len(same) == 2
    one, two = [torch.zeros(2)], [torch.zeros(2)]
    assert module(x, one, two).tolist() == [0, 0]
    assert (len(one), len(two)) == (2, 1)


def test_verification_leaves_the_callers_arguments_alone() -> None:
    given = arguments()
    lazily(Writing(), example_args=given, placer=baechi.RandomPlacer(0), verify=True)
    assert list(given[0]) == ["x", "kept"]
    assert given[2].hidden is None


class Projected(nn.Module):
    """Reads features by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, features: dict[str, BaseModelOutputWithPooling]) -> Tensor:
        image = features["image"]
        return self.first(image.pooler_output) + self.last(image.hidden_states[0]).relu()


def test_fields_that_were_set_in_another_order_than_that_of_their_class() -> None:
    """Of two alike features each is itself, though what a trace makes of them is in order."""
    model = Projected()
    unsplit = copy.deepcopy(model)
    placed = lazily(model, training=False, placer=baechi.RandomPlacer(0))
    for _ in range(2):
        image = BaseModelOutputWithPooling(hidden_states=(torch.randn(2, 4),))
        image.pooler_output = torch.randn(2, 4)
        assert torch.equal(placed({"image": image}), unsplit({"image": image}))
    placed.unplace()
