"""Transcripts as labels: Whisper's with its prefix and end, CTC's character by character.

A Whisper pads with its end token, so a label is padding by its place, never by its id.
"""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.objective_sections import SpeechArguments
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.hub import has_tokenizer
from rapidformer.log import get_logger, warn
from rapidformer.nearest import suggest
from rapidformer.tasks.speech.rows import AudioParts

_DELIMITER, _UNKNOWN, _PADDING = "|", "[UNK]", "[PAD]"
_LENGTHS = ("max_target_positions", "max_text_positions", "max_position_embeddings")


class Transcripts(ABC):
    """How a model puts down what was said."""

    writes = False
    """Whether it generates token by token."""
    most_tokens = 0
    """Tokens that may be generated."""
    generation: Any | None = None
    """How the model's authors generate with it."""

    def __init__(self, parts: AudioParts, tokenizer: Any) -> None:
        self.parts, self.tokenizer = parts, tokenizer
        self._normalize = _load_normalizer() if parts.args.normalize_text else str

    def read(self, text: str) -> str:
        """A transcript of the data as it is learnt and scored."""
        return " ".join(text.split())

    def score(self, text: str) -> str:
        """A text as it is compared with another."""
        return self._normalize(text)

    @abstractmethod
    def encode(self, texts: Sequence[str], split: str, first: int) -> list[list[int]]:
        """The labels of rows, of which ``first`` come before these."""

    @abstractmethod
    def refuse(self, row: Mapping[str, Any]) -> str | None:
        """Why the model cannot learn a row (``labels`` and ``seconds``); None if it can."""

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()

    def get_model_settings(self) -> dict[str, Any]:
        """What follows for the model's configuration."""
        return {}


class WrittenTranscripts(Transcripts):
    """Of a model with a decoder, which writes token by token."""

    writes = True

    def __init__(self, parts: AudioParts, tokenizer: Any, generation: Any | None) -> None:
        super().__init__(parts, tokenizer)
        self.generation = generation
        config = parts.config
        self._start = config.decoder_start_token_id
        decoder = getattr(config, "decoder", config)  # of two models joined
        sizes = (getattr(decoder, name, None) for name in _LENGTHS)
        self._most = int(next(filter(None, sizes)))
        if self._start is None:
            raise ModelError(
                "The model's config.json lacks decoder_start_token_id, which its decoder begins "
                "with: add it."
            )
        self.most_tokens = self._most - len(getattr(tokenizer, "prefix_tokens", ())) - 1

    def encode(self, texts: Sequence[str], split: str, first: int) -> list[list[int]]:
        end = self.tokenizer.eos_token_id
        rows = []
        for ids in self.tokenizer(text_target=list(texts))["input_ids"]:
            # The model puts it before the labels itself. Only this one: another token at the
            # beginning, such as that of the language, must be learnt.
            ids = list(ids[1:] if ids and ids[0] == self._start else ids)
            rows.append(ids if end is None or ids[-1:] == [end] else [*ids, end])
        return rows

    def refuse(self, row: Mapping[str, Any]) -> str | None:
        if len(row["labels"]) > self._most:
            return f"a transcript of more than {self._most} tokens"
        return None


class SpelledTranscripts(Transcripts):
    """Of a model with a CTC head, which spells letter by letter."""

    def __init__(self, parts: AudioParts, tokenizer: Any, *, is_new: bool) -> None:
        super().__init__(parts, tokenizer)
        self._is_new = is_new
        self._fit_case: Callable[[str], str] = str
        # Letters, not pieces of words: these may be in any case.
        is_spelling = hasattr(tokenizer, "word_delimiter_token")
        letters = [token for token in tokenizer.get_vocab() if is_spelling and len(token) == 1]
        if any(map(str.isupper, letters)) != any(map(str.islower, letters)):
            self._fit_case = str.upper if any(map(str.isupper, letters)) else str.lower
        self._has_unknown = False

    def read(self, text: str) -> str:
        return self._fit_case(" ".join(self._normalize(text).split()))

    def encode(self, texts: Sequence[str], split: str, first: int) -> list[list[int]]:
        rows: list[list[int]] = [list(ids) for ids in self.tokenizer(list(texts))["input_ids"]]
        unknown = self.tokenizer.unk_token_id
        for number, (ids, text) in enumerate(zip(rows, texts, strict=True), start=first + 1):
            if unknown is None or unknown not in ids:
                continue
            known = self.tokenizer.get_vocab()
            letters = sorted({c for c in text if c not in known and not c.isspace()})
            shown = ", ".join(map(repr, letters[:8]))
            listed = f"{split}, row {number}: the tokenizer does not know {shown}"
            if split == "train":
                raise DataError(
                    f"{listed}. --normalize-text drops case and punctuation; --make-vocabulary, "
                    "without --streaming, starts a new head with the characters of the training "
                    "data."
                )
            if not self._has_unknown:
                warn(f"{listed}: such characters cannot be recognised, and count as errors.")
            self._has_unknown = True
        return rows

    def refuse(self, row: Mapping[str, Any]) -> str | None:
        labels, steps = row["labels"], self.parts.count_steps(row["seconds"])
        doubles = sum(first == second for first, second in pairwise(labels))
        if steps is not None and len(labels) + doubles > steps:
            return "a transcript with more characters than the model makes steps of the audio"
        return None

    def get_model_settings(self) -> dict[str, Any]:
        from rapidformer.models.location import is_from_scratch

        if not (self._is_new or is_from_scratch(self.parts.args)):
            return {}
        size = max(self.tokenizer.get_vocab().values()) + 1
        return {"vocab_size": size, "pad_token_id": self.tokenizer.pad_token_id}


