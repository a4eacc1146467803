"""Answers that stand in a context, long contexts cut into overlapping windows.

What a reader would get wrong: the rows of the prepared data are windows, the user's examples are
questions. The spans of all windows of a question compete; `extras["windows"][split]` says which
window belongs to which question and where its tokens stand in the context. A question without an
answer points at the first token (as SQuAD 2 does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.base import PreparedData, Record, Task, check_row_texts, get_mean_loss
from rapidformer.tasks.columns import ColumnRole, find_columns

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

QUESTION = ColumnRole(
    name="question",
    candidates=("question", "query"),
    holds="the question",
    setting="question_column",
)
CONTEXT = ColumnRole(
    name="context",
    candidates=("context", "passage", "paragraph", "document", "article", "text"),
    holds="the text that the answer stands in",
    setting="context_column",
)
ANSWERS = ColumnRole(
    name="answers",
    candidates=("answers", "answer"),
    holds='the answers: {"text": [...], "answer_start": [...]}, a text or a list of texts',
    setting="answers_column",
)
_WINDOW_COLUMNS = ("example", "starts", "ends")


class QuestionAnswering(Task):
    name = "question_answering"
    aliases = ("extractive_question_answering", "qa", "squad")
    description = "the answer to a question, as a piece of a given text (with or without answer)"
    columns = (QUESTION, CONTEXT, ANSWERS)
    auto_class = "AutoModelForQuestionAnswering"
    best_metric = "f1"
    greater_is_better = True
    evaluation_keys = frozenset({"context_mask"})

    def prepare(self, args: Any, splits: Mapping[str, Any] | None = None) -> PreparedData:
        from rapidformer.tasks.rows import get_column_names, get_splits
        from rapidformer.tasks.text import get_text_settings

        config, tokenizer, length = _load_parts(args)
        tables = get_splits(args, splits)
        available = get_column_names(next(iter(tables.values())))
        names = list(find_columns(self.columns, available, args).values())
        answers = {split: _read_answers(rows, split, names) for split, rows in tables.items()}
        labelled = {split: found is not None for split, found in answers.items()}
        features, windows = {}, {}
        for split, rows in tables.items():
            encoded = _encode(rows, split, names[:2], answers[split], tokenizer, length, args)
            features[split], windows[split] = _separate(encoded, split)
        can_abstain = any(not found for items in answers.values() for found in items or ())
        settings = {"rapidformer_can_abstain": can_abstain}
        return PreparedData(
            **features,
            collate=_build_collator(tokenizer),
            processor=tokenizer,
            model_settings=settings | get_text_settings(args, tokenizer, config),
            extras=_extras(tables, names, windows, labelled, can_abstain, args)
            | {"answers": answers},
        )

    def prepare_for_prediction(
        self, args: Any, rows: Sequence[dict[str, Any] | str]
    ) -> PreparedData:
        from rapidformer.tasks.rows import get_column_names

        config, tokenizer, length = _load_parts(args)
        if any(isinstance(row, str) for row in rows):
            raise DataError(
                "question_answering needs a question and a context: give a file with both columns."
            )
        table = [dict(row) for row in rows if isinstance(row, dict)]
        names = list(find_columns((QUESTION, CONTEXT), get_column_names(table), args).values())
        encoded = _encode(table, "test", names, None, tokenizer, length, args)
        features, windows = _separate(encoded, "test")
        can_abstain = bool(getattr(config, "rapidformer_can_abstain", False))
        return PreparedData(
            test=features,
            collate=_build_collator(tokenizer),
            processor=tokenizer,
            extras=_extras(
                {"test": table}, names, {"test": windows}, {"test": False}, can_abstain, args
            ),
        )

    def evaluate_step(
        self, model: nn.Module, batch: dict[str, torch.Tensor], prepared: PreparedData
    ) -> list[Record]:
        positions = {"start_positions", "end_positions"}
        inputs = {k: v for k, v in self.model_inputs(batch).items() if k not in positions}
        output = model(**inputs)
        records = _best_spans(
            output.start_logits.float(),
            output.end_logits.float(),
            batch["context_mask"],
            prepared.extras["n_best"],
        )
        if "start_positions" in batch:
            losses = _window_losses(output, batch)
            for record, loss in zip(records, losses, strict=True):
                record |= {"loss": loss, "count": 1}
        return records

    def compute_metrics(
        self, records: list[Record], prepared: PreparedData, split: str
    ) -> dict[str, float]:
        from rapidformer.tasks.metrics.squad import compute_squad

        if not records or not prepared.is_labelled(split):
            return {}
        found = [answer["answer"] for answer in self.predictions(records, prepared, split)]
        answers = prepared.extras["answers"][split]
        texts = [[text for text, _ in wanted] for wanted in answers]
        return {"loss": get_mean_loss(records)} | compute_squad(found, texts)

    def predictions(
        self, records: list[Record], prepared: PreparedData, split: str
    ) -> list[dict[str, Any]]:
        from rapidformer.tasks.rows import get_column, get_column_names

        extras = prepared.extras
        rows = extras["rows"][split]
        contexts = get_column(rows, extras["columns"][1])
        candidates = _join_windows(records, extras["windows"][split], len(contexts), extras)
        identities = get_column(rows, "id") if "id" in get_column_names(rows) else None
        result = []
        for index, question in enumerate(get_column(rows, extras["columns"][0])):
            row: dict[str, Any] = {} if identities is None else {"id": identities[index]}
            row["question"] = question
            row |= _choose(candidates[index], contexts[index], extras["can_abstain"])
            if prepared.is_labelled(split):
                row["expected"] = [text for text, _ in extras["answers"][split][index]]
            result.append(row)
        return result


def _load_parts(args: Any) -> tuple[Any, Any, int]:
    from rapidformer.models.build import load_config, load_tokenizer
    from rapidformer.tasks.text import check_is_fast, get_max_length

    config, tokenizer = load_config(args), load_tokenizer(args)
    check_is_fast(tokenizer, "question_answering")
    length = get_max_length(args, tokenizer, config)
    room = length - tokenizer.num_special_tokens_to_add(pair=True)
    if args.doc_stride >= room:
        raise ConfigurationError(
            f"--doc-stride {args.doc_stride} leaves no room in windows of {length} tokens "
            f"({room} without special tokens): use at most {room // 2}, or a larger --seq-length."
        )
    return config, tokenizer, length


def _build_collator(tokenizer: Any) -> Any:
    from rapidformer.tasks.text import build_text_collator

    return build_text_collator(tokenizer)


def _extras(
    tables: Mapping[str, Any],
    names: Sequence[str],
    windows: Mapping[str, Any],
    labelled: Mapping[str, bool],
    can_abstain: bool,
    args: Any,
) -> dict[str, Any]:
    return {
        "rows": tables,
        "columns": tuple(names[:2]),
        "windows": windows,
        "labelled": labelled,
        "can_abstain": can_abstain,
        "n_best": args.n_best,
        "max_answer_length": args.max_answer_length,
    }


# --- answers in the data -------------------------------------------------------------------------

Answer = tuple[str, int]


def _read_answers(rows: Any, split: str, names: Sequence[str]) -> list[list[Answer]] | None:
    """Per question its answers as (text, first character); None for a split without answers."""
    from rapidformer.tasks.rows import get_column, get_column_names

    _, context, column = names
    if column not in get_column_names(rows):
        if split != "test":
            raise DataError(f"{split} has no column {column}: all splits need the same columns.")
        return None
    contexts = check_row_texts(get_column(rows, context), context, split)
    return [
        _place_answers(value, text, f"{split}, row {number}", column)
        for number, (value, text) in enumerate(
            zip(get_column(rows, column), contexts, strict=True), start=1
        )
    ]


def _place_answers(value: Any, context: str, place: str, column: str) -> list[Answer]:
    answers = []
    for text, start in _as_pairs(value, place, column):
        if not text:
            continue
        if start is None or context[start : start + len(text)] != text:
            found = context.find(text)
            if found < 0:
                raise DataError(
                    f"{place}: the answer {text[:60]!r} does not stand in its context; an answer "
                    "must be copied from it letter by letter."
                )
            start = found
        answers.append((text, start))
    return answers


def _as_pairs(value: Any, place: str, column: str) -> list[tuple[str, int | None]]:
    """An answer column in any of its usual shapes."""
    if value is None:
        return []
    if isinstance(value, str):
        return [(value, None)]
    if isinstance(value, dict) and "text" in value:
        texts, starts = value["text"], value.get("answer_start")
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        starts = starts if starts else [None] * len(texts)
        return list(zip(texts, starts, strict=True))
    if isinstance(value, (list, tuple)):
        return [pair for item in value for pair in _as_pairs(item, place, column)]
    raise DataError(
        f"{place}: the column {column} holds {str(value)[:60]!r}; needed is "
        '{"text": [...], "answer_start": [...]}, a text or a list of texts.'
    )


# --- windows -------------------------------------------------------------------------------------


def _encode(
    rows: Any,
    split: str,
    names: Sequence[str],
    answers: list[list[Answer]] | None,
    tokenizer: Any,
    max_length: int,
    args: Any,
) -> Any:
    from rapidformer.tasks.rows import map_rows
    from rapidformer.tasks.text import get_tokenizer_key

    stride = args.doc_stride
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True)

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        questions = check_row_texts(columns[names[0]], names[0], split, indices[0])
        contexts = check_row_texts(columns[names[1]], names[1], split, indices[0])
        questions = _shorten(questions, tokenizer, room - stride - 1)
        encoded = tokenizer(
            questions,
            contexts,
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners = encoded.pop("overflow_to_sample_mapping")
        offsets = encoded.pop("offset_mapping")
        masks = [[int(s == 1) for s in encoded.sequence_ids(i)] for i in range(len(owners))]
        result = dict(encoded)
        if answers is not None:
            spans = [
                _find_span(answers[indices[owner]], offsets[i], masks[i])
                for i, owner in enumerate(owners)
            ]
            result["start_positions"] = [first for first, _ in spans]
            result["end_positions"] = [last for _, last in spans]
        if split != "train":
            result["context_mask"] = masks
            result["example"] = [indices[owner] for owner in owners]
            result["starts"] = [[first for first, _ in offset] for offset in offsets]
            result["ends"] = [[last for _, last in offset] for offset in offsets]
        return result

    # The answers follow from the rows, which the fingerprint covers already.
    key = ("windows", tuple(names), max_length, stride, get_tokenizer_key(tokenizer), split)
    workers = args.preprocessing_workers
    return map_rows(rows, encode, workers=workers, key=(*key, answers is None))


def _shorten(questions: list[str], tokenizer: Any, room: int) -> list[str]:
    """Cut questions that would leave the context less than a window's step."""
    offsets = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
    return [
        text[: spans[room - 1][1]] if len(spans) > room else text
        for text, spans in zip(questions, offsets["offset_mapping"], strict=True)
    ]


