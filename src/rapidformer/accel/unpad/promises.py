"""What the caller of a model promises to read of its result: the rest need not be computed.

A model that gets its labels shows by itself what is read. Without them, as where log-probabilities
or embeddings are computed, our own code says so: padding can then be left out, and a head need not
compute logits, also where nothing learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from rapidformer.accel.unpad.kernels import inside
from rapidformer.accel.unpad.sides import is_encoder_decoder
from rapidformer.models.own_loss import shifts_labels


class Promise(NamedTuple):
    """What is read of a call without labels."""

    reads_all_tokens: bool
    """All but padding; otherwise only what predicts labels."""
    labels: Tensor | None = None
    """These, unless they do not stand where the model's own would."""


_PROMISE: ContextVar[Promise | None] = ContextVar("promise", default=None)


def reading_no_padding() -> AbstractContextManager[None]:
    """Inside, whoever calls a model reads none of what it returns for padding, which is zero."""
    return inside(_PROMISE, Promise(reads_all_tokens=True))


def reading_labelled(
    model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, *, is_shifted: bool
) -> AbstractContextManager[None]:
    """Inside, of the logits for these inputs, only those that predict these labels are read."""
    lead = next((inputs[n] for n in ("attention_mask", "position_ids") if n in inputs), None)
    fits = isinstance(lead, Tensor) and lead.shape == labels.shape
    is_usual = fits and is_shifted == shifts_labels(model) and not is_encoder_decoder(model)
    return inside(_PROMISE, Promise(reads_all_tokens=False, labels=labels if is_usual else None))


def find_promise(given: Mapping[str, Any]) -> Promise | None:
    """What was promised for a call, unless it has labels of its own."""
    return None if given.get("labels") is not None else _PROMISE.get()


def reads_no_padding() -> bool:
    """Whether it is promised that a call's result is read everywhere but in padding."""
    promise = _PROMISE.get()
    return promise is not None and promise.reads_all_tokens


def find_labels(given: Mapping[str, Any]) -> Any:
    """The labels of a call, or those that it was promised for."""
    promise = find_promise(given)
    return given.get("labels") if promise is None else promise.labels
