"""``load_metric``: metrics by name, as ``datasets.load_metric`` offered before it was removed.

    metric = load_metric("glue", "mrpc")
    metric.add_batch(predictions=predictions, references=batch["labels"])
    metric.compute()

Results have the names and scales of the originals, computed by the tasks' own metrics. Examples are
kept in this process: in a distributed run, gather predictions first (``engine.gather``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rapidformer.compat.torchmetrics import compute_rouge_lsum
from rapidformer.errors import ConfigurationError, DataError, MissingPackageError
from rapidformer.nearest import suggest
from rapidformer.tasks.metrics.classification import (
    GLUE_METRICS,
    EntityTally,
    compute_regression,
    compute_single_label,
)
from rapidformer.tasks.metrics.generation import Bleu, compute_squad

_Scores = dict[str, Any]
_Compute = Callable[..., _Scores]


class Metric:
    """Collects predictions and references, and computes their score."""

    def __init__(self, name: str, compute: _Compute) -> None:
        self.name = name
        self._compute = compute
        self._predictions: list[Any] = []
        self._references: list[Any] = []

    def add(self, *, prediction: Any = None, reference: Any = None, **same: Any) -> None:
        self._predictions.append(_to_plain(same.get("predictions", prediction)))
        self._references.append(_to_plain(same.get("references", reference)))

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Add several examples: lists, arrays or tensors."""
        predictions, references = _to_plain(predictions), _to_plain(references)
        if len(predictions) != len(references):
            raise DataError(
                f"{self.name}: {len(predictions)} predictions but {len(references)} references; "
                "their numbers must match."
            )
        self._predictions += predictions
        self._references += references

    def compute(
        self, *, predictions: Any = None, references: Any = None, **settings: Any
    ) -> _Scores:
        """The scores of everything added so far; clears it."""
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        if not self._predictions:
            raise DataError(f"{self.name}: there is nothing to score, add predictions first.")
        collected = self._predictions, self._references
        self._predictions, self._references = [], []
        return self._compute(*collected, **settings)


def load_metric(path: str, config_name: str | None = None, **settings: Any) -> Metric:
    """A metric by name: ``load_metric("glue", "mrpc")``, ``load_metric("seqeval")``."""
    if path == "glue":
        return Metric(f"glue/{config_name}", _find_glue(config_name))
    if path not in _METRICS:
        known = sorted([*_METRICS, "glue"])
        listed, hint = ", ".join(known), suggest(path, known)
        raise ConfigurationError(f"there is no metric {path!r}: use one of {listed}.{hint}")
    return Metric(path, _METRICS[path])


def _find_glue(task: str | None) -> _Compute:
    if task == "stsb":
        keys = ("pearson", "spearmanr")
        return lambda p, r: {k: v for k, v in compute_regression(p, r).items() if k in keys}
    if task not in GLUE_METRICS:
        raise ConfigurationError(
            f"glue has no task {task!r}: use one of {', '.join([*GLUE_METRICS, 'stsb'])}."
        )
    # For cola, the original reports only the correlation.
    names = GLUE_METRICS[task][:1] if task == "cola" else GLUE_METRICS[task]
    return lambda p, r: compute_single_label(p, r, _count_classes(p, r), names)


def _count_classes(predictions: list[int], references: list[int]) -> int:
    return max(2, 1 + max([*predictions, *references]))


def _classify(name: str) -> _Compute:
    """``average`` as in scikit-learn: binary (of class 1), micro, macro, weighted or None."""

    def compute(
        predictions: list[int], references: list[int], average: str | None = "binary"
    ) -> _Scores:
        import torch
        from torchmetrics import functional

        options: dict[str, Any] = {"task": "binary"}
        if average != "binary":
            classes = _count_classes(predictions, references)
            options = {"task": "multiclass", "num_classes": classes, "average": average or "none"}
        compute_score = getattr(functional, "f1_score" if name == "f1" else name)
        score = compute_score(torch.tensor(predictions), torch.tensor(references), **options)
        return {name: score.tolist()}

    return compute


