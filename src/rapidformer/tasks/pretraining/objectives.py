"""Pre-training objectives: losses by term, computed from the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.data.pretraining import get_ltor_masks_and_position_ids
from rapidformer.data.update import MicroBatch
from rapidformer.objectives import Context, Objective, Term, Terms
from rapidformer.objectives.objective import Count

if TYPE_CHECKING:
    from rapidformer.config import Settings
    from rapidformer.data.tokenizers import Tokenizer


class PretrainingObjective(Objective):
    """One way to learn from text."""

    name: str
    """The kind of samples: gpt, bert or t5."""
    auto_class: str
    """Name of the Auto class in transformers that builds the model."""
    has_order_head = False
    """Whether the model also predicts if two segments were swapped."""

    def __init__(self, args: Settings, tokenizer: Tokenizer) -> None:
        self.args = args
        self.tokenizer = tokenizer

    def count_added_tokens(self) -> int:
        """The objective inserts only ids below this; a pretrained model must have them."""
        return 0

    def get_token_ids(self) -> dict[str, int]:
        """The special tokens of the configuration, for a model that is built from sizes alone."""
        names = {"pad_token_id": "pad", "bos_token_id": "bos", "eos_token_id": "eos"}
        has = self.tokenizer.has_special
        return {key: getattr(self.tokenizer, name) for key, name in names.items() if has(name)}


class NextToken(PretrainingObjective):
    """Predict each token from those before it."""

    name = "gpt"
    auto_class = "AutoModelForCausalLM"

    def compute(self, model: Any, batch: Mapping[str, Any], context: Context) -> Term | Terms:
        text = batch["text"]
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        hidden, positions, counted = self.get_masks(tokens)
        losses, extra = self.get_token_losses(model, tokens, labels, hidden, positions)
        if counted is None:
            words = Term(losses.mean(), len(text))  # every row has the same number of tokens
        else:
            # A micro-batch of only end tokens has no weight.
            words = Term.from_sum((losses * counted).sum(), counted.sum())
        if not extra:
            return words
        balance = torch.stack([part.float() for part in extra]).sum()
        return {"lm_loss": words, "moe_loss": Term(balance, words.count, model.moe_loss_coeff)}

    def get_masks(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The attention mask, position ids and loss mask; None means the default."""
        args = self.args
        if not (args.reset_attention_mask or args.reset_position_ids or args.eod_mask_loss):
            # Plain causal attention has a fast path and needs no explicit mask.
            return None, None, None
        hidden, counted, positions = get_ltor_masks_and_position_ids(
            tokens, self.tokenizer.eod,
            args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss,
        )  # fmt: skip
        return (
            hidden if args.reset_attention_mask else None,
            positions if args.reset_position_ids else None,
            counted if args.eod_mask_loss else None,
        )

    def get_token_losses(
        self, model: Any, tokens: Tensor, labels: Tensor, hidden: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The loss of each token, and further losses that the model returns."""
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if hidden is not None:
            # As an additive mask, which all attention kernels accept.
            mask = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
            inputs["attention_mask"] = mask.masked_fill(hidden, torch.finfo(torch.float32).min)
        if positions is not None:
            inputs["position_ids"] = positions
        return _compare(model(**inputs).logits, labels, "none").view_as(labels), []


class NextTokenInMegatronsForm(NextToken):
    """The same for ``GPTModel``, which is called the way Megatron's models are."""

    def get_token_losses(
        self, model: Any, tokens: Tensor, labels: Tensor, hidden: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        returned = model(tokens, positions, hidden, labels=labels)
        losses, *more = returned if isinstance(returned, tuple) else (returned,)
        return losses, more


class HiddenTokens(PretrainingObjective):
    """Predict the masked tokens."""

    name = "bert"
    auto_class = "AutoModelForMaskedLM"

    def count_added_tokens(self) -> int:
        return self.tokenizer.own_vocab_size  # random words

    def compute(self, model: Any, batch: Mapping[str, Any], context: Context) -> Term | Terms:
        logits, labels = model(**_get_inputs(batch)).logits, batch["labels"]
        return Term(_compare(logits, labels, "mean"))


class HiddenTokensAndOrder(HiddenTokens):
    """Predict the masked tokens, and whether two segments were swapped."""

    auto_class = "AutoModelForPreTraining"
    has_order_head = True

    def compute(self, model: Any, batch: Mapping[str, Any], context: Context) -> Term | Terms:
        outputs = model(**_get_inputs(batch))
        order_logits = getattr(outputs, "seq_relationship_logits", None)
        if order_logits is None:
            order_logits = outputs.sop_logits
        words = _compare(outputs.prediction_logits, batch["labels"], "none").sum()
        order = functional.cross_entropy(order_logits.float(), batch["next_sentence_label"])
        return {
            "lm_loss": Term.from_sum(words, (batch["labels"] != IGNORED_LABEL).sum()),
            "sop_loss": Term(order, len(order_logits)),
        }

    def count(self, micro_batch: MicroBatch) -> dict[str, Count]:
        # Rows differ in how many tokens are masked: some have none.
        return {"lm_loss": micro_batch.info.labels, "sop_loss": micro_batch.info.rows}


class HiddenSpans(PretrainingObjective):
    """Predict the masked spans of text."""

    name = "t5"
    auto_class = "AutoModelForSeq2SeqLM"

    def compute(self, model: Any, batch: Mapping[str, Any], context: Context) -> Term | Terms:
        labels, inputs = batch["labels"], _get_inputs(batch)
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
        else:
            # The model shifts the labels only in its forward, where it also computes a loss nobody
            # needs.
            inputs["labels"] = labels
        return Term(_compare(model(**inputs, use_cache=False).logits, labels, "mean"))

    def count_added_tokens(self) -> int:
        return self.tokenizer.vocab_size  # the sentinels come last

    def get_token_ids(self) -> dict[str, int]:
        ids = super().get_token_ids()
        return ids | {"decoder_start_token_id": ids["pad_token_id"]}


def _get_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    others = ("labels", "next_sentence_label")
    return {key: value for key, value in batch.items() if key not in others}


def _compare(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(
        flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction
    )
