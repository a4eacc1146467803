"""What a model learns from raw text, and how its loss is made of the model's outputs.

A decoder guesses the next token (gpt), an encoder the hidden tokens and whether two pieces were
swapped (bert), an encoder-decoder the hidden spans (t5). What a reader would get wrong: losses are
taken from the logits here, not from the model, so that each term can be weighted and shown alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.data.pretraining import get_ltor_masks_and_position_ids
from rapidformer.data.update import UPDATE_COUNTS

if TYPE_CHECKING:
    from rapidformer.config import Settings
    from rapidformer.data.tokenizers import Tokenizer

Part = torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]
Loss = tuple[torch.Tensor, float | torch.Tensor | None, dict[str, Part]]
"""A mean, what it was taken over (None: the labels), and what it is made of, each with a count of
its own if it is a mean over something else."""


class Objective(ABC):
    """One way to learn from text."""

    name: str
    """Which samples: gpt, bert or t5."""
    auto_class: str
    """Name of the Auto class in transformers that builds the model."""
    has_order_head = False
    """Whether the model also tells if two pieces of text were swapped."""
    counts_ahead = False
    """Whether ``compute_loss`` needs the counts of the whole update, as ``update_counts``."""

    def __init__(self, args: Settings, tokenizer: Tokenizer) -> None:
        self.args = args
        self.tokenizer = tokenizer

    @abstractmethod
    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Loss:
        """The loss of a micro-batch."""

    def combine_means(self, means: dict[str, float]) -> dict[str, float]:
        """An evaluation's loss and its parts, from the means over all the data."""
        return means

    def count_added_tokens(self) -> int:
        """Ids below this may be put into the text: a pretrained model must have room for them."""
        return 0

    def get_token_ids(self) -> dict[str, int]:
        """The configuration's special tokens, for a model that is built from sizes alone."""
        names = {"pad_token_id": "pad", "bos_token_id": "bos", "eos_token_id": "eos"}
        has = self.tokenizer.has_special
        return {key: getattr(self.tokenizer, name) for key, name in names.items() if has(name)}


class NextToken(Objective):
    """Guess each token from those before it."""

    name = "gpt"
    auto_class = "AutoModelForCausalLM"

    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Loss:
        text = batch["text"]
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        hidden, positions, counted = self.get_masks(tokens)
        losses, extra = self.get_token_losses(model, tokens, labels, hidden, positions)
        if counted is None:
            # Every row has as many tokens as any other.
            weight: float | torch.Tensor = len(text)
            mean = losses.mean()
        else:
            weight = counted.sum()
            # A micro-batch of nothing but ends weighs nothing, and must not divide by it.
            mean = (losses * counted).sum() / weight.clamp(min=1)
        if not extra:
            return mean, weight, {}
        balance = torch.stack([part.float() for part in extra]).sum()
        total = mean + model.moe_loss_coeff * balance
        return total, weight, {"lm_loss": mean, "moe_loss": balance}

    def get_masks(
        self, tokens: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Which positions are hidden, how they are numbered, which count: None as usual."""
        args = self.args
        if not (args.reset_attention_mask or args.reset_position_ids or args.eod_mask_loss):
            # Plain causal attention has a fast path, and needs no mask of rows x columns.
            return None, None, None
        hidden, counted, positions = get_ltor_masks_and_position_ids(
            tokens,
            self.tokenizer.eod,
            args.reset_position_ids,
            args.reset_attention_mask,
            args.eod_mask_loss,
        )
        return (
            hidden if args.reset_attention_mask else None,
            positions if args.reset_position_ids else None,
            counted if args.eod_mask_loss else None,
        )

    def get_token_losses(
        self,
        model: Any,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        hidden: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if hidden is not None:
            inputs["attention_mask"] = _to_additive(hidden)
        if positions is not None:
            inputs["position_ids"] = positions
        return _get_losses(model(**inputs).logits, labels), []


class NextTokenInMegatronsForm(NextToken):
    """The same for ``GPTModel``, which is called as Megatron's models are."""

    def get_token_losses(
        self,
        model: Any,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        hidden: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        returned = model(tokens, positions, hidden, labels=labels)
        if isinstance(returned, tuple):
            return returned[0], list(returned[1:])
        return returned, []


class HiddenTokens(Objective):
    """Guess the tokens that were hidden."""

    name = "bert"
    auto_class = "AutoModelForMaskedLM"

    def count_added_tokens(self) -> int:
        return self.tokenizer.own_vocab_size  # random words

    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Loss:
        logits, labels = model(**_get_inputs(batch)).logits, batch["labels"]
        return _get_mean(logits, labels), None, {}


class HiddenTokensAndOrder(HiddenTokens):
    """Guess the tokens that were hidden, and whether two pieces of text were swapped."""

    auto_class = "AutoModelForPreTraining"
    has_order_head = True
    counts_ahead = True

    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Loss:
        outputs = model(**_get_inputs(batch))
        order_logits = getattr(outputs, "seq_relationship_logits", None)
        if order_logits is None:
            order_logits = outputs.sop_logits
        words = _get_losses(outputs.prediction_logits, batch["labels"]).sum()
        order = functional.cross_entropy(order_logits.float(), batch["next_sentence_label"])
        # One is a mean over hidden tokens, the other over rows, and rows differ in hidden tokens:
        # some have none. So that both are means over the whole update, whatever the micro-batches,
        # the first is brought to the weight of the second.
        rows, labels = len(order_logits), _count(batch["labels"])
        all_rows, all_labels = batch.get(UPDATE_COUNTS, (rows, labels))
        per_row = words / rows * (all_rows / all_labels.clamp(min=1))
        parts: dict[str, Part] = {
            "lm_loss": (words / labels.clamp(min=1), labels),
            "sop_loss": (order, rows),
        }
        return per_row + order, rows, parts

    def combine_means(self, means: dict[str, float]) -> dict[str, float]:
        return means | {"loss": means["lm_loss"] + means["sop_loss"]}


class HiddenSpans(Objective):
    """Write the spans of text that were hidden."""

    name = "t5"
    auto_class = "AutoModelForSeq2SeqLM"

    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Loss:
        labels, inputs = batch["labels"], _get_inputs(batch)
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
            inputs["decoder_input_ids"] = shifted
        else:
            # It shifts them in its forward alone, and computes a loss that nobody needs.
            inputs["labels"] = labels
        return _get_mean(model(**inputs, use_cache=False).logits, labels), None, {}

    def count_added_tokens(self) -> int:
        return self.tokenizer.vocab_size  # the sentinels come last

    def get_token_ids(self) -> dict[str, int]:
        ids = super().get_token_ids()
        return ids | {"decoder_start_token_id": ids["pad_token_id"]}


def _get_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    others = ("labels", "next_sentence_label", UPDATE_COUNTS)
    return {key: value for key, value in batch.items() if key not in others}


def _count(labels: torch.Tensor) -> torch.Tensor:
    """Labels that the loss averages over; stays on the device."""
    return (labels != IGNORED_LABEL).sum()


def _get_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
    return flat.view_as(labels)


def _get_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL
    )


def _to_additive(hidden: torch.Tensor) -> torch.Tensor:
    """Megatron's mask (True = hidden) as a number to add: every attention of transformers knows."""
    mask = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return mask.masked_fill(hidden, torch.finfo(torch.float32).min)
