"""Settings of the tasks that listen (see ``task_sections.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rapidformer.config.task_sections import read_by

_SPEECH = ("speech_recognition",)
_AUDIO = ("speech_recognition", "audio_classification")


@dataclass(kw_only=True, frozen=True)
class SpeechArguments:
    """Speech and audio"""

    audio_column: str | None = read_by(*_AUDIO, default=None)
    """column with the audio (default: found by name)"""
    max_audio_seconds: float | None = read_by(*_AUDIO, default=None)
    """leave out longer audio in training and evaluation (default: what the model can hear at once,
    30 s for Whisper)"""
    language: str | None = read_by(*_SPEECH, default=None)
    """language of the audio for a multilingual Whisper, such as german or de (default: the model's
    own; `predict` lets the model find out)"""
    speech_task: Literal["transcribe", "translate"] | None = read_by(*_SPEECH, default=None)
    """what a multilingual Whisper writes: the words, or their translation into English (default:
    the model's own, or transcribe)"""
    normalize_text: bool = read_by(*_SPEECH, default=False)
    """score texts without case and punctuation; a CTC model also learns them so"""
    make_vocabulary: bool = read_by(*_SPEECH, default=False)
    """CTC: a new head for the characters of the training transcripts (default: only if the model
    has no tokenizer)"""
    freeze_feature_encoder: bool | None = read_by(*_AUDIO, default=None)
    """do not train the convolutions that read the raw audio (default: yes for pretrained
    weights)"""
    ctc_loss_reduction: Literal["mean", "sum"] = read_by(*_SPEECH, default="mean")
    """CTC: divide the loss of a row by its characters (mean) or not (sum); the loss of an update is
    the mean over its rows"""
    apply_spec_augment: bool | None = read_by(*_AUDIO, default=None)
    """mask random spans of time and of features in training (default: the model's own)"""
    mask_time_prob: float | None = read_by(*_AUDIO, default=None)
    """share of the time that is masked, with overlaps (default: the model's own)"""
    mask_time_length: int | None = read_by(*_AUDIO, default=None)
    """steps in a masked span of time (default: the model's own)"""
    mask_feature_prob: float | None = read_by(*_AUDIO, default=None)
    """share of the features that is masked, with overlaps (default: the model's own)"""
    mask_feature_length: int | None = read_by(*_AUDIO, default=None)
    """features in a masked span of features (default: the model's own)"""
