"""sentence-transformers' losses by name: each is the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.errors import ConfigurationError

Function = Callable[[Tensor, Tensor], Tensor]


def _compare_all(first: Tensor, second: Tensor) -> Tensor:
    return functional.normalize(first, dim=-1) @ functional.normalize(second, dim=-1).T


class Loss:
    """What is learnt, as settings of ``--task embedding``."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def _refuse(self, name: str, reason: str) -> None:
        raise ConfigurationError(f"{type(self).__name__}({name}=...) is not supported: {reason}.")

    def _check(self, name: str, function: Any, expected: Function, reason: str) -> None:
        """Refuse a function that computes something else than what is expected."""
        if function is None:
            return
        first, second = torch.arange(24.0).sin().view(2, 3, 4)
        wanted = expected(first, second)
        try:
            result = function(first, second)
            is_same = result.shape == wanted.shape and torch.allclose(result, wanted, atol=1e-4)
        except Exception:  # it is the user's
            is_same = False
        if not is_same:
            self._refuse(name, reason)


class MultipleNegativesRankingLoss(Loss):
    """Finds the document of each query among those of the global batch."""

    def __init__(
        self,
        model: Any = None,
        scale: float = 20.0,
        similarity_fct: Any = None,
        gather_across_devices: bool = True,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        """``gather_across_devices`` is always on."""
        self._check("similarity_fct", similarity_fct, _compare_all, "texts are compared by cosine")
        if hardness_mode is not None:
            self._refuse("hardness_mode", "negatives have equal weights")
        is_symmetric = set(directions) == {"query_to_doc", "doc_to_query"}
        if is_symmetric and partition_mode == "joint":
            raise ConfigurationError(
                "MultipleNegativesRankingLoss with two directions needs "
                "partition_mode='per_direction'."
            )
        if not is_symmetric and tuple(directions) != ("query_to_doc",):
            raise ConfigurationError(
                "MultipleNegativesRankingLoss(directions=...) takes 'query_to_doc', alone or with "
                f"'doc_to_query', not {', '.join(directions)}."
            )
        super().__init__(loss="infonce", similarity_scale=scale, symmetric=is_symmetric)


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """The same: memory is that of a micro-batch in any case."""

    def __init__(self, model: Any = None, *args: Any, **options: Any) -> None:
        for name in ("mini_batch_size", "show_progress_bar"):
            options.pop(name, None)
        super().__init__(model, *args, **options)


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """Also finds the query of each document."""

    def __init__(
        self,
        model: Any = None,
        scale: float = 20.0,
        similarity_fct: Any = None,
        gather_across_devices: bool = True,
    ) -> None:
        super().__init__(
            model, scale, similarity_fct, gather_across_devices,
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction",
        )  # fmt: skip


class CoSENTLoss(Loss):
    """Learns the order of scores."""

    def __init__(self, model: Any = None, scale: float = 20.0, similarity_fct: Any = None) -> None:
        cosine: Function = torch.cosine_similarity
        self._check("similarity_fct", similarity_fct, cosine, "texts are compared by cosine")
        super().__init__(loss="cosent", similarity_scale=scale)


class CosineSimilarityLoss(Loss):
    """Learns scores as cosines."""

    def __init__(
        self, model: Any = None, loss_fct: Any = None, cos_score_transformation: Any = None
    ) -> None:
        transform = cos_score_transformation
        self._check("loss_fct", loss_fct, functional.mse_loss, "it is the squared difference")
        self._check(
            "cos_score_transformation", transform and (lambda first, _: transform(first)),
            lambda first, _: first, "cosines are taken as they are",
        )  # fmt: skip
        super().__init__(loss="cosine")


class TripletLoss(Loss):
    """Learns that negatives are farther away, by a margin, in Euclidean distance."""

    def __init__(
        self, model: Any = None, distance_metric: Any = None, triplet_margin: float = 5
    ) -> None:
        distance = functional.pairwise_distance
        self._check("distance_metric", distance_metric, distance, "distances are Euclidean")
        super().__init__(loss="triplet", triplet_margin=float(triplet_margin))


class MarginMSELoss(Loss):
    """Learns a teacher's margins between positives and negatives."""

    def __init__(self, model: Any = None, similarity_fct: Any = None) -> None:
        self._check(
            "similarity_fct", similarity_fct, lambda first, second: (first * second).sum(-1),
            "texts are compared by dot product",
        )  # fmt: skip
        super().__init__(loss="margin_mse")


class MatryoshkaLoss(Loss):
    """A loss of whole vectors and of their first numbers, added up."""

    def __init__(
        self,
        model: Any,
        loss: Loss,
        matryoshka_dims: Sequence[int],
        matryoshka_weights: Sequence[float] | None = None,
        n_dims_per_step: int = -1,
    ) -> None:
        if any(weight != 1 for weight in matryoshka_weights or ()):
            self._refuse("matryoshka_weights", "all dimensions weigh the same")
        if n_dims_per_step > 0:
            self._refuse("n_dims_per_step", "all dimensions are learnt each time")
        super().__init__(**loss.settings, matryoshka_dims=list(matryoshka_dims))
