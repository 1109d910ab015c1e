"""The examples of README and guide that are no doctests run as they stand, on CPU devices."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import baechi

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass
class Output:
    loss: torch.Tensor


class Masked(nn.Module):
    """A model as the examples have one: a mask by its keyword, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Output:
        hidden = self.layers(x if attention_mask is None else x * attention_mask)
        return Output(hidden.square().mean())


def writer() -> nn.Module:
    """A model that generates text."""
    sizes = {"vocab_size": 16, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special)).eval()


DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)


def anchors(document: Path) -> set[str]:
    """What a link may name after `#`, as the usual hosts make it of the headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text())
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.costly("measures a model that generates, as the guide says")
@pytest.mark.parametrize(("document", "count"), [("docs/guide.md", 4)])
def test_examples_run(
    document: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [text for text in BLOCK.findall((ROOT / document).read_text()) if ">>>" not in text]
    assert len(blocks) == count
    names: dict[str, Any] = {}
    for block in blocks:
        model = writer() if "generate" in block else Masked()
        names |= {
            "baechi": baechi,
            "model": model,
            "x": torch.randn(4, 64),
            "ids": torch.ones(1, 4).long(),
        }
        names |= {"mask": torch.ones(4, 64), "devices": {"cpu:0": "1GiB", "cpu:1": "1GiB"}}
        exec(compile(block.replace("cuda:", "cpu:"), document, "exec"), names)
        if "placed" in names:
            names.pop("placed").unplace()


def test_the_table_of_contents_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    files = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert len(files) == 60
    assert not [file for file in files if not (ROOT / "src" / "baechi" / file).exists()]
