"""Turn conversations into token rows with labels only on the answers.

A row with nothing to train on carries the reason, and is reported before it is removed. Without a
chat template, prompt and answer are tokenized separately, so that no token spans both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError, ModelError
from rapidformer.log import get_logger, warn, warn_once
from rapidformer.tasks.base import IGNORED_LABEL
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.template import ChatTemplate, Span, choose_template
from rapidformer.tasks.chat.turns import BadRowError, ChatRows, Message, find_last_answer, name_rows
from rapidformer.tasks.rows.rows import (
    as_table,
    drop_columns,
    filter_stream,
    get_column,
    has_columns,
    is_row_stream,
    map_rows,
    name_split,
    select_rows,
)
from rapidformer.tasks.text.text import get_frame, get_tokenizer_key, tokenize

NO_ANSWER = "no answer, or an empty one"
_NOWHERE: Span = (2**62, 2**62)
CUT_OFF = "no part of the answer fits within --seq-length"


@dataclass(frozen=True)
class ChatEncoder:
    """Everything that determines how a row becomes tokens."""

    tokenizer: Any
    columns: ChatColumns
    template: ChatTemplate | None
    """None: prompts and answers are joined without a template."""
    length: int
    trains_on_prompts: bool

    def get_stop_id(self) -> int | None:
        return None if self.template is None else self.template.get_stop_id()

    def get_end_id(self) -> int | None:
        """The token that the model must learn in order to stop."""
        end: int | None = self.tokenizer.eos_token_id
        return end if self.template is None else self.template.get_stop_id()

    def get_key(self) -> tuple[Any, ...]:
        """What the features depend on, in addition to the rows."""
        template = self.template and (self.template.text, json.dumps(self.template.variables))
        return (
            "chat", self.columns, template, self.length, self.trains_on_prompts,
            get_tokenizer_key(self.tokenizer),
        )  # fmt: skip


def build_encoder(
    tokenizer: Any, columns: ChatColumns, args: DataArguments, length: int
) -> ChatEncoder:
    """Choose the template and check that the tokenizer can do what it needs."""
    variables = json.loads(args.chat_template_kwargs or "{}")
    template = choose_template(
        tokenizer, args.chat_template, variables, needs_one=not columns.is_pair
    )
    return ChatEncoder(tokenizer, columns, template, length, args.train_on_prompts)


class EncodedRow(NamedTuple):
    """The tokens of a row, cut to the maximum length, and which of them belong to an answer."""

    ids: list[int]
    is_answer: list[bool]
    is_cut: bool = False
    left_out: str = ""
    """Why the row cannot be trained on."""

    def get_labels(self) -> list[int]:
        """The tokens of the answers, but nothing to predict the first token of a row from."""
        marked = zip(self.ids, self.is_answer, strict=True)
        labels = [token if mark else IGNORED_LABEL for token, mark in marked]
        labels[:1] = [IGNORED_LABEL]
        return labels


class Kept(NamedTuple):
    """What is left of a split."""

    features: Any
    """None: a test split without answers."""
    dropped: int = 0
    """Rows of which nothing is left."""


def join_splits(kept: Mapping[str, Kept]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The features of the splits, and which of them have answers and lost how many rows."""
    features = {split: part.features for split, part in kept.items()}
    labelled = {split: rows is not None for split, rows in features.items()}
    dropped = {split: part.dropped for split, part in kept.items()}
    return features, {"labelled": labelled, "dropped": dropped}


def encode_chats(rows: Any, split: str, encoder: ChatEncoder, workers: int | None) -> Kept:
    """Features with labels. Reports dropped rows."""
    if encoder.template is None and encoder.tokenizer.eos_token_id is None:
        warn_once("the tokenizer has no end-of-text token: the model will not learn to stop.")
    if encoder.template is not None and not encoder.template.closes_answers:
        warn_once(
            "the chat template puts nothing after an answer: the model will not learn to stop."
        )
    if not has_columns(rows, split, encoder.columns.get_names()):
        return Kept(None)
    end = encoder.get_end_id()

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        chats = ChatRows(columns, indices, split, encoder.columns)
        encode_rows = encode_pairs if encoder.template is None else encode_conversations
        return _to_features(encode_rows(chats, encoder), end)

    features = map_rows(rows, encode, workers=workers, key=(*encoder.get_key(), split))
    if split == "test" and set(get_column(features, "left_out")) == {NO_ANSWER}:
        return Kept(None)
    kept = drop_left_out(features, split)
    report_trained(as_table(kept.features), name_split(split, kept.features), encoder)
    notes = ["left_out", "trained", "is_cut", "ends"]
    return kept._replace(features=drop_columns(kept.features, notes))


