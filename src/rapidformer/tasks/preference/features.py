"""Turn preferences into token rows: a pair is one sample of two rows, which stay together.

Prompt and answer are tokenized as in chat data. A pair that cannot be learnt from carries the
reason, and is reported before it is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError
from rapidformer.log import get_logger, warn
from rapidformer.tasks.base import IGNORED_LABEL, Batch, check_row_texts
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import (
    CUT_OFF,
    ChatEncoder,
    EncodedRow,
    Kept,
    build_encoder,
    drop_left_out,
    encode_conversations,
    encode_pairs,
    join_splits,
)
from rapidformer.tasks.chat.turns import ChatRows, name_rows
from rapidformer.tasks.preference.examples import Example, PreferenceColumns, read_examples
from rapidformer.tasks.preference.losses import LossSettings
from rapidformer.tasks.rows.rows import (
    as_table,
    drop_columns,
    get_column,
    has_columns,
    map_rows,
    name_split,
)
from rapidformer.tasks.text.text import TextParts

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


def encode_tables(
    parts: TextParts, tables: Mapping[str, Any], columns: PreferenceColumns, *, is_paired: bool,
    **options: Any,
) -> tuple[dict[str, Any], PreferenceEncoder, dict[str, Any]]:  # fmt: skip
    """The splits (None: a test split without answers), how they were encoded, and facts about them:
    which have answers, and how many rows were dropped."""
    args = parts.args
    chat = _build_plain_encoder(parts)
    if columns.has_turns or columns.has_prompt:
        kind = _TURNS if columns.has_turns else _TEXTS
        chat = build_encoder(parts.tokenizer, kind, args, parts.length)
    encoder = PreferenceEncoder(chat, columns, is_paired, **options)
    workers = args.preprocessing_workers
    kept = {split: _encode_split(rows, split, encoder, workers) for split, rows in tables.items()}
    features, facts = join_splits(kept)
    facts["row_names"] = ("chosen", "rejected") if is_paired else ("answer",)
    return features, encoder, facts


def _build_plain_encoder(parts: TextParts) -> ChatEncoder:
    """For texts that have a format of their own."""
    return ChatEncoder(parts.tokenizer, _TEXTS, None, parts.length, False)


def _encode_split(rows: Any, split: str, encoder: PreferenceEncoder, workers: int | None) -> Kept:
    """Samples of pairs or answers. Reports what is left out."""
    names = encoder.columns
    if not has_columns(rows, split, names.get_needed()):
        return Kept(None)

    def encode(cells: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        examples = list(read_examples(cells, indices, split, names))
        return _to_samples(examples, _encode(examples, split, encoder), encoder)

    features = map_rows(rows, encode, workers=workers, key=(*encoder.get_key(), split))
    kept = drop_left_out(features, split, get_column(features, "row"))
    _report(as_table(kept.features), name_split(split, kept.features), encoder)
    return kept._replace(features=drop_columns(kept.features, _NOTES))


def _encode(
    examples: Sequence[Example], split: str, encoder: PreferenceEncoder
) -> list[list[EncodedRow]]:
    """The token rows of each example's answers."""
    chat = encoder.chat
    answers = [(example, place) for example in examples for place in range(len(example.answers))]
    cells: dict[str, list[Any]]
    if encoder.columns.has_turns:
        cells = {
            "messages": [example.get_turns(place) for example, place in answers],
            "tools": [example.tools for example, _ in answers],
        }
    else:
        cells = {"response": [example.answers[place] for example, place in answers]}
        for name in ("prompt", "context", "system"):
            cells[name] = [getattr(example, name) for example, _ in answers]
    chats = ChatRows(cells, [example.number for example, _ in answers], split, chat.columns)
    if chat.template is None:
        rows = iter(encode_pairs(chats, chat))
    else:
        counts = [example.count_answers(place) for example, place in answers]
        variables = [example.variables for example, _ in answers]
        rows = iter(encode_conversations(chats, chat, counts, variables))
    return [[next(rows) for _ in example.answers] for example in examples]


