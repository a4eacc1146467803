"""Rows as the model sees them, read from the collated batch: tokens, labels, what is trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from rapidformer.data.batch import IGNORED_LABEL

_LONGEST_CHARACTER = 4  # bytes, and so tokens, in UTF-8


class Prepared(Protocol):
    """What is needed to read a batch: a task's ``PreparedData``, for example."""

    @property
    def processor(self) -> Any:
        """The tokenizer, or what prepares images or recordings."""

    @property
    def extras(self) -> Mapping[str, Any]:
        """What the task knows of its rows: the names of labels, of texts, ..."""


class Tokenized(NamedTuple):
    """The tokenizer of data that nothing else is known about."""

    processor: Any
    extras: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """A token of a row."""

    number: int
    text: str
    """Its text in the row; that of a character in several tokens belongs to the last of them."""
    piece: str = ""
    """Its name in the tokenizer's vocabulary."""
    is_trained: bool = False
    is_special: bool = False
    note: str = ""
    """The label, if it is not the token itself: a tag, or the word behind a mask."""
    begins_example: bool = False
    """Whether another example of a packed row begins here."""
    count: int = 0
    """How many tokens these are, if they stand for one image."""


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """One sequence of tokens; an example may have several (source and target, choices)."""

    name: str = ""
    tokens: Sequence[ShownToken] = ()
    fact: str = ""
    """The label of the whole row."""


def iterate_examples(
    batch: Mapping[str, Any], count: int, *, most: int
) -> Iterator[dict[str, Any]]:
    """The first of a batch's ``count`` examples as batches of one, without the padding behind."""
    tensors = {n: v for n, v in batch.items() if isinstance(v, torch.Tensor) and v.dim()}
    for number in range(min(count, most)):
        example = {}
        for name, value in tensors.items():
            size = len(value) // count
            example[name] = value[number * size : (number + 1) * size]
        if "slots" in tensors:  # the texts of an example, which may have more than others
            places = example["slots"][example["slots"] >= 0]
            texts = len(tensors["input_ids"])
            example |= {n: v[places] for n, v in tensors.items() if len(v) == texts}
        yield _trim(example)


def _trim(example: dict[str, Any]) -> dict[str, Any]:
    mask = example.get("attention_mask")
    if mask is None or mask.dim() != 2 or len(mask) != 1 or not mask.any():
        return example
    size = int(mask[0].nonzero()[-1]) + 1
    return {n: v[:, :size] if v.shape == mask.shape else v for n, v in example.items()}


def to_json(rows: Sequence[ShownRow], most_tokens: int) -> list[dict[str, Any]]:
    """The rows for a file; a token is its text, its id, its marks and, if it has one, its note."""
    return [
        {
            "name": row.name,
            "fact": row.fact,
            "count": sum(token.count or 1 for token in row.tokens),
            "tokens": [
                [token.text, token.number, _mark(token), *([token.note] if token.note else [])]
                for token in islice(row.tokens, most_tokens)
            ],
        }
        for row in rows
    ]


def _mark(token: ShownToken) -> str:
    marks = {"t": token.is_trained, "s": token.is_special, "b": token.begins_example}
    return "".join(mark for mark, is_on in marks.items() if is_on)


def view_batch(batch: Mapping[str, Any], prepared: Prepared) -> list[ShownRow]:
    """The sequences of a batch of one row."""
    if "pixel_values" in batch and "input_ids" not in batch:
        shape = " x ".join(map(str, batch["pixel_values"].shape[1:]))
        return [ShownRow(name=f"an image of {shape}", fact=_describe(batch, prepared))]
    if heard := [name for name in ("input_values", "input_features") if name in batch]:
        return _view_audio(batch, heard[0], prepared)
    if "slots" in batch:
        return _view_texts(batch, prepared)
    if names := prepared.extras.get("row_names"):
        return [_view_answer_row(batch, prepared, *item) for item in enumerate(names)]
    ids = batch["input_ids"][0]
    if ids.dim() == 2:
        return [
            ShownRow(name=f"choice {number}", tokens=_read(choice, batch, prepared))
            for number, choice in enumerate(ids)
        ] + [ShownRow(fact=_describe(batch, prepared))]
    if "start_positions" in batch:
        return [_view_answer(batch, prepared)]
    labels = batch.get("labels")
    if labels is None or labels.dim() == 1 or labels.is_floating_point():
        fact = _describe(batch, prepared)
        return [ShownRow(tokens=_read(ids, batch, prepared), fact=fact)]
    # The labels of an encoder-decoder are a text of their own.
    if "target" in prepared.extras or labels.shape != batch["input_ids"].shape:
        target = _read(labels[0], {}, prepared, labels[0])
        return [
            ShownRow(name="source", tokens=_read(ids, batch, prepared)),
            ShownRow(name="target", tokens=target),
        ]
    tokens = _read(ids, batch, prepared, labels[0])
    return [ShownRow(tokens=_join_placeholders(tokens, prepared.extras.get("placeholders", ())))]


def _join_placeholders(tokens: list[ShownToken], placeholders: Collection[int]) -> list[ShownToken]:
    """The tokens, with those that stand for the same image as one."""
    joined: list[ShownToken] = []
    for token in tokens:
        if token.number not in placeholders:
            joined.append(token)
        elif joined and joined[-1].count and joined[-1].number == token.number:
            joined[-1] = replace(joined[-1], count=joined[-1].count + 1)
        else:
            joined.append(replace(token, count=1))
    return [
        replace(token, text=f"<{token.piece.strip('<|[]>')} x {token.count}>")
        if token.count > 1
        else token
        for token in joined
    ]


