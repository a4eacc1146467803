"""``load_metric``: the scores of the originals, under their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sklearn
import torch

from rapidformer import load_metric
from rapidformer.errors import ConfigurationError, DataError

DRAW = np.random.default_rng(0)
GUESSES, TRUTHS = DRAW.integers(0, 2, 50), DRAW.integers(0, 2, 50)
MANY, OTHERS = DRAW.integers(0, 4, 50), DRAW.integers(0, 4, 50)


def test_batches_are_collected_and_forgotten() -> None:
    metric = load_metric("glue", "mrpc")
    for start in range(0, 50, 8):
        metric.add_batch(
            predictions=torch.tensor(GUESSES[start : start + 8]),
            references=TRUTHS[start : start + 8],
        )
    scores = metric.compute()
    assert scores == pytest.approx(
        {"accuracy": (GUESSES == TRUTHS).mean(), "f1": sklearn.f1_score(TRUTHS, GUESSES)}
    )
    with pytest.raises(DataError, match="glue/mrpc: there is nothing to score"):
        metric.compute()


@pytest.mark.parametrize("name", ["f1", "precision", "recall"])
@pytest.mark.parametrize("average", ["binary", "micro", "macro", "weighted"])
def test_averages_are_those_of_scikit_learn(name: str, average: str) -> None:
    predictions, references = (GUESSES, TRUTHS) if average == "binary" else (MANY, OTHERS)
    expected = getattr(sklearn, f"{name}_score")(references, predictions, average=average)
    found = load_metric(name).compute(
        predictions=predictions, references=references, average=average
    )
    assert found == pytest.approx({name: expected})


def test_correlation() -> None:
    expected = sklearn.matthews_corrcoef(TRUTHS, GUESSES)
    for metric in (load_metric("matthews_correlation"), load_metric("glue", "cola")):
        found = metric.compute(predictions=GUESSES, references=TRUTHS)
        assert found == pytest.approx({"matthews_correlation": expected})
    numbers: Any = load_metric("glue", "stsb").compute(
        predictions=[1.0, 2.0, 3.0], references=[1.0, 2.0, 4.0]
    )
    assert numbers.keys() == {"pearson", "spearmanr"}


def test_entities_answers_and_texts() -> None:
    tags = [["B-PER", "I-PER", "O"]]
    entities = load_metric("seqeval").compute(predictions=tags, references=tags)
    assert entities["overall_f1"] == 1.0
    assert entities["PER"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1}
    squad = load_metric("squad").compute(
        predictions=[{"id": "1", "prediction_text": "the cat"}],
        references=[{"id": "1", "answers": {"text": ["cat"], "answer_start": [0]}}],
    )
    assert squad["exact_match"] == 100.0
    texts = ["the cat sat on the mat"]
    assert load_metric("rouge").compute(predictions=texts, references=texts)["rouge1"] == 1.0
    bleu = load_metric("sacrebleu").compute(predictions=texts, references=[texts])
    assert bleu["score"] == pytest.approx(100.0)


def test_squad_v2_has_the_names_of_its_script() -> None:
    found = load_metric("squad_v2").compute(
        predictions=[
            {"id": "1", "prediction_text": "the cat", "no_answer_probability": 0.0},
            {"id": "2", "prediction_text": "a dog", "no_answer_probability": 0.0},
        ],
        references=[
            {"id": "1", "answers": {"text": ["cat"], "answer_start": [0]}},
            {"id": "2", "answers": {"text": [], "answer_start": []}},
        ],
    )
    assert found == {
        "exact": 50.0, "f1": 50.0, "total": 2, "HasAns_exact": 100.0, "HasAns_f1": 100.0,
        "HasAns_total": 1, "NoAns_exact": 0.0, "NoAns_f1": 0.0, "NoAns_total": 1,
    }  # fmt: skip


@pytest.mark.parametrize("use_stemmer", [False, True])
def test_rouge_equals_rouge_score(use_stemmer: bool) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    texts = ["The cats sat.\nA dog was running.", "nothing\nalike", "one line of words"]
    wanted = ["A dog ran.\nThe cat sits on the mats.", "x y", "some words of one line"]
    keys = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(keys, use_stemmer=use_stemmer)
    found = load_metric("rouge").compute(
        predictions=texts, references=wanted, use_stemmer=use_stemmer
    )
    for key in keys:
        each = [scorer.score(w, t)[key].fmeasure for w, t in zip(wanted, texts, strict=True)]
        assert found[key] == pytest.approx(sum(each) / 3, abs=1e-6), key
    assert found["rougeLsum"] != found["rougeL"]


def test_mistakes_are_reported() -> None:
    with pytest.raises(ConfigurationError, match=r"no metric 'acuracy': .* Did you mean accuracy"):
        load_metric("acuracy")
    with pytest.raises(ConfigurationError, match="glue has no task 'mprc'"):
        load_metric("glue", "mprc")
    with pytest.raises(DataError, match="2 predictions but 1 references"):
        load_metric("accuracy").add_batch(predictions=[1, 0], references=[1])
    with pytest.raises(DataError, match="no prediction for the question 'b'"):
        load_metric("squad").compute(
            predictions=[{"id": "a", "prediction_text": ""}],
            references=[{"id": "b", "answers": {"text": ["x"]}}],
        )
