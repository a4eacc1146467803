from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import BartConfig, BertConfig, EncoderDecoderConfig, LEDConfig

from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

TASK = get_task("seq2seq_lm")
ROWS = [
    {"article": "the cat sat on the mat . the dog runs", "highlights": "cat sat on mat"},
    {"article": "mary lives in paris", "highlights": "mary in paris"},
    {"article": "a red book and a blue film", "highlights": "red book , blue film"},
]


def test_trains_evaluates_and_predicts(t5_folder: Path, tmp_path: Path) -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "valid.jsonl", ROWS)
    args = make_args(
        pretrained_model_name_or_path=t5_folder, data_path=tmp_path, decoder_seq_length=8
    )
    prepared = TASK.prepare(args)
    model = TASK.build_model(args, prepared)
    losses = train_steps(TASK, model, prepared, steps=60)
    assert losses[-1] < losses[0]
    records = run_split(TASK, model, prepared, "validation", batch_size=2)
    metrics = compute_metrics(TASK, records, prepared, "validation")
    batch = prepared.collate([prepared.validation[i] for i in range(3)])
    assert (batch["labels"] == -100).any()
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)
    rows = TASK.predictions(records, prepared, "validation")
    found = [row["generated"] for row in rows]
    wanted = [row["highlights"] for row in ROWS]
    assert [row["expected"] for row in rows] == wanted
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for key in ("rouge1", "rouge2", "rougeL"):
        mean = sum(scorer.score(w, f)[key].fmeasure for w, f in zip(wanted, found, strict=True)) / 3
        assert metrics[key] == pytest.approx(100 * mean, abs=1e-3)
    bleu = sacrebleu.corpus_bleu(found, [wanted]).score
    assert metrics["bleu"] == pytest.approx(bleu, abs=1e-3)


def test_prefix_and_prediction(t5_folder: Path) -> None:
    args = make_args(
        pretrained_model_name_or_path=t5_folder, source_prefix="summary of ", num_beams=2,
        max_new_tokens=3,
    )  # fmt: skip
    ready = TASK.prepare_for_prediction(args, ["the cat sat", {"text": "the dog"}])
    assert ready.processor.decode(ready.test[0]["input_ids"]).startswith("summary of the cat")
    model = TASK.build_model(args, ready)
    found = TASK.predictions(run_split(TASK, model, ready, "test"), ready, "test")
    assert [row["source"] for row in found] == ["the cat sat", "the dog"]
    assert all("expected" not in row for row in found)


@pytest.mark.parametrize(
    ("options", "source", "target"),
    [({}, "the", "cat"), ({"text_column": "de", "target_column": "en"}, "cat", "the")],
)
def test_translation_columns(
    t5_folder: Path, options: dict[str, Any], source: str, target: str
) -> None:
    args = make_args(pretrained_model_name_or_path=t5_folder, **options)
    rows = [{"translation": {"en": "the", "de": "cat"}}]
    prepared = TASK.prepare(args, {"train": rows})
    decode = prepared.processor.decode
    assert decode(prepared.train[0]["input_ids"]) == f"{source} </s>"
    assert decode(prepared.train[0]["labels"]) == f"{target} </s>"


@pytest.mark.parametrize("kind", ["bart", "led", "joined"])
def test_targets_fit_the_decoders_positions(kind: str, t5_folder: Path, tmp_path: Path) -> None:
    """Texts are generated up to the limit, even by a model that never ends one."""
    config: Any = BartConfig(max_position_embeddings=3)
    if kind == "led":
        config = LEDConfig(max_decoder_position_embeddings=3)
    elif kind == "joined":
        parts = BertConfig(), BertConfig(max_position_embeddings=3)
        config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    copytree(t5_folder, tmp_path, dirs_exist_ok=True)
    config.save_pretrained(tmp_path)
    prepared = TASK.prepare(make_args(pretrained_model_name_or_path=tmp_path), {"train": ROWS})
    assert prepared.extras["generation"].max_new_tokens == 3
    assert [len(row["labels"]) for row in prepared.train] == [3, 3, 3]
    args = make_args(pretrained_model_name_or_path=tmp_path, max_new_tokens=4)
    with pytest.raises(ConfigurationError, match="--max-new-tokens 4 is longer than the 3"):
        TASK.prepare_for_prediction(args, ["the cat"])


def test_bad_data_is_reported(t5_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=t5_folder)
    with pytest.raises(
        DataError, match=r"the target text.*article, sumary.*--target-column sumary"
    ):
        TASK.prepare(args, {"train": [{"article": "a", "sumary": "b"}]})
    with pytest.raises(DataError, match=r"train, row 2: the target in highlights is empty"):
        TASK.prepare(args, {"train": [ROWS[0], {"article": "a", "highlights": ""}]})
    wrong = make_args(pretrained_model_name_or_path=t5_folder, text_column="fr")
    with pytest.raises(DataError, match=r"--text-column fr: .*en, de"):
        TASK.prepare(wrong, {"train": [{"translation": {"en": "the", "de": "cat"}}]})
