"""Turn preferences into token rows: a pair is one sample of two rows, which stay together.

Prompt and answer are tokenized as in chat data. A pair that cannot be learnt from carries the
reason, and is reported before it is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.log import get_logger, warn
from rapidformer.tasks.base import IGNORED_LABEL, Batch, check_row_texts
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import (
    CUT_OFF,
    ChatEncoder,
    EncodedRow,
    build_encoder,
    encode_conversations,
    encode_pairs,
    report_dropped,
)
from rapidformer.tasks.chat.turns import ChatRows, name_rows
from rapidformer.tasks.preference.columns import PreferenceColumns
from rapidformer.tasks.preference.examples import Example, read_examples, unpair
from rapidformer.tasks.rows.columns import find_column
from rapidformer.tasks.rows.rows import (
    drop_columns,
    get_column,
    get_column_names,
    map_rows,
    select_rows,
)
from rapidformer.tasks.text.text import TEXT, TextParts

if TYPE_CHECKING:
    import torch

_TIE = "both answers are the same (a tie)"
_TOO_LONG = "longer than --seq-length"
_TURNS = ChatColumns(messages="messages", tools="tools")
_TEXTS = ChatColumns(prompt="prompt", response="response", context="context", system="system")
_NOTES = ("left_out", "is_cut", "row")


@dataclass(frozen=True)
class PreferenceEncoder:
    """Everything that determines how rows become samples."""

    chat: ChatEncoder
    columns: PreferenceColumns
    is_paired: bool
    """Whether a sample is a pair; otherwise one answer with its label."""
    cuts: bool = True
    """Whether an answer that is too long is cut; otherwise its pair is left out."""
    stripped: int | None = None
    """A token that no row may end with."""

    def get_key(self) -> tuple[Any, ...]:
        """What the features depend on, in addition to the rows."""
        return ("preference", self.columns, self.is_paired, self.cuts, self.stripped,
                *self.chat.get_key())  # fmt: skip


def build_preference_encoder(
    tokenizer: Any, columns: PreferenceColumns, args: Settings, length: int, **options: Any
) -> PreferenceEncoder:
    """With the chat template for turns, or for texts with a prompt if the tokenizer has one."""
    if columns.has_turns or columns.has_prompt:
        chat = build_encoder(tokenizer, _TURNS if columns.has_turns else _TEXTS, args, length)
    else:  # the texts have a format of their own
        chat = ChatEncoder(tokenizer, _TEXTS, None, length, False)
    return PreferenceEncoder(chat, columns, **options)


def encode_preferences(
    rows: Any, split: str, encoder: PreferenceEncoder, workers: int | None
) -> Any | None:
    """Samples of pairs or answers; None for a test split without them. Reports what is left out."""
    names, available = encoder.columns, get_column_names(rows)
    needed = (names.chosen, names.rejected, names.response, names.label, names.prompt,
              names.messages)  # fmt: skip
    missing = [name for name in needed if name is not None and name not in available]
    if missing and split == "test":
        return None
    if missing:
        raise DataError(
            f"{split} has no column {' and no '.join(missing)}: all splits need the same columns."
        )

    def encode(cells: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        examples = list(read_examples(cells, indices, split, names))
        if not encoder.is_paired:
            examples = [single for example in examples for single in unpair(example)]
        return _to_samples(examples, _encode(examples, split, encoder), encoder)

    features = map_rows(rows, encode, workers=workers, key=(*encoder.get_key(), split))
    reasons: list[str] = get_column(features, "left_out")
    kept = [number for number, reason in enumerate(reasons) if not reason]
    report_dropped(reasons, split, get_column(features, "row"))
    if len(kept) < len(reasons):
        features = select_rows(features, kept)
    _report(features, split, encoder)
    return drop_columns(features, _NOTES)


def _encode(
    examples: Sequence[Example], split: str, encoder: PreferenceEncoder
) -> list[list[EncodedRow]]:
    """The token rows of each example's answers."""
    flat = [(example, place) for example in examples for place in range(len(example.answers))]
    numbers = [example.number for example, _ in flat]
    chat = encoder.chat
    if encoder.columns.has_turns:
        turns = [example.get_turns(place) for example, place in flat]
        cells = {"messages": turns, "tools": [example.tools for example, _ in flat]}
    else:
        cells = {
            "prompt": [example.prompt for example, _ in flat],
            "response": [example.answers[place] for example, place in flat],
            "context": [example.context for example, _ in flat],
            "system": [example.system for example, _ in flat],
        }
    chats = ChatRows(cells, numbers, split, chat.columns)
    if chat.template is None:
        encoded = encode_pairs(chats, chat)
    else:
        counts = [example.count_answers(place) for example, place in flat]
        given = [example.variables for example, _ in flat]
        encoded = encode_conversations(chats, chat, counts, given)
    rows = iter(encoded)
    return [[next(rows) for _ in example.answers] for example in examples]