def encode_conversations(
    chats: ChatRows,
    encoder: ChatEncoder,
    num_answers: Sequence[int] | None = None,
    variables: Sequence[Mapping[str, Any] | None] | None = None,
) -> list[EncodedRow]:
    """Tokens, with marks on all answers, or on the last ``num_answers`` of each conversation.

    ``variables`` are those of the template for each conversation.
    """
    assert encoder.template is not None
    rendered: list[tuple[str, list[Span]] | str] = []
    counts = num_answers or [0] * len(chats.indices)
    values = variables or [None] * len(chats.indices)
    rows = zip(chats.indices, chats.read_turns(), chats.read_tools(), counts, values, strict=True)
    for number, messages, tools, count, given in rows:
        template = encoder.template.with_tools(tools).with_variables(given)
        try:
            text = render_row(messages, template, encoder.trains_on_prompts)
            rendered.append(text if isinstance(text, str) else (text[0], text[1][-count:]))
        except BadRowError as reason:
            rendered.append(f"it {reason}")
        except ModelError as reason:
            raise ModelError(f"{chats.split}, row {number + 1}: {reason}") from None
    texts = [item[0] for item in rendered if not isinstance(item, str)]
    encoded = iter(tokenize_with_places(texts, encoder.tokenizer))
    result, size = [], encoder.length
    for item in rendered:
        if isinstance(item, str):
            result.append(EncodedRow([], [], left_out=item))
            continue
        ids, places = next(encoded)
        result.append(
            EncodedRow(ids[:size], mark_tokens(places[:size], item[1]), is_cut=len(ids) > size)
        )
    return result


def render_row(
    messages: list[Message], template: ChatTemplate, trains_on_prompts: bool
) -> tuple[str, list[Span]] | str:
    """The text and its answer spans, or why there is nothing to train on."""
    if trains_on_prompts:
        if not messages:
            return NO_ANSWER
        text = template.render(messages)
        return text, [(0, len(text))]
    end = find_last_answer(messages)
    # An opening turn by the assistant answers nothing.
    return template.render_with_answers(messages[:end]) if end > 1 else NO_ANSWER


