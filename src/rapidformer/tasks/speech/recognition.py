"""Recognise speech: with a decoder that writes (Whisper), or a CTC head that spells (wav2vec 2.0).

What is longer than a Whisper hears at once is left out of training and evaluation, where its
transcript could not be cut with it; predictions go through it window by window.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from rapidformer.compat.patches import quieten
from rapidformer.config import Settings
from rapidformer.config.objective_sections import SpeechArguments
from rapidformer.config.task_sections import GenerationArguments
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.base import Answers, Batch, PreparedData, Record, Tables, check_row_texts
from rapidformer.tasks.evaluation.generating import Generation
from rapidformer.tasks.metrics.generation import TranscriptTally
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.rows import Columns, get_column, has_columns, is_row_stream
from rapidformer.tasks.speech.audio import AUDIO
from rapidformer.tasks.speech.rows import (
    AudioParts,
    AudioRows,
    AudioTask,
    measure_rows,
    prepare_rows,
)
from rapidformer.tasks.speech.transcripts import Transcripts, get_speech_task, load_transcripts

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.objectives import Objective

TEXT = ColumnRole(
    "text", "text_column", "what is said",
    ("text", "sentence", "transcription", "transcript", "transcripts", "normalized_text",
     "raw_transcription", "raw_text", "target_text"),
)  # fmt: skip

_QUIET = quieten("transformers")
"""Whisper's ``generate`` warns of settings that it passes on itself."""


class SpeechRecognition(AudioTask):
    name = "speech_recognition"
    description = "write down what is said (Whisper; wav2vec 2.0, HuBERT and others with CTC)"
    notes = (
        "Word and character error rates are those of the whole split: all edits over all words or "
        "characters. SpecAugment draws by sample. CTC's loss is a mean over the rows of the "
        "global batch. See [Speech and audio](speech.md)."
    )
    columns = (AUDIO, TEXT)
    auto_class = "AutoModelForCTC"
    answer_role = TEXT.name
    answer_keys = frozenset({"text"})
    best_metric = "wer"
    metrics = ("wer", "cer", "loss")
    tally_reads_rows = True
    streams = True

    def encode_tables(self, parts: AudioParts, tables: Tables, columns: Any) -> PreparedData:
        args = parts.args
        text, train = columns["text"], tables.get("train")

        def read_texts() -> list[str]:
            if is_row_stream(train):
                raise ConfigurationError(
                    "--streaming: the model has no tokenizer, and a stream's transcripts are not "
                    "all known: train on some of them without --streaming first, which makes a "
                    "vocabulary, and start from that run's model."
                )
            return check_row_texts(get_column(train, text), text, "train")

        transcripts = load_transcripts(
            parts, None if train is None else read_texts, has_answers=True
        )
        labelled = {split: has_columns(rows, split, [text]) for split, rows in tables.items()}
        rows = {
            split: _prepare_split(
                table, split, columns["audio"], text if labelled[split] else None, transcripts
            )
            for split, table in tables.items()
        }
        # Metrics are those of the likeliest texts, so sampling is for predictions only.
        generation = Generation(
            num_beams=args.num_beams, max_new_tokens=_limit_tokens(args, transcripts)
        )
        extras = {"labelled": labelled, "generation": generation}
        return _finish(transcripts, args, rows, extras)

    def encode_input(self, parts: AudioParts, table: list[Record], columns: Any) -> PreparedData:
        args, column = parts.args, columns["audio"]
        if args.num_return_sequences != 1 or args.stop_strings:
            raise ConfigurationError(
                "a recording has one transcript, which ends with it: leave out "
                "--num-return-sequences and --stop-strings."
            )
        transcripts = load_transcripts(parts, None, has_answers=False)
        _, features = measure_rows(table, "test", column, parts)
        windows = _cut_windows([row["seconds"] for row in features], parts)
        audio = AudioRows.cut(table, column, "test", parts, windows)
        counts = [len(starts) for starts in windows]
        extras = {
            "labelled": {"test": False},
            "names": [audio.get_name(n) for n in accumulate(counts[:-1], initial=0)],
            "counts": counts,
            "generation": Generation.read(args, max_new_tokens=_limit_tokens(args, transcripts)),
        }
        return _finish(transcripts, args, {"test": audio}, extras)

    def count_features(self, prepared: PreparedData) -> list[int]:
        return list(prepared.extras["counts"])

    def build_model(
        self, args: Settings, prepared: PreparedData, *, must_be_trained: bool = False
    ) -> nn.Module:
        transcripts: Transcripts = prepared.extras["transcripts"]
        model = super().build_model(args, prepared, must_be_trained=must_be_trained)
        if transcripts.writes:
            _set_generation(model, args, transcripts.generation)
        return model

    def get_auto_class(self, prepared: PreparedData) -> str:
        writes = prepared.extras["transcripts"].writes
        return "AutoModelForSpeechSeq2Seq" if writes else self.auto_class

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.speech.losses import drop_seeds

        inputs = drop_seeds(batch)
        step = _write if prepared.extras["transcripts"].writes else _spell
        return step(model, inputs, prepared)

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        transcripts: Transcripts = prepared.extras["transcripts"]
        rows: Any = prepared.get_split(split)

        def read(first: int, count: int) -> list[str]:
            return [transcripts.score(rows.read(n, "text")) for n in range(first, first + count)]

        return TranscriptTally(
            lambda record: transcripts.score(transcripts.decode(record["transcript"])), read
        )

    def predictions(
        self, records: Sequence[Record], prepared: PreparedData, split: str, first: int = 0
    ) -> Answers:
        transcripts, counts = prepared.extras["transcripts"], prepared.extras["counts"][first:]
        texts = [transcripts.decode(record["transcript"]) for record in records]
        ends = [end for end in accumulate(counts, initial=0) if end <= len(texts)]
        return [
            self.answer_row({"texts": texts[start:end]}, prepared, split, number)
            for number, (start, end) in enumerate(pairwise(ends), start=first)
        ]

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        """The transcript of a recording, by those of its windows."""
        text = " ".join(filter(None, record["texts"]))
        return {"audio": prepared.extras["names"][number], "text": text}