def encode_answers(
    table: list[dict[str, Any]], columns: ChatColumns | str, parts: TextParts
) -> Any:
    """Texts, or prompts with their answers, as a reward model reads them."""
    if isinstance(columns, str):
        chat = _build_plain_encoder(parts)
        texts = check_row_texts([row.get(columns) for row in table], columns, "input")
        rest = {"prompt": "", "context": "", "system": ""}
        table = [{"response": text, **rest} for text in texts]
    else:
        chat = build_encoder(parts.tokenizer, columns, parts.args, parts.length)

    def encode(cells: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        chats = ChatRows(cells, indices, "input", chat.columns)
        encode_rows = encode_pairs if chat.template is None else encode_conversations
        rows = encode_rows(chats, chat)
        for number, row in zip(indices, rows, strict=True):
            if row.left_out:
                raise DataError(f"input, row {number + 1}: {row.left_out}.")
        if cut := [n + 1 for n, row in zip(indices, rows, strict=True) if row.is_cut]:
            warn(
                "input, %s: longer than %d tokens: the end is cut off", name_rows(cut), chat.length
            )
        return {"input_ids": [_strip(row.ids, parts.tokenizer.pad_token_id) for row in rows]}

    return map_rows(table, encode, workers=None, key=())


def _to_samples(
    examples: Sequence[Example], encoded: Sequence[list[EncodedRow]], encoder: PreferenceEncoder
) -> dict[str, list[Any]]:
    samples: list[dict[str, Any]] = []
    for example, rows in zip(examples, encoded, strict=True):
        ids = [_strip(row.ids, encoder.stripped) for row in rows]
        is_tie = len(ids) == 2 and ids[0] == ids[1]
        groups = [rows] if encoder.is_paired else [[row] for row in rows]
        for place, group in enumerate(groups):
            sample = {**_to_sample(group, encoder, is_tie=is_tie), "row": example.number}
            if encoder.columns.margin is not None:
                sample["margin"] = example.margin
            if not encoder.is_paired:
                sample["desirable"] = int(
                    place == 0 if example.is_good is None else example.is_good
                )
            samples.append(sample)
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _to_sample(
    rows: Sequence[EncodedRow], encoder: PreferenceEncoder, *, is_tie: bool
) -> dict[str, Any]:
    """A pair, or a single answer."""
    ids = [_strip(row.ids, encoder.stripped) for row in rows]
    labels = [row.get_labels()[: len(kept)] for row, kept in zip(rows, ids, strict=True)]
    is_cut = any(row.is_cut for row in rows)
    reasons = {
        **{row.left_out: True for row in rows},
        _TOO_LONG: is_cut and not encoder.cuts,
        CUT_OFF: encoder.cuts and any(set(row) <= {IGNORED_LABEL} for row in labels),
        _TIE: is_tie,
    }
    left_out = next((reason for reason, holds in reasons.items() if reason and holds), "")
    if left_out:  # in a batch of only empty lists, the column would have no type
        ids, labels = [[0]] * len(ids), [[IGNORED_LABEL]] * len(ids)
    return {
        "input_ids": ids if encoder.is_paired else ids[0],
        "labels": labels if encoder.is_paired else labels[0],
        "length": max(map(len, ids)) * len(ids), "left_out": left_out, "is_cut": is_cut,
    }  # fmt: skip


def _strip(ids: list[int], token: int | None) -> list[int]:
    end = len(ids)
    while end > 1 and ids[end - 1] == token:
        end -= 1
    return ids[:end]


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


def check_balance(features: Any, settings: LossSettings) -> None:
    """KTO wants good answers to weigh as much as bad ones in all, up to a third more."""
    good = sum(get_column(features, "desirable"))
    bad = len(as_table(features)) - good
    wanted = settings.undesirable_weight * bad / max(good, 1)
    if good and wanted and not 0.99 < settings.desirable_weight / wanted < 1.34:
        warn(
            "train: %d desirable and %d undesirable answers weigh %.3g to 1 in all, and KTO wants "
            "1 to 1.33: use a --desirable-weight from %.3g to %.3g.",
            good, bad, settings.desirable_weight / wanted, wanted, wanted * 4 / 3,
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
        # First, a tensor with one value for each pair: batches are counted by it.
        batch = {"pair": torch.arange(len(samples)), **self.pad(rows)}
        if "margin" in samples[0]:
            batch["margin"] = torch.tensor([sample["margin"] for sample in samples])
        return batch


class AnswerCollator:
    """One answer for each row, ``desirable`` or not, and perhaps one that belongs to another."""

    def __init__(self, pad: Callable[[list[Any]], Batch]) -> None:
        self.pad = pad

    def __call__(self, samples: list[Mapping[str, Any]]) -> Batch:
        import torch

        batch = self._pad(samples, "")
        batch["desirable"] = torch.tensor([sample["desirable"] for sample in samples])
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
