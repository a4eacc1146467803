"""The tokenizer that is saved with a script's model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import BertForSequenceClassification

from rapidformer.training.template import find_processor
from tests.small import make_tokenizer
from tests.training.test_templates import LineFinetuner, make_engine

TEXT = "w1 w2"


class FromFolder(LineFinetuner):
    """A script that loads its model by name and keeps the tokenizer to itself."""

    folder: Path

    def train_valid_test_datasets_provider(self) -> Any:
        ids = make_tokenizer()(TEXT)["input_ids"]
        return [{"input_ids": ids, "labels": 1}] * 4, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return BertForSequenceClassification.from_pretrained(self.folder), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


def test_the_model_of_a_script_is_saved_with_its_tokenizer(
    small_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    trainer = FromFolder(make_engine(train_iters=1, save=str(tmp_path)))
    trainer.folder = small_model
    trainer.train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "last")
    assert saved(TEXT)["input_ids"] == make_tokenizer()(TEXT)["input_ids"]


def test_where_a_tokenizer_is_looked_for() -> None:
    tokenizer, nothing = make_tokenizer(), SimpleNamespace()
    holder = SimpleNamespace(tokenizer=tokenizer)
    assert find_processor(holder, None, None) is tokenizer
    assert find_processor(nothing, holder, None) is tokenizer
    assert find_processor(nothing, None, SimpleNamespace(name_or_path="/nowhere")) is None