def _find_span(
    answers: Sequence[Answer], offsets: Sequence[tuple[int, int]], mask: Sequence[int]
) -> tuple[int, int]:
    """First and last token of the answer in this window; (0, 0) where it is not in it whole."""
    if not answers:
        return 0, 0
    text, start = answers[0]
    end = start + len(text)
    first = last = None
    for position, (begin, stop) in enumerate(offsets):
        if not mask[position] or begin == stop:
            continue
        if begin <= start < stop:
            first = position
        if begin < end <= stop:
            last = position
    return (first, last) if first is not None and last is not None else (0, 0)


def _separate(encoded: Any, split: str) -> tuple[Any, Any]:
    """What the model is fed, and what tells where a window comes from."""
    from rapidformer.tasks.rows import drop_columns, keep_columns

    if split == "train":
        return encoded, None
    return drop_columns(encoded, _WINDOW_COLUMNS), keep_columns(encoded, _WINDOW_COLUMNS)


# --- spans ---------------------------------------------------------------------------------------


def _best_spans(
    starts: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor, count: int
) -> list[Record]:
    """Per window the best first and last tokens inside the context, and the score of no answer."""
    import torch

    outside = mask == 0
    null = (starts[:, 0] + ends[:, 0]).cpu().numpy()
    width = min(count, starts.shape[1])
    top = []
    for logits in (starts, ends):
        values, places = logits.masked_fill(outside, -torch.inf).topk(width, dim=1)
        top.append((places.cpu().numpy(), values.cpu().numpy()))
    return [
        {
            "first": top[0][0][row],
            "first_score": top[0][1][row],
            "last": top[1][0][row],
            "last_score": top[1][1][row],
            "null": float(null[row]),
        }
        for row in range(len(null))
    ]