def encode_pairs(chats: ChatRows, encoder: ChatEncoder) -> list[EncodedRow]:
    """Prompt and answer without a template, tokenized apart: no token spans both."""
    tokenizer, size = encoder.tokenizer, encoder.length
    answers = chats.read_texts(chats.names.response)
    prompt_ids = tokenize_prompts(chats.read_prompts(), tokenizer)
    answer_ids = tokenize(answers, tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    result = []
    for before, answer, text in zip(prompt_ids, answer_ids, answers, strict=True):
        if not text.strip():
            result.append(EncodedRow([], [], left_out=NO_ANSWER))
            continue
        ids = [*before, *answer, *end]
        marks = [encoder.trains_on_prompts] * len(before) + [True] * (len(ids) - len(before))
        result.append(EncodedRow(ids[:size], marks[:size], is_cut=len(ids) > size))
    return result


def _to_features(encoded: list[EncodedRow], end: int | None) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    for row in encoded:
        labels = row.get_labels()
        trained = len(labels) - labels.count(IGNORED_LABEL)
        left_out = row.left_out
        if not left_out and not trained:
            left_out = CUT_OFF if row.is_cut else NO_ANSWER
        rows.append({
            # In a batch of only empty lists, the column would have no type.
            "input_ids": [0] if left_out else row.ids,
            "labels": [IGNORED_LABEL] if left_out else labels,
            "length": len(row.ids), "trained": trained, "is_cut": row.is_cut,
            "ends": end in labels, "left_out": left_out,
        })  # fmt: skip
    return {name: [row[name] for row in rows] for name in rows[0]}


def drop_left_out(features: Any, split: str, numbers: Sequence[int] | None = None) -> Kept:
    """Drop the examples with a reason in ``left_out`` and report them; an error if none are left.

    ``numbers`` are those of the examples' rows, if they are not one for each.
    """
    reasons: list[str] = get_column(features, "left_out")
    split = name_split(split, features)
    by_reason: dict[str, list[int]] = defaultdict(list)
    numbers = numbers or range(len(reasons))
    for number, reason in zip(numbers, reasons, strict=True):
        if reason:
            by_reason[reason].append(number + 1)
    shown = {reason: f"{reason} ({name_rows(rows)})" for reason, rows in by_reason.items()}
    if all(reasons):
        raise DataError(f"{split}: there is nothing to train on: {'; '.join(shown.values())}.")
    for reason, rows in by_reason.items():
        warn("%s: dropped %d of %d examples: %s", split, len(rows), len(reasons), shown[reason])
    if is_row_stream(features):
        return Kept(filter_stream(features, lambda row: not row["left_out"]))
    if not by_reason:
        return Kept(features)
    kept = [place for place, reason in enumerate(reasons) if not reason]
    dropped = len({*numbers}) - len({numbers[place] for place in kept})
    return Kept(select_rows(features, kept), dropped)


def report_trained(features: Any, split: str, encoder: ChatEncoder) -> None:
    """Report what is trained on; warn of labels that teach no answers, or not to stop."""
    names = ("length", "trained", "is_cut", "ends")
    tokens, trained, cut, ended = (sum(get_column(features, name)) for name in names)
    what = "prompts with answers" if encoder.columns.is_pair else "conversations"
    which = "everything" if encoder.trains_on_prompts else "the answers"
    if encoder.template is None:
        how = "no chat template"
    else:
        end = encoder.template.end_of_turn
        how = f"chat template, answers end in {end!r}" if end else "chat template"
    get_logger().info(
        "chat      %s: %s %s (%s), %s tokens, of which %.1f%% are trained on (%s)",
        split, f"{len(features):,}", what, how, f"{tokens:,}", 100 * trained / tokens, which,
    )  # fmt: skip
    if cut:
        warn(
            "%s: %d of %d examples are longer than %d tokens and were cut (--seq-length)",
            split, cut, len(features), encoder.length,
        )  # fmt: skip
    # The first token of a row is never a label.
    if not encoder.trains_on_prompts and trained == tokens - len(features):
        warn(
            "%s: every token is trained on, the prompts too, although only answers should be: "
            "check the {%% generation %%} marks of the chat template, or state that this is meant "
            "with --train-on-prompts. `rapidformer data show` shows the labels.",
            split,
        )
    stop = encoder.get_end_id()
    if stop is not None and not ended:
        reason = (
            f"all {cut} examples are cut before it: use a longer --seq-length"
            if cut == len(features)
            else "the chat template does not close its answers with it"
        )
        warn(
            "%s: the token that ends an answer, %r, is never trained on, so the model will not "
            "learn to stop; %s. `rapidformer data show` shows the labels.",
            split, encoder.tokenizer.convert_ids_to_tokens(stop), reason,
        )  # fmt: skip


def tokenize_prompts(prompts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids, starting with the beginning-of-text token if the tokenizer adds one."""
    before, _ = get_frame(tokenizer)
    start = before if before == [tokenizer.bos_token_id] else []
    return [[*start, *ids] for ids in tokenize(prompts, tokenizer)]


def tokenize_with_places(
    texts: list[str], tokenizer: Any
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Tokens, and the characters that each one covers."""
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def mark_tokens(places: list[tuple[int, int]], spans: list[Span]) -> list[bool]:
    """Which tokens overlap a span; tokens and spans are in order."""
    flat = np.fromiter(chain.from_iterable(places), dtype=np.int64, count=2 * len(places))
    starts, ends = flat[::2], flat[1::2]
    borders = np.asarray([*spans, _NOWHERE], dtype=np.int64)
    # A token can only overlap the first span that ends after the token's start.
    near = np.searchsorted(borders[:, 1], starts, side="right")
    # A token may cover no characters; treat it as if it covered one.
    return (np.maximum(ends, starts + 1) > borders[near, 0]).tolist()
