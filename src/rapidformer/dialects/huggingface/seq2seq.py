"""``Seq2SeqTrainer``: evaluation and prediction by generating text."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import Seq2SeqTrainer as Theirs
from transformers.trainer_utils import PredictionOutput

from rapidformer.dialects.huggingface.arguments import Seq2SeqTrainingArguments
from rapidformer.dialects.huggingface.interface import Inputs, Keys, Metrics, Prediction
from rapidformer.dialects.huggingface.trainer import Trainer
from rapidformer.errors import ConfigurationError

# What would tell the model its answer.
_ANSWERS = ("labels", "decoder_input_ids", "decoder_attention_mask")


class Seq2SeqTrainer(Trainer):
    """A ``Trainer`` whose predictions are generated tokens (``predict_with_generate``)."""

    args: Seq2SeqTrainingArguments

    def __init__(self, *positional: Any, **named: Any) -> None:
        self._generation: dict[str, Any] = {}
        super().__init__(*positional, **named)
        if not isinstance(self.args, Seq2SeqTrainingArguments):
            raise ConfigurationError(
                f"Seq2SeqTrainer takes Seq2SeqTrainingArguments, got {type(self.args).__name__}."
            )
        if self.args.generation_config is not None:
            try:
                config = Theirs.load_generation_config(self.args.generation_config)
            except ValueError as reason:  # refused now, and not by the first checkpoint
                problem = f"generation_config contradicts itself: {reason}"
                raise ConfigurationError(problem) from None
            cast(Any, self.model).generation_config = config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Keys = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> Metrics:
        """As ``Trainer.evaluate``; further names go to ``generate``."""
        self._generation = self._choose_generation(generation)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Keys = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """As ``Trainer.predict``; further names go to ``generate``."""
        self._generation = self._choose_generation(generation)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _choose_generation(self, options: dict[str, Any]) -> dict[str, Any]:
        chosen = {name: value for name, value in options.items() if value is not None}
        if not chosen.keys() & {"max_length", "max_new_tokens"}:
            chosen["max_length"] = self.args.generation_max_length
        chosen.setdefault("num_beams", self.args.generation_num_beams)
        return {name: value for name, value in chosen.items() if value is not None}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: Keys = None,
        **generation: Any,
    ) -> Prediction:
        """Loss, generated tokens and labels of one batch."""
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss, _, labels = super().prediction_step(model, dict(inputs), False, ignore_keys)
        prompt = {name: value for name, value in inputs.items() if name not in _ANSWERS}
        generate: Any = model.generate
        with torch.no_grad():
            tokens = generate(**prompt, **(generation or self._generation))
        return loss, self._pad_tensors_to_max_len(tokens), self._pad_tensors_to_max_len(labels)

    def _pad_tensors_to_max_len(self, tokens: Any, max_length: int | None = None) -> Any:
        """Rows as long as the model's own longest answer, filled up with the padding token."""
        config, processor = cast(Any, self.model).generation_config, self.processing_class
        longest, new = config.max_length or 20, config.max_new_tokens  # 20 is `generate`'s default
        width = max_length or max(longest, 0 if new is None else new + 1)
        of_processor = (getattr(processor, f"{role}_token_id", None) for role in ("pad", "eos"))
        ids = (*of_processor, cast(Any, self.model).config.pad_token_id)
        padding = next((token for token in ids if token is not None), None)
        if tokens is None or padding is None or tokens.shape[-1] >= width:
            return tokens
        return nn.functional.pad(tokens, (0, width - tokens.shape[-1]), value=padding)