def count_tokens(rows: Sequence[ShownRow]) -> tuple[int, int]:
    """The tokens of an example, and how many of them are trained on."""
    tokens = [token for row in rows for token in row.tokens]
    return sum(token.count or 1 for token in tokens), sum(token.is_trained for token in tokens)


def _read(
    ids: torch.Tensor,
    batch: Mapping[str, Any],
    prepared: Prepared,
    labels: torch.Tensor | None = None,
) -> list[ShownToken]:
    tokenizer = prepared.processor
    values = [max(0, int(token)) for token in ids]
    marks = [IGNORED_LABEL] * len(values) if labels is None else labels.tolist()
    positions = [1] * len(values) if "position_ids" not in batch else batch["position_ids"][0]
    # A template may use tokens as special ones although they are not registered as such.
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    return [
        ShownToken(
            number=token,
            text=text,
            piece=str(tokenizer.convert_ids_to_tokens(token)),
            is_trained=label != IGNORED_LABEL,
            is_special=token in special,
            note=_note(label, token, prepared),
            begins_example=place > 0 and int(positions[place]) == 0,
        )
        for place, (token, text, label) in enumerate(
            zip(values, _decode_each(values, tokenizer), marks, strict=True)
        )
    ]


def _note(label: int, token: int, prepared: Prepared) -> str:
    """What the label says, if it is not simply the token."""
    if label == IGNORED_LABEL:
        return ""
    if "words" in prepared.extras:  # tags of words
        return str(prepared.extras["names"][label])
    return "" if label == token else prepared.processor.decode([label])


def _view_audio(batch: Mapping[str, Any], name: str, prepared: Prepared) -> list[ShownRow]:
    """What the model hears, in numbers, and what it learns to say."""
    shape, labels = " x ".join(map(str, batch[name].shape[1:])), batch.get("labels")
    heard = ShownRow(name=f"{name} of {shape}")
    if labels is None or labels.dim() == 1 or labels.is_floating_point():
        return [ShownRow(name=heard.name, fact=_describe(batch, prepared))]
    tokens = _read(labels[0], {}, prepared, labels[0])
    delimiter = getattr(prepared.processor, "word_delimiter_token", None)
    if delimiter is not None:  # a vocabulary of letters, which are not decoded one by one
        letters = (" " if token.piece == delimiter else token.piece for token in tokens)
        tokens = [replace(token, text=text) for token, text in zip(tokens, letters, strict=True)]
    return [heard, ShownRow(name="transcript", tokens=tokens)]


def _view_texts(batch: Mapping[str, Any], prepared: Prepared) -> list[ShownRow]:
    """A query and its documents, or documents together with their query."""
    names = prepared.extras["text_names"]
    rows = [
        ShownRow(
            name=names[min(number, len(names) - 1)].format(number + 2 - len(names)),
            tokens=_read(ids[mask > 0], {}, prepared),
        )
        for number, (ids, mask) in enumerate(
            zip(batch["input_ids"], batch["attention_mask"], strict=True)
        )
    ]
    scores = batch["scores"][0].tolist() if "scores" in batch else []
    shown = ", ".join(f"{score:.6g}" for score in scores)
    return [*rows, ShownRow(fact=f"score: {shown}")] if scores else rows


def _view_answer_row(
    batch: Mapping[str, Any], prepared: Prepared, place: int, name: str
) -> ShownRow:
    """One of the answers that are compared, without its padding."""
    size = int(batch["attention_mask"][place].sum())
    ids, labels = batch["input_ids"][place, :size], batch.get("labels")
    fact = "" if labels is not None else "scored at the last token"
    if "desirable" in batch:
        fact = "desirable" if batch["desirable"][place] else "undesirable"
    if place and "margin" in batch:
        fact = f"margin: {batch['margin'][0]:.6g}"
    shown = None if labels is None else labels[place, :size]
    return ShownRow(name=name, tokens=_read(ids, {}, prepared, shown), fact=fact)


def _view_answer(batch: Mapping[str, Any], prepared: Prepared) -> ShownRow:
    ids = batch["input_ids"][0]
    first, last = int(batch["start_positions"][0]), int(batch["end_positions"][0])
    if (first, last) == (0, 0):
        return ShownRow(tokens=_read(ids, batch, prepared), fact="no answer in this window")
    labels = ids.clone().fill_(IGNORED_LABEL)
    labels[first : last + 1] = ids[first : last + 1]
    tokens = _read(ids, batch, prepared, labels)
    answer = prepared.processor.decode(ids[first : last + 1])
    return ShownRow(tokens=tokens, fact=f"answer: {answer!r}")


def _describe(batch: Mapping[str, Any], prepared: Prepared) -> str:
    """The label of a whole row."""
    if "labels" not in batch:
        return "no label"
    value = batch["labels"][0]
    names = prepared.extras.get("names")
    if value.dim() == 1:
        chosen = [number for number, on in enumerate(value.tolist()) if on >= 0.5]
        return f"labels: {', '.join(str(names[n]) if names else str(n) for n in chosen) or 'none'}"
    if value.is_floating_point() or not names:
        return f"label: {value.item():.6g}"
    return f"label: {names[int(value)]} ({int(value)})"


def _decode_each(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """The text of each token, with the space before it, which may be lost without its neighbour."""
    before: list[int] = []
    parts: list[int] = []  # of a character that is not complete
    for token in ids:
        is_special = token in tokenizer.all_special_ids
        parts = [token] if is_special else [*parts, token]
        text = _decode(tokenizer, parts)
        if before and not is_special:
            alone, both = _decode(tokenizer, before), _decode(tokenizer, [*before, *parts])
            text = both[len(alone) :] if both.startswith(alone) else text
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(parts) < _LONGEST_CHARACTER:
            yield ""
            continue
        yield text
        before, parts = [token], []


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
