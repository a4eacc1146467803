"""The interface of an objective: the loss of a micro-batch, as sums with their counts.

A loss has one or several terms, and each is a mean over its own things: labels, rows, pairs. The
gradient of an update is that of the sum of ``weight * (sum / count)`` over the terms, where sums
and counts are those of the *whole* update on all processes. A term holds its mean and its count,
because that is what models return; ``Term.from_sum`` takes a sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from rapidformer.data.update import MicroBatch, Update
from rapidformer.dist.topology import Topology

Count = float | Tensor
T = TypeVar("T")
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


@dataclass(frozen=True)
class Term:
    """One term of a loss."""

    mean: Tensor
    """Of this micro-batch; anything finite where the count is 0."""
    count: Count | None = None
    """What the mean was taken over. None: the labels of the batch, which the engine counts."""
    weight: float = 1.0
    """Its factor in the loss. A term of weight 0 is only shown."""
    rows: tuple[Tensor, Tensor] | None = None
    """The summed loss of each sample and its count, if they are known."""

    @classmethod
    def from_sum(cls, total: Tensor, count: Count, weight: float = 1.0) -> Term:
        """The term of a sum over ``count`` things, which may be none."""
        least = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return cls(total / least, count, weight)

    @classmethod
    def from_rows(cls, losses: Tensor, counts: Tensor | None = None) -> Term:
        """The term of the losses of samples, each a sum over so many things, or over one."""
        over = torch.ones_like(losses) if counts is None else counts
        term = cls.from_sum(losses.sum(), len(losses) if counts is None else counts.sum())
        return replace(term, rows=(losses.detach(), over))


Terms = Mapping[str, Term]
"""The terms of a loss by name; names that end in ``_loss`` are printed in the log lines."""


@runtime_checkable
class AskedModel(Protocol):
    """A frozen model that is not a module of its own, such as the trained one without adapters."""

    def ask(self, question: Callable[[Any], T]) -> T:
        """``question(model)``, without gradient; it calls the model once."""
        ...


@dataclass(frozen=True)
class Context:
    """What an objective is given besides the model and the batch."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """What ``first_pass`` returned, for all rows of the update, in the order of the samples."""
    places: Tensor | None = None
    """Which of ``rows`` are those of this micro-batch."""
    frozen: Mapping[str, nn.Module | AskedModel] = field(default_factory=dict)
    """The frozen models by the names in ``Objective.frozen``; ``ask`` (reference.py) takes both."""


class Objective(ABC):
    """What is learnt."""

    frozen: tuple[str, ...] = ()
    """The frozen models that it needs besides the one that learns. ``reference``, the model that
    the run started from, is made by the run; others (``teacher``) are given to it."""
    asks_known_rows = True
    """Whether the reference is asked about the rows of the data alone, so that it can be asked
    before training; not if answers are generated, or joined with other rows' prompts."""
    has_first_pass = False
    """Whether ``first_pass`` runs on the whole update before the first loss is computed."""
    is_whole_alone = False
    """Whether it leaves the first pass out for a micro-batch that is its whole update: ``compute``
    then gets no rows and takes those of the batch."""
    reads_no_padding = False
    """Whether it calls the model inside ``reading_no_padding()`` only: a CUDA graph must know that
    beforehand, unless a batch has labels."""
    expands = False
    """Whether the update that is learnt from is made by ``expand``."""

    @abstractmethod
    def compute(self, model: Any, batch: Any, context: Context) -> Term | Terms:
        """The terms of a micro-batch."""

    def count(self, micro_batch: MicroBatch) -> Mapping[str, Count]:
        """What each term is a mean over in this micro-batch, if the terms' counts differ.

        Their totals are needed before the first backward pass. Empty if all terms have one count.
        """
        return {}

    def exchange(self, batch: Any) -> Mapping[str, Tensor]:
        """Values of each row (dimension 0) that the first pass of other rows needs, if any.

        The first pass gets those of the whole update as ``context.rows``. Whole numbers may differ
        in width from batch to batch: they are padded with -100.
        """
        return {}

    def first_pass(self, model: Any, batch: Any, context: Context) -> Mapping[str, Tensor]:
        """Values of each row (dimension 0) that other rows' losses depend on; has no gradient.

        The loss pass draws the same random numbers again. Its gradient is exact if the loss is
        computed with this micro-batch's rows alive among those of the update (``take_value``).
        """
        raise NotImplementedError(f"{type(self).__name__}.first_pass")

    def summarize(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What to pass on of the first pass, from all rows of the update: a baseline, say."""
        return rows

    def expand(
        self, model: Any, update: Update, topology: Topology, device: torch.device
    ) -> Update:
        """The update to learn from, made of the loader's: its prompts with answers, say.

        Comes before all else, on every rank, with the model evaluating and without gradient.
        Random numbers must follow from the samples alone (``get_sample_seeds``), so that ranks and
        micro-batches change nothing.
        """
        return update

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know of it, as JSON; every rank calls this."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` returned; every rank gets all of it."""
        return

    def get_reference_inputs(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        """What the reference is asked about a batch: the model's inputs, and the labels."""
        return {name: batch[name] for name in MODEL_INPUTS if name in batch}, batch["labels"]

    def list_steps(self) -> list[Callable[..., Any]]:
        """The code that computes the loss and may be the user's: ``--cuda-graph`` examines it."""
        return [self.compute]


def take_value(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The value of one tensor with the gradient of another.

    A row's loss may depend on the rows of other micro-batches. Each micro-batch then
    back-propagates the sum of all losses into its own rows, and counts its own losses only.
    """
    return value.detach() + (gradient_of - gradient_of.detach())
