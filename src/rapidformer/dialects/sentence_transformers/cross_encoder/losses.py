"""The losses of sentence-transformers' rerankers by name: each is the settings of a run."""

from __future__ import annotations

from typing import Any, NoReturn

from rapidformer.dialects.sentence_transformers.losses import Loss
from rapidformer.errors import ConfigurationError

_MISSING = {
    "CrossEntropyLoss": "classes of pairs are learnt by `rapidformer --task "
    "sequence_classification`",
    **dict.fromkeys(
        ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"),
        "use BinaryCrossEntropyLoss or ListNetLoss with negatives in the data",
    ),
    **dict.fromkeys(
        ("LambdaLoss", "RankNetLoss", "ListMLELoss", "PListMLELoss", "ADRMSELoss"),
        "use ListNetLoss, which learns from lists of documents, too",
    ),
}


def __getattr__(name: str) -> NoReturn:
    if name in _MISSING:
        raise ConfigurationError(f"losses.{name} is not supported: {_MISSING[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _RankingLoss(Loss):
    """A loss of the model's outputs as they are."""

    def __init__(self, activation_fn: Any, **settings: Any) -> None:
        apply = activation_fn and (lambda first, _: activation_fn(first))
        self._check(
            "activation_fn", apply, lambda first, _: first, "outputs are learnt as they are"
        )
        super().__init__(**settings)


class BinaryCrossEntropyLoss(_RankingLoss):
    """Learns the label of each pair, from 0 to 1."""

    def __init__(
        self, model: Any = None, activation_fn: Any = None, pos_weight: Any = None
    ) -> None:
        weight = 1.0 if pos_weight is None else float(pos_weight)
        super().__init__(activation_fn, loss="bce", positive_weight=weight)


class MSELoss(_RankingLoss):
    """Learns a teacher's score of each pair."""

    def __init__(self, model: Any = None, activation_fn: Any = None) -> None:
        super().__init__(activation_fn, loss="mse")


class MarginMSELoss(_RankingLoss):
    """Learns a teacher's margins between positives and negatives."""

    def __init__(self, model: Any = None, activation_fn: Any = None) -> None:
        super().__init__(activation_fn, loss="margin_mse")


class ListNetLoss(_RankingLoss):
    """Learns the labels of the documents of a query, as shares."""

    def __init__(
        self, model: Any = None, activation_fn: Any = None, mini_batch_size: int | None = None
    ) -> None:
        """``mini_batch_size`` does not matter: memory is that of a micro-batch."""
        super().__init__(activation_fn, loss="listnet")
