"""The forms of the catalog's models, and the table of what became of them."""

from pathlib import Path

import pytest
import torch

# The catalog has functions of TorchScript: it is imported where the warning is expected.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated"),
]
ENCODER = "RobertaForMaskedLM"


def test_a_form_is_in_the_model_and_its_arguments() -> None:
    from benchmarks.architectures.forms import formed

    plain, args, _ = formed("unet", [])
    assert {tensor.dtype for tensor in (*plain.parameters(), *args)} == {torch.float32}
    half, args, _ = formed("unet", ["bfloat16"])
    assert {tensor.dtype for tensor in (*half.parameters(), *args)} == {torch.bfloat16}

    assert not any(dropout.p for dropout in _dropouts([]))
    assert any(dropout.p for dropout in _dropouts(["dropout"]))
    assert not formed("OPTForCausalLM", [])[0].config.use_cache
    assert formed("OPTForCausalLM", ["cache"])[0].config.use_cache


def _dropouts(forms: list[str]) -> list[torch.nn.Dropout]:
    from benchmarks.architectures.forms import formed

    modules = formed(ENCODER, forms)[0].modules()
    return [module for module in modules if isinstance(module, torch.nn.Dropout)]


@pytest.mark.parametrize("forms", [["autocast"], ["dropout", "checkpointing"]], ids=",".join)
def test_a_split_model_in_a_form_equals_the_unsplit_one(forms: list[str]) -> None:
    from benchmarks.architectures.check import check

    row = check(ENCODER, forms)
    assert row["problems"] == []
    assert len(row["rungs"]) == 2


def test_a_step_of_micro_batches_equals_the_loop() -> None:
    from benchmarks.architectures.check import check

    for name in (ENCODER, "unet"):  # with its own loss, and with another
        row = check(name, ["microbatches"])
        assert row["problems"] == []
        assert row["rungs"]
        assert all(held <= said for said, held in row["peaks"])
    assert "mixes" in check("CLIPModel", ["microbatches"])["problems"][0]


def test_a_model_of_a_folder_is_found_small_and_split() -> None:
    from benchmarks.architectures.catalog import example, names_found
    from benchmarks.architectures.check import check

    assert "found/llama" in names_found()
    assert "found/roberta" not in names_found()  # the catalog has a row for it
    model, _, _ = example("found/llama")
    assert 1000 < sum(p.numel() for p in model.parameters()) < 100_000
    row = check("found/llama")
    assert row["problems"] == []
    assert row["ops"] > 50
    with pytest.raises(LookupError, match="natten"):
        example("found/dinat")


def test_the_table_names_the_form_and_what_differs(tmp_path: Path) -> None:
    from benchmarks.architectures.forms import FORMS
    from benchmarks.architectures.report import write_table

    problems = [
        [],
        ["TraceError: no"],
        ["1 of 2 differ: output 0"],
        ["fails when placed: RuntimeError: no"],
    ]
    rows = [
        {"name": "unet", "ops": 1, "rungs": [], "problems": own, "peaks": []} for own in problems
    ]
    write_table(rows, tmp_path, ["dropout", "bfloat16"])
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("1 of 4 architectures placed and equal in every bit; 1 refused")
    assert "2 differ" in table
    assert f"dropout ({FORMS['dropout']})" in table
    assert "`python3 -m benchmarks.architectures --form dropout,bfloat16`" in table
    write_table(rows, tmp_path)
    assert "Form" not in (tmp_path / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:forward of this RecurrentGemma:UserWarning")
def test_a_placed_model_answers_a_prompt_as_the_unsplit_one() -> None:
    from benchmarks.architectures.check import check_generate

    assert check_generate("unet") == {"generates": False}
    row = check_generate("GPTNeoForCausalLM")
    assert row["problems"] == row["skipped"] == []
    assert row["plans"] >= [2]  # of the prompt, and of what follows
    (said, *_) = check_generate("RecurrentGemmaForCausalLM")["problems"]
    assert "which an earlier call sets" in said


def test_the_table_of_calls_names_them_and_what_differs(tmp_path: Path) -> None:
    from benchmarks.architectures.report import write_calls

    own = ["TraceError: no"], ["beams: tokens: 1 of 2"], []
    rows = [
        {"name": name, "plans": [plans], "problems": problems, "remarks": [], "skipped": []}
        for name, plans, problems in zip("abc", (1, 2, 3), own, strict=True)
    ]
    write_calls(rows, tmp_path, "generate")
    table = (tmp_path / "generate.md").read_text()
    assert table.startswith("1 of 3 architectures equal in every token")
    assert "0 of them with at most two plans; 1 differ" in table
    assert "| c | 3 | equal |" in table
    assert "`python3 -m benchmarks.architectures --generate`" in table
