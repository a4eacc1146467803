"""Extract answers from a context; long contexts are cut into overlapping windows.

The rows of the prepared data are windows: all spans of a question compete, and
`extras["windows"][split]` maps each window to its question. No answer means the first token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import ConfigurationError
from rapidformer.tasks.base import Answers, Batch, PreparedData, Record, Tables, Task
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.rows import has_columns
from rapidformer.tasks.text.text import TextParts, check_is_fast, load_text_parts
from rapidformer.tasks.text.windows import (
    AnswerTally,
    choose_answer,
    compute_window_losses,
    encode_windows,
    find_best_spans,
    join_windows,
    lacks_an_answer,
    read_texts,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

QUESTION = ColumnRole("question", "question_column", "the question", ("question", "query"))
CONTEXT = ColumnRole(
    "context", "context_column", "the text that contains the answer",
    ("context", "passage", "paragraph", "document", "article", "text"),
)  # fmt: skip
ANSWERS = ColumnRole(
    "answers", "answers_column",
    'the answers: {"text": [...], "answer_start": [...]}, a string or a list of strings',
    ("answers", "answer"),
)  # fmt: skip

_PADDING_SIDE = "right"
"""Whatever the tokenizer says: positions of answers are counted from the first token."""


class QuestionAnswering(Task):
    name = "question_answering"
    description = "find the answer to a question in a given text, if it has one"
    notes = (
        "Long contexts are cut into windows that overlap by `--doc-stride` tokens. In the loss, "
        "only real tokens compete to be the first or last one of the answer. In transformers' own "
        "loss, padding competes too: the two are equal for batches without padding."
    )
    columns = (QUESTION, CONTEXT, ANSWERS)
    auto_class = "AutoModelForQuestionAnswering"
    streams = True
    answer_keys = frozenset({"answer", "start", "end", "score"})
    metrics = (
        "exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "no_answer_exact_match",
        "no_answer_f1", "loss",
    )  # fmt: skip
    answer_role = ANSWERS.name
    best_metric = "f1"
    tally_reads_rows = True
    greater_is_better = True

    needs_rows = "a question and a context"

    def load_parts(self, args: Settings) -> TextParts:
        parts = load_text_parts(args)
        tokenizer, length = parts.tokenizer, parts.length
        check_is_fast(tokenizer, "question_answering")
        room = length - tokenizer.num_special_tokens_to_add(pair=True)
        if args.doc_stride is not None and args.doc_stride >= room:
            raise ConfigurationError(
                f"--doc-stride {args.doc_stride} leaves no room in windows of {length} tokens "
                f"({room} without special tokens): use at most {room // 2}, or a larger "
                "--seq-length."
            )
        return parts

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        names = [columns[role.name] for role in self.columns]
        labelled = {split: has_columns(rows, split, [names[2]]) for split, rows in tables.items()}
        features, windows = {}, {}
        for split, rows in tables.items():
            used = names if labelled[split] else names[:2]
            features[split], windows[split] = encode_windows(rows, split, used, parts)
        with_answers = {split: rows for split, rows in tables.items() if labelled[split]}
        can_abstain = _can_abstain(parts.config, with_answers, names[2])
        extras = _get_extras(tables, names, windows, can_abstain, parts.args)
        extras |= {"labelled": labelled, "answers": names[2]}
        settings = {"rapidformer_can_abstain": can_abstain}
        return parts.prepare(features, extras, settings, side=_PADDING_SIDE)

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        names = [columns["question"], columns["context"]]
        features, windows = encode_windows(table, "test", names, parts)
        can_abstain = _can_abstain(parts.config, {}, "")
        extras = _get_extras({"test": table}, names, {"test": windows}, can_abstain, parts.args)
        return parts.prepare_input(features, extras, side=_PADDING_SIDE)

    def count_features(self, prepared: PreparedData) -> list[int]:
        counts = [0] * len(prepared.extras["rows"]["test"])
        for window in prepared.extras["windows"]["test"]:
            counts[window["example"]] += 1
        return counts

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss over the windows, the same however they are divided into micro-batches."""
        inputs = {key: value for key, value in batch.items() if key != "context_mask"}
        return compute_window_losses(model(**inputs), batch).mean()

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        ours = {"context_mask", "start_positions", "end_positions"}
        output = model(**{key: value for key, value in batch.items() if key not in ours})
        records = find_best_spans(output, batch["context_mask"], prepared.extras["n_best"])
        if "start_positions" in batch:
            losses = compute_window_losses(output, batch).tolist()
            for record, loss in zip(records, losses, strict=True):
                record |= {"loss": loss, "count": 1}
        return records

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return AnswerTally(prepared, split)

    def predictions(
        self, records: Sequence[Record], prepared: PreparedData, split: str, first: int = 0
    ) -> Answers:
        windows = prepared.extras["windows"][split]
        start = bisect_left(windows, first, key=lambda window: window["example"])
        pairs = ((record, windows[place]) for place, record in enumerate(records, start))
        groups = groupby(pairs, key=lambda pair: pair[1]["example"])
        return [
            self.answer_row({"windows": list(group)}, prepared, split, number)
            for number, group in groups
        ]

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        """The answer to a question, by its windows and their records."""
        extras, row = prepared.extras, prepared.extras["rows"][split][number]
        question, context = (row[name] for name in extras["columns"])
        answer = {**({"id": row["id"]} if "id" in row else {}), "question": question}
        answer |= choose_answer(
            join_windows(record["windows"], extras), context, extras["can_abstain"]
        )
        if prepared.is_labelled(split):
            place, column = f"{split}, row {number + 1}", extras["answers"]
            answer["expected"] = read_texts(row[column], place, column)
        return answer


def _can_abstain(config: Any, tables: Mapping[str, Any], column: str) -> bool:
    """Whether "no answer" is allowed: decided by the data in training, by the model afterwards."""
    learned = getattr(config, "rapidformer_can_abstain", None)
    if learned is not None and "train" not in tables:
        return bool(learned)
    return any(lacks_an_answer(rows, split, column) for split, rows in tables.items())


def _get_extras(
    tables: Mapping[str, Any],
    names: Sequence[str],
    windows: Any,
    can_abstain: bool,
    args: DataArguments,
) -> dict[str, Any]:
    return {
        "rows": tables, "columns": tuple(names[:2]), "windows": windows,
        "can_abstain": can_abstain, "n_best": args.n_best,
        "max_answer_length": args.max_answer_length,
    }  # fmt: skip
