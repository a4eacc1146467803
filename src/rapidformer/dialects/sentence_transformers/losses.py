"""sentence-transformers' losses by name: each is the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rapidformer.errors import ConfigurationError


class Loss:
    """What is learnt, as settings of ``--task embedding``."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def _refuse(self, **others: Any) -> None:
        """Refuse what is given and not the default, which is None here."""
        for name, (value, reason) in others.items():
            if value is not None:
                raise ConfigurationError(
                    f"{type(self).__name__}({name}=...) is not supported: {reason}."
                )


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
        self._refuse(
            similarity_fct=(_if_not_cosine(similarity_fct), "texts are compared by their cosine"),
            hardness_mode=(hardness_mode, "negatives have equal weights"),
        )
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
        self._refuse(
            similarity_fct=(_if_not_cosine(similarity_fct), "texts are compared by their cosine")
        )
        super().__init__(loss="cosent", similarity_scale=scale)


class CosineSimilarityLoss(Loss):
    """Learns scores as cosines."""

    def __init__(
        self, model: Any = None, loss_fct: Any = None, cos_score_transformation: Any = None
    ) -> None:
        self._refuse(
            loss_fct=(loss_fct, "it is the squared difference"),
            cos_score_transformation=(cos_score_transformation, "cosines are taken as they are"),
        )
        super().__init__(loss="cosine")


class TripletLoss(Loss):
    """Learns that negatives are farther away, by a margin, in Euclid's distance."""

    def __init__(
        self, model: Any = None, distance_metric: Any = None, triplet_margin: float = 5
    ) -> None:
        self._refuse(distance_metric=(distance_metric, "distances are Euclid's"))
        super().__init__(loss="triplet", triplet_margin=float(triplet_margin))


class MarginMSELoss(Loss):
    """Learns a teacher's margins between positives and negatives."""

    def __init__(self, model: Any = None, similarity_fct: Any = None) -> None:
        self._refuse(similarity_fct=(similarity_fct, "texts are compared by their dot product"))
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
            self._refuse(matryoshka_weights=(matryoshka_weights, "all dimensions weigh the same"))
        if n_dims_per_step > 0:
            self._refuse(n_dims_per_step=(n_dims_per_step, "all dimensions are learnt each time"))
        super().__init__(**loss.settings, matryoshka_dims=list(matryoshka_dims))


def _if_not_cosine(function: Any) -> Any:
    """The function, unless it is sentence-transformers' own cosine."""
    return (
        None if getattr(function, "__name__", "") in ("cos_sim", "pairwise_cos_sim") else function
    )
