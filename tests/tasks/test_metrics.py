from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.tasks.metrics.classification import (
    ClassTally,
    EntityTally,
    MultiLabelTally,
    RegressionTally,
    compute_regression,
    find_entities,
    has_entity_tags,
)
from rapidformer.tasks.metrics.generation import TextScores, compute_squad
from rapidformer.tasks.metrics.tally import compute_perplexity

from .squad_scripts import normalize, score_version_1, score_version_2

TAGS = ["O", *(f"{mark}-{kind}" for mark in "BIES" for kind in ("PER", "LOC"))]
sentences = st.lists(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=9),
    min_size=1,
    max_size=6,
)


@given(sentences)
@settings(max_examples=150, deadline=None)
def test_entities_equal_seqeval(pairs: list[list[tuple[str, str]]]) -> None:
    import warnings

    from seqeval.metrics import (
        accuracy_score,
        classification_report,
        f1_score,
        precision_score,
        recall_score,
    )
    from seqeval.metrics.sequence_labeling import get_entities

    truth = [[pair[0] for pair in sentence] for sentence in pairs]
    guess = [[pair[1] for pair in sentence] for sentence in pairs]
    for tags in truth:
        assert find_entities(tags) == get_entities(tags)
    tally = EntityTally()
    for guessed, wanted in zip(guess, truth, strict=True):
        tally.add_tags(guessed, wanted)
    found = tally.score()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["precision"] == pytest.approx(precision_score(truth, guess))
        assert found["recall"] == pytest.approx(recall_score(truth, guess))
        assert found["f1"] == pytest.approx(f1_score(truth, guess))
        assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))
        if any(tag != "O" for sentence in [*truth, *guess] for tag in sentence):
            expected = classification_report(truth, guess, output_dict=True)
            check_report(tally.tables()[0].to_json(), expected)


def test_entity_tags_are_recognized() -> None:
    assert has_entity_tags(["O", "B-PER", "I-PER"])
    assert not has_entity_tags(["NOUN", "VERB"])