def encode_answers(
    table: list[dict[str, Any]], columns: ChatColumns | None, args: Settings, parts: TextParts
) -> Any:
    """Texts, or prompts with their answers, as a reward model reads them."""
    column = "" if columns is not None else str(find_column(TEXT, get_column_names(table), args))
    chat = build_encoder(parts.tokenizer, columns or _TEXTS, args, parts.length)
    if columns is None:  # a text has a format of its own
        chat = ChatEncoder(parts.tokenizer, _TEXTS, None, parts.length, False)

    def encode(cells: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        if columns is None:
            texts = check_row_texts(cells[column], column, "input", indices[0])
            empty = [""] * len(texts)
            cells = {"prompt": empty, "response": texts, "context": empty, "system": empty}
        chats = ChatRows(cells, indices, "input", chat.columns)
        encode_rows = encode_pairs if chat.template is None else encode_conversations
        rows = encode_rows(chats, chat)
        for number, row in zip(indices, rows, strict=True):
            if row.left_out:
                raise DataError(f"input, row {number + 1}: {row.left_out}.")
        cut = [number + 1 for number, row in zip(indices, rows, strict=True) if row.is_cut]
        if cut:
            warn(
                "input, %s: longer than %d tokens: the end is cut off", name_rows(cut), chat.length
            )
        return {"input_ids": [_strip(row.ids, parts.tokenizer.pad_token_id) for row in rows]}

    return map_rows(table, encode, workers=None, key=())


def _to_samples(
    examples: Sequence[Example], encoded: Sequence[list[EncodedRow]], encoder: PreferenceEncoder
) -> dict[str, list[Any]]:
    samples = []
    for example, rows in zip(examples, encoded, strict=True):
        ids = [_strip(row.ids, encoder.stripped) for row in rows]
        labels = [_label(row)[: len(row_ids)] for row, row_ids in zip(rows, ids, strict=True)]
        is_cut = any(row.is_cut for row in rows)
        left_out = next((row.left_out for row in rows if row.left_out), "")
        if not left_out and is_cut and not encoder.cuts:
            left_out = _TOO_LONG
        elif not left_out and encoder.cuts and not all(map(_is_labelled, labels)):
            left_out = CUT_OFF
        elif not left_out and len(ids) == 2 and ids[0] == ids[1]:
            left_out = _TIE
        if left_out:  # in a batch of only empty lists, the column would have no type
            ids, labels = [[0]] * len(ids), [[IGNORED_LABEL]] * len(ids)
        sample: dict[str, Any] = {
            "input_ids": ids if encoder.is_paired else ids[0],
            "labels": labels if encoder.is_paired else labels[0],
            "length": max(map(len, ids)) * len(ids), "left_out": left_out, "is_cut": is_cut,
            "row": example.number,
        }  # fmt: skip
        if encoder.columns.margin is not None:
            sample["margin"] = example.margin
        if not encoder.is_paired:
            sample["desirable"] = int(bool(example.is_good))
        samples.append(sample)
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _strip(ids: list[int], token: int | None) -> list[int]:
    end = len(ids)
    while end > 1 and ids[end - 1] == token:
        end -= 1
    return ids[:end]


def _label(row: EncodedRow) -> list[int]:
    marked = zip(row.ids, row.is_answer, strict=True)
    labels = [token if mark else IGNORED_LABEL for token, mark in marked]
    labels[:1] = [IGNORED_LABEL]  # nothing comes before the first token to predict it from
    return labels


def _is_labelled(labels: Sequence[int]) -> bool:
    return any(label != IGNORED_LABEL for label in labels)


def _report(features: Any, split: str, encoder: PreferenceEncoder) -> None:
    """Say what is learnt from, and what was cut."""
    template = encoder.chat.template
    how = "no chat template" if template is None else "chat template"
    if not encoder.columns.has_prompt and not encoder.columns.has_turns:
        how = "the prompt is what both texts begin with"
    if encoder.is_paired:
        what = f"{len(features):,} pairs"
    else:
        good = sum(get_column(features, "desirable"))
        what = f"{good:,} desirable and {len(features) - good:,} undesirable answers"
    get_logger().info("pairs     %s: %s (%s)", split, what, how)
    cut = sum(get_column(features, "is_cut"))
    if cut:
        warn(
            "%s: answers of %d of %d samples are longer than %d tokens and were cut (--seq-length)",
            split, cut, len(features), encoder.chat.length,
        )  # fmt: skip


# ---- batches -----------------------------------------------------------------------------------


class PairCollator:
    """Row 2i of a batch is the better answer of pair i, row 2i + 1 the worse one."""

    def __init__(self, pad: Callable[[list[Any]], Batch], columns: Sequence[str]) -> None:
        self.pad = pad
        self.columns = tuple(columns)
        """The columns of tokens that the model or its loss reads."""

    def __call__(self, samples: list[Mapping[str, Any]]) -> Batch:
        import torch

        rows = [
            {name: sample[name][place] for name in self.columns}
            for sample in samples
            for place in range(2)
        ]
        batch = self.pad(rows)
        for name in ("margin", "reference_logps"):  # one number for each row
            if name in samples[0]:
                values = [sample[name] for sample in samples]
                table = torch.tensor(values, dtype=torch.float32).view(len(samples), -1)
                batch[name] = table.expand(-1, 2).flatten()
        return batch


class AnswerCollator:
    """One answer for each row, ``desirable`` or not, and perhaps one that belongs to another."""

    def __init__(self, pad: Callable[[list[Any]], Batch]) -> None:
        self.pad = pad

    def __call__(self, samples: list[Mapping[str, Any]]) -> Batch:
        import torch

        batch = self._pad(samples, "")
        batch["desirable"] = torch.tensor([sample["desirable"] for sample in samples])
        if "reference_logps" in samples[0]:
            values = [sample["reference_logps"] for sample in samples]
            batch["reference_logps"] = torch.tensor(values, dtype=torch.float32)
        if "other_input_ids" in samples[0]:
            others = self._pad(samples, "other_")
            batch |= {f"other_{name}": value for name, value in others.items()}
        return batch

    def _pad(self, samples: list[Mapping[str, Any]], prefix: str) -> dict[str, torch.Tensor]:
        names = ("input_ids", "labels")
        return dict(self.pad([{name: row[prefix + name] for name in names} for row in samples]))


class RotatedRows:
    """Rows of which each also has its prompt with the answer of the row before it."""

    def __init__(self, rows: Any, length: int) -> None:
        self._rows, self._length = rows, length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row, other = dict(self._rows[number]), self._rows[number - 1]
        start, from_ = _find_answer(row["labels"]), _find_answer(other["labels"])
        ids = [*row["input_ids"][:start], *other["input_ids"][from_:]]
        labels = [*[IGNORED_LABEL] * start, *other["labels"][from_:]]
        row["other_input_ids"], row["other_labels"] = ids[: self._length], labels[: self._length]
        return row


def _find_answer(labels: Sequence[int]) -> int:
    """Where the answer begins."""
    return next(place for place, label in enumerate(labels) if label != IGNORED_LABEL)