def _score_entities(
    predictions: list[list[str]], references: list[list[str]], **settings: Any
) -> _Scores:
    """A dictionary per type of entity, and the scores of all."""
    tally = EntityTally()
    for predicted, expected in zip(predictions, references, strict=True):
        tally.add_tags(predicted, expected)
    scores: _Scores = {**tally.score_types()}
    for row in scores.values():
        row["number"] = row.pop("support")
    return scores | {f"overall_{name}": value for name, value in tally.score().items()}


def _score_answers(predictions: list[Any], references: list[Any], **settings: Any) -> _Scores:
    """Predictions ``{"id", "prediction_text"}``, references ``{"id", "answers": {"text"}}``."""
    wanted = {str(row["id"]): row["answers"]["text"] for row in references}
    answers = {str(row["id"]): row["prediction_text"] for row in predictions}
    missing = [name for name in wanted if name not in answers]
    if missing:
        raise DataError(f"squad: there is no prediction for the question {missing[0]!r}.")
    return compute_squad([answers[name] for name in wanted], list(wanted.values()))


def _score_answers_2(predictions: list[Any], references: list[Any], **settings: Any) -> _Scores:
    """The same in the words of SQuAD 2's script, without its best thresholds."""
    scores = _score_answers(predictions, references)
    counts = Counter("HasAns" if row["answers"]["text"] else "NoAns" for row in references)
    renamed: _Scores = {
        "exact": scores["exact_match"], "f1": scores["f1"], "total": len(references),
    }  # fmt: skip
    for ours, theirs in (("has_answer", "HasAns"), ("no_answer", "NoAns")):
        if counts[theirs]:
            # With questions of one kind alone, their scores are those of all.
            renamed[f"{theirs}_exact"] = scores.get(f"{ours}_exact_match", scores["exact_match"])
            renamed[f"{theirs}_f1"] = scores.get(f"{ours}_f1", scores["f1"])
            renamed[f"{theirs}_total"] = counts[theirs]
    return renamed


def _score_rouge(
    predictions: list[str], references: list[str], use_stemmer: bool = False, **settings: Any
) -> _Scores:
    """Means from 0 to 1; for rougeLsum, each line of a text is a sentence."""
    from torchmetrics.functional.text import rouge_score

    stemmer = _build_stemmer() if use_stemmer else None
    keys = ("rouge1", "rouge2", "rougeL")
    rouge = rouge_score(predictions, references, rouge_keys=keys, use_stemmer=use_stemmer)
    scores = {key: float(rouge[f"{key}_fmeasure"]) for key in keys}
    pairs = zip(predictions, references, strict=True)
    total = sum(compute_rouge_lsum(text, wanted, stemmer) for text, wanted in pairs)
    return scores | {"rougeLsum": total / len(references)}


def _build_stemmer() -> Any:
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError:
        raise MissingPackageError("nltk", "use_stemmer=True") from None
    return PorterStemmer()


def _score_bleu(predictions: list[str], references: list[Any]) -> _Scores:
    """sacreBLEU's score in percent; references are strings or lists of strings."""
    bleu = Bleu()
    bleu.add(
        predictions, [wanted if isinstance(wanted, list) else [wanted] for wanted in references]
    )
    return {"score": bleu.score()}


def _score_equal(predictions: list[Any], references: list[Any], **settings: Any) -> _Scores:
    hits = sum(p == r for p, r in zip(predictions, references, strict=True))
    return {"exact_match": hits / len(references)}


_METRICS: Mapping[str, _Compute] = {
    "accuracy": lambda p, r: {"accuracy": _score_equal(p, r)["exact_match"]},
    "f1": _classify("f1"),
    "precision": _classify("precision"),
    "recall": _classify("recall"),
    "matthews_correlation": _find_glue("cola"),
    "seqeval": _score_entities,
    "squad": _score_answers,
    "squad_v2": _score_answers_2,
    "rouge": _score_rouge,
    "sacrebleu": _score_bleu,
    "mse": lambda p, r, **settings: {"mse": compute_regression(p, r)["mse"]},
    "exact_match": _score_equal,
}


def _to_plain(values: Any) -> Any:
    """Convert tensors and arrays to lists and numbers."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return values.tolist() if hasattr(values, "tolist") else values