def check_report(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare with scikit-learn's or seqeval's dictionary; they call F1 otherwise."""
    expected = {name: row for name, row in expected.items() if isinstance(row, dict)}
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        wanted = {key.replace("f1-score", "f1"): value for key, value in row.items()}
        assert found[name] == pytest.approx(wanted), name


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(
                st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), min_size=1, max_size=30
            ),
        )
    )
)
@settings(max_examples=25, deadline=None)
def test_single_label_equals_sklearn(case: tuple[int, list[tuple[int, int]]]) -> None:
    from sklearn import metrics

    count, pairs = case
    guess, truth = [p[0] for p in pairs], [p[1] for p in pairs]
    names = [f"c{i}" for i in range(count)]
    tally = ClassTally(names, ("accuracy", "f1", "matthews_correlation"))
    # In two parts: a tally is never given all rows at once.
    tally.add_labels(guess[:7], truth[:7])
    tally.add_labels(guess[7:], truth[7:])
    found = tally.score()
    average = "binary" if count == 2 else "macro"
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(truth, guess))
    f1 = metrics.f1_score(truth, guess, average=average, zero_division=0)
    assert found["f1"] == pytest.approx(f1)
    matthews = metrics.matthews_corrcoef(truth, guess)
    assert found["matthews_correlation"] == pytest.approx(matthews, abs=1e-12)
    report, matrix = (table.to_json() for table in tally.tables())
    present = sorted({*guess, *truth})
    expected = metrics.classification_report(
        truth, guess, labels=present, target_names=[names[i] for i in present], output_dict=True,
        zero_division=0,
    )  # fmt: skip
    check_report(report, expected)
    counts = metrics.confusion_matrix(truth, guess, labels=range(count))
    assert matrix == {"labels": names, "counts": counts.tolist()}


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(
            st.tuples(*[st.lists(st.integers(0, 1), min_size=n, max_size=n)] * 2),
            min_size=1,
            max_size=8,
        )
    )
)
@settings(max_examples=20, deadline=None)
def test_multi_label_equals_sklearn(rows: list[tuple[list[int], list[int]]]) -> None:
    from sklearn.metrics import accuracy_score, classification_report, f1_score

    guess, truth = [row[0] for row in rows], [row[1] for row in rows]
    tally = MultiLabelTally([str(i) for i in range(len(truth[0]))])
    tally.add_labels(guess, truth)
    found = tally.score()
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    for name, average in (("f1", "micro"), ("f1_macro", "macro")):
        expected = f1_score(truth, guess, average=average, zero_division=0)
        assert found[name] == pytest.approx(expected)
    expected = classification_report(truth, guess, output_dict=True, zero_division=0)
    del expected["samples avg"]
    check_report(tally.tables()[0].to_json(), expected)


def test_regression_equals_scipy_and_sklearn() -> None:
    import numpy as np
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_absolute_error, mean_squared_error

    dice = np.random.default_rng(0)
    truth = np.round(dice.normal(1e3, 2, 500), 1)  # ties, and a mean far from 0
    guess = truth + dice.normal(0, 1, 500)
    tally = RegressionTally()
    for part in np.array_split(np.arange(500), 9):
        tally.add_numbers(guess[part].tolist(), truth[part].tolist())
    expected = {
        "pearson": pearsonr(truth, guess).statistic,
        "spearmanr": spearmanr(truth, guess).statistic,
        "mse": mean_squared_error(truth, guess),
        "mae": mean_absolute_error(truth, guess),
    }
    assert tally.score() == pytest.approx(expected, rel=1e-9)


def test_regression_of_a_constant_is_not_nan() -> None:
    found = compute_regression([1.0, 1.0, 1.0], [0.0, 1.0, 2.0])
    assert found["pearson"] == 0.0 and found["spearmanr"] == 0.0
    assert found["mse"] == pytest.approx(2 / 3) and found["mae"] == pytest.approx(2 / 3)


answer_texts = st.lists(
    st.sampled_from(["the", "a", "cat", "Cat!", "red", "in", "-", "paris", "Paris,"]), max_size=4
).map(" ".join)


@given(st.lists(st.tuples(answer_texts, st.lists(answer_texts, max_size=3)), min_size=1))
@settings(max_examples=40, deadline=None)
def test_answers_are_scored_as_squads_scripts_do(rows: list[tuple[str, list[str]]]) -> None:
    found = [row[0] for row in rows]
    # An answer of articles alone occurs in neither version, whose scripts disagree on it.
    wanted = [[text for text in row[1] if normalize(text)] for row in rows]
    expected = score_version_2(found, wanted)
    scores = compute_squad(found, wanted)
    assert scores == pytest.approx({name: expected[name] for name in scores})
    assert len(scores) == (6 if any(wanted) and not all(wanted) else 2)
    answered = [row for row, texts in enumerate(wanted) if texts]
    if answered:
        found, wanted = [found[row] for row in answered], [wanted[row] for row in answered]
        assert compute_squad(found, wanted) == pytest.approx(score_version_1(found, wanted))


generated_texts = st.lists(
    st.sampled_from(["the", "cat", "sat.", "on", "a", "mat,", "U.S.", "3.5%", "(big)", "world!"]),
    min_size=1,
    max_size=9,
).map(" ".join)


@given(st.lists(st.tuples(generated_texts, generated_texts), min_size=2, max_size=5))
@settings(max_examples=40, deadline=None)
def test_generation_equals_the_reference_packages(rows: list[tuple[str, str]]) -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    scores = TextScores()
    scores.add([rows[0][0]], [rows[0][1]])
    scores.add([row[0] for row in rows[1:]], [row[1] for row in rows[1:]])
    found = scores.score()
    bleu = sacrebleu.corpus_bleu([row[0] for row in rows], [[row[1] for row in rows]])
    assert found["bleu"] == pytest.approx(bleu.score)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for key in ("rouge1", "rouge2", "rougeL"):
        each = [scorer.score(wanted, text)[key].fmeasure for text, wanted in rows]
        assert found[key] == pytest.approx(100 * sum(each) / len(rows), abs=1e-4)


def test_texts_without_any_match_score_0() -> None:
    nothing, other = TextScores(), TextScores()
    nothing.add(["", ""], ["a", "b"])
    assert nothing.score()["bleu"] == 0.0
    other.add(["x y z"], ["a b c"])
    assert other.score() == dict.fromkeys(("bleu", "rouge1", "rouge2", "rougeL"), 0.0)


def test_perplexity() -> None:
    assert compute_perplexity(2.0) == pytest.approx(math.exp(2))
    assert compute_perplexity(1e6) == math.inf
