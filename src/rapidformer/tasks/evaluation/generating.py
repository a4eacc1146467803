"""Generate text batch by batch with transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ModelError
from rapidformer.tasks.base import Batch, PreparedData, Record

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How to generate; a None means the model's own setting."""

    max_new_tokens: int
    num_beams: int = 1
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_return_sequences: int = 1
    stop_strings: Sequence[str] | None = None

    @classmethod
    def read(cls, args: Settings, *, max_new_tokens: int) -> Generation:
        values: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(cls)}
        return cls(**{**values, "max_new_tokens": max_new_tokens})

    def build_config(self, model: Any, tokenizer: Any) -> GenerationConfig:
        """transformers' configuration; it takes what is None from the model's."""
        from transformers import GenerationConfig

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        config = model.generation_config
        if config.pad_token_id is None:
            values["pad_token_id"] = tokenizer.pad_token_id
        if config.eos_token_id is None:
            values["eos_token_id"] = tokenizer.eos_token_id
        return GenerationConfig(**{k: v for k, v in values.items() if v is not None})


def check_stop_strings(generation: Generation, tokenizer: Any) -> None:
    """Refuse stop strings with a tokenizer whose tokens transformers cannot match with texts."""
    if not generation.stop_strings:
        return
    from transformers import StopStringCriteria

    try:
        StopStringCriteria(tokenizer, list(generation.stop_strings))
    except ValueError:
        raise ModelError(
            f"--stop-strings: the tokenizer of {tokenizer.name_or_path} maps unknown words to one "
            "token, so a text cannot be found in its tokens. Leave them out."
        ) from None


def get_end_ids(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return set(ids if isinstance(ids, list) else [ids])


def generate(
    model: nn.Module,
    batch: Batch,
    tokenizer: Any,
    generation: Generation,
    streamer: Any = None,
    processors: Any = None,
) -> list[list[Any]]:
    """Per row of the batch, the ids of its answers: new tokens only, as arrays.

    ``processors`` change the scores of the next tokens, as transformers' ``logits_processor`` does.
    """
    options: dict[str, Any] = {} if streamer is None else {"streamer": streamer}
    if processors is not None:
        options["logits_processor"] = processors
    if generation.stop_strings:
        options["tokenizer"] = tokenizer
    ids = model.generate(  # type: ignore[operator]
        input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"),
        generation_config=generation.build_config(model, tokenizer), **options,
    )  # fmt: skip
    config: Any = model.config
    start = 0 if config.is_encoder_decoder else batch["input_ids"].shape[1]
    answers = list(ids[:, start:].cpu().numpy())
    count = generation.num_return_sequences
    return [answers[first : first + count] for first in range(0, len(answers), count)]


def generate_records(model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
    """A record for each row of a batch of prepared data."""
    extras = prepared.extras
    answers = generate(
        model, batch, prepared.processor, extras["generation"], extras.get("streamer")
    )
    return [{"generated": row} for row in answers]


def decode_answers(answers: Sequence[Any], tokenizer: Any, generation: Generation) -> list[str]:
    """The texts of a row's answers, each cut before the first stop string."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    return [cut_at_stops(text, generation.stop_strings or ()) for text in texts]


def cut_at_stops(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [text.find(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