def _finish(
    transcripts: Transcripts, args: SpeechArguments, rows: Mapping[str, Any],
    extras: Mapping[str, Any],
) -> PreparedData:  # fmt: skip
    from rapidformer.models.audio import build_processor
    from rapidformer.tasks.speech.losses import CtcLoss, OwnLoss

    parts, tokenizer, reduction = transcripts.parts, transcripts.tokenizer, args.ctc_loss_reduction
    is_stream = is_row_stream(rows.get("train"))
    if transcripts.writes:
        loss: Objective = OwnLoss(is_stream=is_stream)
    else:
        loss = CtcLoss(reduction, is_stream=is_stream)
    return parts.prepare(
        rows, loss, transcripts.get_model_settings(), processor=tokenizer,
        saved=build_processor(parts.config, parts.extractor, tokenizer),
        extras={**extras, "transcripts": transcripts, "reduction": reduction},
    )  # fmt: skip


def _limit_tokens(args: GenerationArguments, transcripts: Transcripts) -> int:
    return min(args.max_new_tokens or transcripts.most_tokens, transcripts.most_tokens)


def _prepare_split(
    table: Any, split: str, audio: str, text: str | None, transcripts: Transcripts
) -> Any:
    from rapidformer.tasks.speech.losses import masks_time
    from rapidformer.tasks.text.text import get_tokenizer_key

    parts = transcripts.parts

    def encode(columns: Columns, first: int) -> Columns:
        given = check_row_texts(columns.get(str(text), [None]), str(text), split, first)
        texts = [transcripts.read(value) for value in given]
        for number, value in enumerate(texts, start=first + 1):
            if not value and split == "train":
                raise DataError(f"{split}, row {number}: the transcript in {text} is empty.")
        return {"text": texts, "labels": transcripts.encode(texts, split, first)}

    # The mask tells SpecAugment which of a Whisper's 30 seconds are real.
    has_mask = transcripts.writes and masks_time(parts.config)
    start = getattr(parts.config, "decoder_start_token_id", None)
    key = (text, get_tokenizer_key(transcripts.tokenizer), parts.args.normalize_text, start)
    learns = (None, key, None) if text is None else (encode, key, transcripts.refuse)
    return prepare_rows(table, split, audio, parts, *learns, has_mask=has_mask)


def _cut_windows(seconds: Sequence[float], parts: AudioParts) -> list[list[float]]:
    """Where the windows of each recording begin."""
    for number, length in enumerate(seconds, start=1):
        if parts.count_steps(length) == 0:
            raise DataError(f"test, row {number}: {length:.3f} s are too short to hear anything.")
    size = parts.window
    if size is None:
        return [[0.0] for _ in seconds]
    # A remainder shorter than a sample is no window.
    counts = (max(1, -int(-(length - 1e-4) // size)) for length in seconds)
    return [[size * number for number in range(count)] for count in counts]


def _set_generation(model: Any, args: SpeechArguments, given: Any | None) -> None:
    """Generate as the model's authors do, in the language and the task of the data."""
    if given is not None:  # a model with fresh weights has made one from its sizes
        model.generation_config = copy.deepcopy(given)
    config = model.generation_config
    if getattr(config, "is_multilingual", False):
        config.language = args.language or getattr(config, "language", None)
        config.task = get_speech_task(args, given)
    # The old way to set both, which old checkpoints still have.
    config.forced_decoder_ids = None
    if getattr(model.config, "forced_decoder_ids", None) is not None:
        model.config.forced_decoder_ids = None


def _write(model: Any, batch: Batch, prepared: PreparedData) -> list[Record]:
    from rapidformer.tasks.evaluation.scoring import add_token_losses

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    config = copy.deepcopy(model.generation_config)
    own = prepared.extras["generation"].build_config(model, prepared.processor)
    config.update(**own.to_diff_dict())
    config.max_length = None
    with _QUIET:
        ids = model.generate(**inputs, generation_config=config)
    records: list[Record] = [{"transcript": row} for row in ids.cpu().numpy()]
    if "labels" in batch:
        add_token_losses(records, model(**batch).logits, batch["labels"])
    return records


def _spell(model: Any, batch: Batch, prepared: PreparedData) -> list[Record]:
    from rapidformer.tasks.speech.losses import compute_row_losses, get_steps

    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    steps = get_steps(model, logits, batch)
    best = logits.argmax(-1).cpu().numpy()
    sizes = steps.tolist()
    records: list[Record] = [
        {"transcript": ids[:size]} for ids, size in zip(best, sizes, strict=True)
    ]
    if "labels" in batch:
        losses = compute_row_losses(
            logits, batch["labels"], steps, model.config, prepared.extras["reduction"]
        )
        for record, loss in zip(records, losses.tolist(), strict=True):
            record |= {"loss": loss, "count": 1}
    return records