def _window_losses(output: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    from torch.nn import functional

    first = functional.cross_entropy(
        output.start_logits.float(), batch["start_positions"], reduction="none"
    )
    last = functional.cross_entropy(
        output.end_logits.float(), batch["end_positions"], reduction="none"
    )
    losses: list[float] = ((first + last) / 2).cpu().tolist()
    return losses


Candidate = tuple[float, int, int]


def _join_windows(
    records: Sequence[Record], windows: Any, questions: int, extras: Mapping[str, Any]
) -> list[tuple[list[Candidate], float]]:
    """Per question its best spans over all its windows (in characters), and the null score."""
    longest = extras["max_answer_length"]
    found: list[list[Candidate]] = [[] for _ in range(questions)]
    null = [float("inf")] * questions
    for record, window in zip(records, windows, strict=True):
        owner = window["example"]
        null[owner] = min(null[owner], record["null"])
        scores = record["first_score"][:, None] + record["last_score"][None, :]
        lengths = record["last"][None, :] - record["first"][:, None] + 1
        found[owner] += _valid_spans(record, scores, (lengths > 0) & (lengths <= longest), window)
    count = extras["n_best"]
    return [
        (sorted(spans, key=lambda span: -span[0])[:count], none)
        for spans, none in zip(found, null, strict=True)
    ]


def _valid_spans(
    record: Record, scores: np.ndarray, fits: np.ndarray, window: Mapping[str, Any]
) -> list[Candidate]:
    import numpy as np

    rows, columns = np.nonzero(fits & np.isfinite(scores))
    return [
        (
            float(scores[i, j]),
            window["starts"][record["first"][i]],
            window["ends"][record["last"][j]],
        )
        for i, j in zip(rows, columns, strict=True)
    ]


def _choose(
    candidates: tuple[list[Candidate], float], context: str, can_abstain: bool
) -> dict[str, Any]:
    import numpy as np

    spans, null = candidates
    scores = [score for score, _, _ in spans]
    options: list[tuple[float, int, int]] = list(spans)
    if can_abstain or not spans:
        options.append((null, 0, 0))
        scores.append(null)
    best = int(np.argmax(scores))
    shares = np.exp(np.array(scores) - max(scores))
    _, start, end = options[best]
    return {
        "answer": context[start:end],
        "start": start,
        "end": end,
        "score": round(float(shares[best] / shares.sum()), 6),
    }
