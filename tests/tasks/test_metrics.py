from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer.tasks.metrics.classification import compute_multi_label, compute_single_label
from rapidformer.tasks.metrics.entities import compute_entities, find_entities, has_entity_tags
from rapidformer.tasks.metrics.generation import compute_generation
from rapidformer.tasks.metrics.perplexity import compute_perplexity
from rapidformer.tasks.metrics.regression import compute_regression
from rapidformer.tasks.metrics.squad import compute_squad

TAGS = ["O", *(f"{mark}-{kind}" for mark in "BIES" for kind in ("PER", "LOC"))]
sentences = st.lists(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=9),
    min_size=1,
    max_size=6,
)


@given(sentences)
@settings(max_examples=300, deadline=None)
def test_entities_equal_seqeval(pairs: list[list[tuple[str, str]]]) -> None:
    import warnings

    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score
    from seqeval.metrics.sequence_labeling import get_entities

    truth = [[pair[0] for pair in sentence] for sentence in pairs]
    guess = [[pair[1] for pair in sentence] for sentence in pairs]
    for tags in truth:
        assert find_entities(tags) == get_entities(tags)
    found = compute_entities(guess, truth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["precision"] == pytest.approx(precision_score(truth, guess))
        assert found["recall"] == pytest.approx(recall_score(truth, guess))
        assert found["f1"] == pytest.approx(f1_score(truth, guess))
        assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))


def test_entity_tags_are_recognized() -> None:
    assert has_entity_tags(["O", "B-PER", "I-PER"])
    assert not has_entity_tags(["NOUN", "VERB"])


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
@settings(max_examples=60, deadline=None)
def test_single_label_equals_sklearn(case: tuple[int, list[tuple[int, int]]]) -> None:
    from sklearn import metrics

    count, pairs = case
    guess, truth = [p[0] for p in pairs], [p[1] for p in pairs]
    found = compute_single_label(guess, truth, count, ("accuracy", "f1", "matthews_correlation"))
    average = "binary" if count == 2 else "macro"
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(truth, guess))
    f1 = metrics.f1_score(truth, guess, average=average, zero_division=0)
    assert found["f1"] == pytest.approx(f1, abs=1e-6)
    if len(set(truth)) > 1 and len(set(guess)) > 1:
        matthews = metrics.matthews_corrcoef(truth, guess)
        assert found["matthews_correlation"] == pytest.approx(matthews, abs=1e-5)


def test_multi_label_equals_sklearn() -> None:
    from sklearn.metrics import accuracy_score, f1_score

    truth, guess = [[1, 0, 1], [0, 1, 0], [1, 1, 0]], [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    found = compute_multi_label(guess, truth)
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert found["f1"] == pytest.approx(f1_score(truth, guess, average="micro"))
    macro = f1_score(truth, guess, average="macro", zero_division=0)
    assert found["f1_macro"] == pytest.approx(macro)


def test_regression_of_a_constant_is_no_nan() -> None:
    found = compute_regression([1.0, 1.0, 1.0], [0.0, 1.0, 2.0])
    assert found["pearson"] == 0.0 and found["spearmanr"] == 0.0
    assert found["mse"] == pytest.approx(2 / 3) and found["mae"] == pytest.approx(2 / 3)


def test_squad_by_hand() -> None:
    found = compute_squad(["The cat!", "in red paris", ""], [["cat"], ["paris", "x"], []])
    assert found["exact_match"] == pytest.approx(100 * 2 / 3)
    assert found["f1"] == pytest.approx(100 * (1 + 0.5 + 1) / 3)
    assert found["no_answer_exact_match"] == 100 and found["has_answer_f1"] == pytest.approx(75)


def test_generation_equals_the_reference_packages() -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    guess = ["the cat sat on the mat today", "Hello, big world of words!", "nothing alike"]
    truth = ["the cat sat on a mat today", "Hello, world of many words!", "something else here"]
    found = compute_generation(guess, truth)
    bleu = sacrebleu.corpus_bleu(guess, [truth], smooth_method="none").score
    assert found["bleu"] == pytest.approx(bleu, abs=1e-3)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for key in ("rouge1", "rouge2", "rougeL"):
        each = [scorer.score(t, g)[key].fmeasure for t, g in zip(truth, guess, strict=True)]
        assert found[key] == pytest.approx(100 * sum(each) / 3, abs=1e-3)
    assert compute_generation(["", ""], ["a", "b"])["bleu"] == 0.0


def test_perplexity() -> None:
    assert compute_perplexity(2.0) == pytest.approx(math.exp(2))
    assert compute_perplexity(1e6) == math.inf