def is_ctc(config: Any) -> bool:
    """Whether the model spells (CTC); an error if it can neither spell nor write."""
    from transformers import MODEL_FOR_CTC_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    if type(config) in MODEL_FOR_CTC_MAPPING:
        return True
    if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING and config.is_encoder_decoder:
        return False
    raise ModelError(
        f"{config.model_type} models cannot do this task: it needs an encoder with a CTC head "
        "(wav2vec2, hubert, wavlm, wav2vec2-bert, ...) or an encoder-decoder (whisper, moonshine, "
        "speech_to_text)."
    )


def load_transcripts(
    parts: AudioParts, read_texts: Callable[[], Sequence[str]] | None, *, has_answers: bool
) -> Transcripts:
    """The model's way to write; ``read_texts`` gives those that a new vocabulary is made of."""
    from rapidformer.models.audio import load_generation_config
    from rapidformer.models.build import load_tokenizer

    args = parts.args
    if not is_ctc(parts.config):
        if args.make_vocabulary:
            raise ConfigurationError("--make-vocabulary is for models with a CTC head.")
        tokenizer, generation = load_tokenizer(args), load_generation_config(args)
        _set_prefix(tokenizer, args, generation, must_know=has_answers)
        return WrittenTranscripts(parts, tokenizer, generation)
    for name in ("language", "speech_task"):
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigurationError(
                f"--{flag} is for Whisper: a {parts.config.model_type} model knows one language."
            )
    if read_texts is None or not (args.make_vocabulary or _lacks_tokenizer(args)):
        return SpelledTranscripts(parts, load_tokenizer(args), is_new=False)
    fit = _load_normalizer() if args.normalize_text else str
    tokenizer = make_vocabulary([fit(text) for text in read_texts()])
    get_logger().info(f"letters   {len(tokenizer)} tokens, made from the training transcripts")
    return SpelledTranscripts(parts, tokenizer, is_new=True)


def _lacks_tokenizer(args: Settings) -> bool:
    from rapidformer.models.build import load_tokenizer
    from rapidformer.models.location import get_model_location

    location = Path(get_model_location(args) or "")
    if location.is_dir() or not location.name:
        return not (location.name and has_tokenizer(location))
    try:
        load_tokenizer(args)  # a model on the Hub
    except ModelError:
        return True
    return False


def make_vocabulary(texts: Sequence[str]) -> Any:
    """A tokenizer for the characters of these texts, in lower case if they are all in one case."""
    from transformers import Wav2Vec2CTCTokenizer

    letters = sorted({letter for text in texts for letter in " ".join(text.split())} - {" "})
    if not any(map(str.islower, letters)):
        letters = sorted({letter.lower() for letter in letters})
    tokens = [_DELIMITER, *(letter for letter in letters if letter != _DELIMITER)]
    table = {token: number for number, token in enumerate([*tokens, _UNKNOWN, _PADDING])}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.json"
        file.write_text(json.dumps(table), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(
            str(file), unk_token=_UNKNOWN, pad_token=_PADDING, word_delimiter_token=_DELIMITER,
            bos_token=None, eos_token=None,
        )  # fmt: skip


def _set_prefix(
    tokenizer: Any, args: SpeechArguments, generation: Any | None, *, must_know: bool
) -> None:
    """Let a Whisper's labels begin with language and task; ``must_know``: for learning them."""
    is_multilingual = bool(getattr(generation, "is_multilingual", False))
    if not is_multilingual:
        for name in ("language", "speech_task"):
            if getattr(args, name) is not None:
                flag, own = name.replace("_", "-"), tokenizer.name_or_path
                raise ConfigurationError(
                    f"--{flag} is for a multilingual Whisper, and {own} knows one language."
                )
        return
    language = args.language or getattr(generation, "language", None)
    if language is None and must_know:
        raise ConfigurationError(
            f"{tokenizer.name_or_path} knows many languages: say that of the audio with "
            "--language, such as --language german."
        )
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    known = {*TO_LANGUAGE_CODE, *TO_LANGUAGE_CODE.values()}
    if language is not None and language.lower() not in known:
        hint = suggest(language.lower(), sorted(known))
        raise ConfigurationError(f"--language {language}: Whisper does not know it.{hint}")
    tokenizer.set_prefix_tokens(
        language=language, task=get_speech_task(args, generation), predict_timestamps=False
    )


def get_speech_task(args: SpeechArguments, generation: Any | None) -> str:
    return str(args.speech_task or getattr(generation, "task", None) or "transcribe")


def _load_normalizer() -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    return BasicTextNormalizer()
