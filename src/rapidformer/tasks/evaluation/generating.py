"""Generate text batch by batch with transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rapidformer.config.task_sections import GenerationArguments
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.tasks.base import Batch, PreparedData, Record

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig


class Generation(GenerationArguments):
    """How to generate; a None means the model's own setting."""

    @classmethod
    def read(cls, args: GenerationArguments, *, max_new_tokens: int) -> Generation:
        values: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(cls)}
        return cls(**{**values, "max_new_tokens": max_new_tokens})

    def build_config(self, model: Any, tokenizer: Any) -> GenerationConfig:
        """transformers' configuration; it takes what is None from the model's."""
        from transformers import GenerationConfig

        names = {f.name for f in fields(self)} - {"stream", "system_prompt", "chat"}
        values = {name: getattr(self, name) for name in names}
        config = model.generation_config
        if config.pad_token_id is None:
            values["pad_token_id"] = tokenizer.pad_token_id
        if config.eos_token_id is None:
            values["eos_token_id"] = tokenizer.eos_token_id
        return GenerationConfig(**{k: v for k, v in values.items() if v is not None})


def divide_length(limit: int, args: GenerationArguments, usual: int) -> tuple[int, int]:
    """Tokens for the prompt and, ``usual`` unless the settings say, for the answer."""
    new_tokens = int(args.max_new_tokens or min(usual, max(1, limit // 2)))
    if new_tokens >= limit:
        raise ConfigurationError(
            f"--max-new-tokens {new_tokens} leaves no room for the prompt in {limit} tokens: use "
            f"at most {limit - 1}."
        )
    return limit - new_tokens, new_tokens


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
    inputs: Mapping[str, Any] | None = None,
) -> list[list[Any]]:
    """Per row of the batch, the ids of its answers: new tokens only, as arrays.

    ``processors`` change the scores of the next tokens, as transformers' ``logits_processor`` does.
    ``inputs`` are what the model reads besides token ids and their mask, such as pixels.
    """
    from rapidformer.accel.cuda_graph.decoding import replaying_tokens

    options: dict[str, Any] = {} if streamer is None else {"streamer": streamer}
    if processors is not None:
        options["logits_processor"] = processors
    if generation.stop_strings:
        options["tokenizer"] = tokenizer
    names = ("input_ids", "attention_mask")
    options |= {**(inputs or {}), **{name: batch.get(name) for name in names}}
    config = generation.build_config(model, tokenizer)
    with replaying_tokens(model, config):
        ids = model.generate(generation_config=config, **options)  # type: ignore[operator]
    own: Any = model.config
    start = 0 if own.is_encoder_decoder else batch["input_ids"].shape[1]
    answers = list(ids[:, start:].cpu().numpy())
    count = generation.num_return_sequences
    return [answers[first : first + count] for first in range(0, len(answers), count)]


def generate_records(
    model: nn.Module, batch: Batch, prepared: PreparedData, inputs: Mapping[str, Any] | None = None
) -> list[Record]:
    """A record for each row of a batch of prepared data."""
    extras = prepared.extras
    answers = generate(
        model, batch, prepared.processor, extras["generation"], extras.get("streamer"),
        inputs=inputs,
    )  # fmt: skip
    return [{"generated": row} for row in answers]


def describe_answers(record: Record, prepared: PreparedData, number: int) -> dict[str, Any]:
    """What was asked in a row, the model's answers and, if the row has one, the expected one."""
    extras = prepared.extras
    texts = decode_answers(record["generated"], prepared.processor, extras["generation"])
    if extras["is_answer"]:
        texts = [text.strip() for text in texts]
    wanted = extras["expected"][number]
    more = {} if wanted is None else {"expected": wanted}
    return {**extras["shown"][number], "generated": texts if texts[1:] else texts[0], **more}


def decode_answers(answers: Sequence[Any], tokenizer: Any, generation: Generation) -> list[str]:
    """The texts of a row's answers, each cut before the first stop string."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    return [cut_at_stops(text, generation.stop_strings or ()) for text in texts]


def cut_at_stops(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [text.find(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
