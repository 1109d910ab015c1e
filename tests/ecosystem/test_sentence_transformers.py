"""sentence-transformers: sentences encoded, and a model trained by its Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from placed import lazily
from scripts import Place, equal_in_every_bit, tokenizer

import baechi

pytestmark = pytest.mark.slow
SENTENCES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w1 w9"]


def saved(folder: Path) -> str:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    BertModel(BertConfig(**sizes, num_attention_heads=2, vocab_size=64)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def model_of(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer, models

    transformer = models.Transformer(saved(folder))
    pooling = models.Pooling(transformer.get_embedding_dimension())
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def test_objects_of_tokenizers_are_refused_with_the_remedy(tmp_path: Path) -> None:
    """A batch of `encode` holds one for each sentence; the trainer's batches hold tensors alone."""
    remedy = r"holds a Encoding, .* model.part = baechi.place\(model.part, devices\)"

    model = lazily(model_of(tmp_path), training=False)
    with pytest.raises(baechi.InputError, match=remedy):
        model.encode(SENTENCES, batch_size=2, convert_to_tensor=True)


def test_the_transformer_inside_alone(tmp_path: Path) -> None:
    def script(place: Place) -> Any:
        model = model_of(tmp_path)
        model[0].model = place(model[0].model, training=False)
        return model.encode(SENTENCES, convert_to_tensor=True, device="cpu")

    equal_in_every_bit(script)


def test_its_trainer(tmp_path: Path) -> None:
    import sentence_transformers
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses

    def script(place: Place) -> Any:
        model = place(model_of(tmp_path / "model"), optimizer="adamw")
        rows = Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]})
        trainer = sentence_transformers.SentenceTransformerTrainer(
            model=model,
            args=sentence_transformers.SentenceTransformerTrainingArguments(
                str(tmp_path / "out"),
                num_train_epochs=1,
                per_device_train_batch_size=2,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=rows,
            loss=losses.MultipleNegativesRankingLoss(model),
        )
        trainer.train()
        return dict(model.state_dict())

    equal_in_every_bit(script)
