"""``Seq2SeqTrainingArguments``: the arguments for models that write their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer.dialects.huggingface.arguments import TrainingArguments
from rapidformer.dialects.huggingface.former_names import takes_former_names


@takes_former_names
@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """``TrainingArguments`` and how to generate in evaluation."""

    sortish_sampler: bool = False
    """Batches of similar length, as ``train_sampling_strategy="group_by_length"`` makes them."""
    predict_with_generate: bool = False
    """Whether evaluation generates text instead of looking at logits."""
    generation_max_length: int | None = None
    """Longest generated text in tokens (default: the model's own)."""
    generation_num_beams: int | None = None
    """Beams of the search (default: the model's own)."""
    generation_config: Any = None
    """A ``GenerationConfig``, a folder or a name on the Hub."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler and self.train_sampling_strategy == "random":
            self.train_sampling_strategy = "group_by_length"
