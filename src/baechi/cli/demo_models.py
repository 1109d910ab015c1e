"""The models that the demo splits, and how it trains them."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from baechi.errors import InputError


@final
@dataclass(frozen=True)
class Job:
    """A model to show.

    Attributes:
        name: Of its files.
        title: For people.
        build: Makes the model, its args and its kwargs; seeded by the caller.
        loss: The scalar to train on, from the model's output.
        optimizer: As `Traced.graph` names it.
        learning_rate: Of that optimizer.
        devices: How many logical devices to split over.
        share: What each has of the memory that the whole would need on one.
    """

    name: str
    title: str
    build: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Any]
    optimizer: str
    learning_rate: float
    devices: int
    share: float


def demo_jobs(*, quick: bool = False) -> tuple[Job, ...]:
    """The two models of the demo; small ones of the same make if `quick`.

    Raises:
        InputError: torch, transformers or the Inception model's file is missing.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"the demo needs {package}: pip install {package}")
    inception = _find_inception()
    return (
        Job(
            name="gpt2",
            title="GPT-2 small, 12 layers, 768 wide" if not quick else "GPT-2, 2 layers, 64 wide",
            build=lambda: _gpt2(quick=quick),
            loss=lambda output: output.loss,
            optimizer="adamw",
            learning_rate=3e-4,
            devices=3,
            share=0.7,
        ),
        Job(
            name="inception",
            title="Inception-v3",
            build=lambda: _inception(inception, size=96 if quick else 299),
            loss=_classify,
            optimizer="momentum",
            learning_rate=1e-3,
            devices=2,
            share=0.7,
        ),
    )


def _gpt2(*, quick: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {}
    if quick:
        settings = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
        settings |= {"bos_token_id": None, "eos_token_id": None}
    settings |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(**settings)
    ids = torch.randint(0, config.vocab_size, (2, 64))
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers warns that it guesses this
    return model, (ids,), {"labels": ids}


def _inception(path: Path, *, size: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import torch

    spec = importlib.util.spec_from_file_location("inception_v3", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.inception_v3(num_classes=1000), (torch.randn(2, 3, size, size),), {}


def _find_inception() -> Path:
    """The file of the Inception model, which is no part of the installed package."""
    checkout = Path(__file__).resolve().parents[3]
    for root in (Path.cwd(), checkout):
        path = root / "benchmarks" / "models" / "inception_v3.py"
        if path.is_file():
            return path
    raise InputError(
        "the demo needs benchmarks/models/inception_v3.py, which is in the source but not in the "
        "installed package: run it in a checkout of Baechi."
    )


def _classify(logits: Any) -> Any:
    """The cross entropy against fixed labels, computed by the caller as in any training loop."""
    import torch

    labels = torch.arange(len(logits)) % logits.shape[1]
    return torch.nn.functional.cross_entropy(logits, labels)
