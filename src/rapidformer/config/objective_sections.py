"""What single tasks read, as sections of settings (see ``task_sections.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rapidformer.config.task_sections import read_by


@dataclass(kw_only=True, frozen=True)
class PreferenceArguments:
    """Preferences"""

    loss: str | None = read_by("preference", "grpo", "embedding", "reranking", default=None)
    """what is learnt. preference: sigmoid (DPO, the default), ipo, hinge, robust, apo_zero, simpo,
    orpo or kto; grpo: a mean over all tokens of the update (dapo, the default, or bnpo), over
    answers (grpo), or over answers times --max-new-tokens (dr_grpo); embedding: infonce, cosent,
    cosine, triplet or margin_mse (default: by the columns of the data); reranking: bce (the
    default), mse, margin_mse, listwise or listnet"""
    beta: float | None = read_by("preference", "grpo", default=None)
    """how strongly the model is held to its reference; SimPO's scale, ORPO's weight of the odds
    ratio (default: 0.1; 2 for simpo; 0 for grpo, which then needs no reference)"""
    simpo_gamma: float = read_by("preference", default=1.0)
    """SimPO: the margin by which the chosen answer must be better"""
    length_normalized: bool | None = read_by("preference", default=None)
    """divide each log-probability by the tokens of its answer (default: for ipo, simpo and orpo)"""
    sft_weight: float = read_by("preference", default=0.0)
    """weight of an additional likelihood of the chosen answers, a mean over their tokens"""
    desirable_weight: float = read_by("preference", default=1.0)
    """KTO: weight of desirable answers"""
    undesirable_weight: float = read_by("preference", default=1.0)
    """KTO: weight of undesirable answers"""
    center_rewards_coefficient: float = read_by("reward", default=0.0)
    """weight of the squared sum of both rewards, which keeps them around 0, such as 0.01"""
    chosen_column: str | None = read_by("preference", "reward", default=None)
    """column with the better answer (default: found by name)"""
    rejected_column: str | None = read_by("preference", "reward", default=None)
    """column with the worse answer (default: found by name)"""
    margin_column: str | None = read_by("reward", default=None)
    """column with the margin by which the better answer is better (default: margin, if there)"""


@dataclass(kw_only=True, frozen=True)
class GrpoArguments:
    """Learning from rewards"""

    reward_function: list[str] | None = read_by("grpo", default=None)
    """Python files with reward(prompts, answers, **columns), which returns a number for each
    answer; FILE.py:NAME takes another function"""
    reward_weights: list[float] | None = read_by("grpo", default=None)
    """weight of each reward function in the sum (default: 1)"""
    num_generations: int = read_by("grpo", default=8)
    """answers to each prompt, which are compared with each other"""
    scale_rewards: Literal["group", "batch", "none"] = read_by("grpo", default="group")
    """divide advantages by the standard deviation of the group's or the update's rewards"""
    clip_epsilon: float = read_by("grpo", default=0.2)
    """ratios of probabilities below 1 - E and above 1 + E give no gradient"""
    clip_epsilon_high: float | None = read_by("grpo", default=None)
    """the same for ratios above 1 (default: --clip-epsilon)"""
    kl_correction: bool = read_by("grpo", default=True)
    """weigh the divergence from the reference by the ratio of probabilities, which makes its
    gradient unbiased"""
    updates_per_generation: int = read_by("grpo", default=1)
    """updates that learn from the same answers before new ones are drawn"""


@dataclass(kw_only=True, frozen=True)
class ReferenceArguments:
    """Reference model"""

    precompute_reference: bool = read_by("preference", default=False)
    """ask the reference once, before training, and keep its answers in the run's folder: no frozen
    copy of the model in memory"""
    reference_precision: Literal["fp32", "bf16", "fp16"] | None = read_by(
        "preference", "grpo", default=None
    )
    """precision of the frozen copy that is the reference when all weights are trained: half the
    memory in 16 bits, but rewards no longer start at 0 (default: as the model)"""


@dataclass(kw_only=True, frozen=True)
class DistillationArguments:
    """Distillation"""

    teacher: str | None = read_by("distillation", default=None)
    """model whose answers the student learns: a Hub name, a folder or a run"""
    divergence: Literal["forward", "reverse", "jsd"] = read_by("distillation", default="forward")
    """of teacher and student: forward KL(teacher, student), reverse KL(student, teacher), or the
    generalised Jensen-Shannon divergence"""
    distillation_beta: float = read_by("distillation", default=0.5)
    """jsd: the teacher's share of the mixture that both are compared with; near 0 it is like the
    forward, near 1 like the reverse divergence"""
    distillation_temperature: float = read_by("distillation", default=1.0)
    """divides the logits of teacher and student before they are compared"""
    distillation_alpha: float = read_by("distillation", default=0.5)
    """weight of the divergence, times the temperature squared; the label loss weighs 1 - alpha"""
    teacher_precision: Literal["fp32", "bf16", "fp16"] | None = read_by(
        "distillation", default=None
    )
    """precision of the teacher's weights and arithmetic (default: as the student)"""
    shard_teacher: bool = read_by("distillation", default=False)
    """split the teacher's weights over the data-parallel ranks, even if the student's are whole"""


@dataclass(kw_only=True, frozen=True)
class EmbeddingArguments:
    """Embeddings and rerankers"""

    negatives: Literal["global-batch", "micro-batch"] = read_by("embedding", default="global-batch")
    """whose documents infonce and cosent compare a row with: those of all rows of the update, or
    only of its own micro-batch"""
    similarity_scale: float = read_by("embedding", default=20.0)
    """factor of the cosines in infonce and cosent: 1 / temperature"""
    symmetric: bool = read_by("embedding", default=False)
    """infonce: also find the query of each document, and take the mean of both"""
    mask_duplicates: bool = read_by("embedding", default=True)
    """infonce: a text is no negative of a row whose positive is the same text, or of an equal
    query"""
    triplet_margin: float = read_by("embedding", default=5.0)
    """triplet: how much farther away a negative must be than the positive"""
    matryoshka_dims: list[int] | None = read_by("embedding", default=None)
    """also learn the first N numbers of a vector, for each of these N: the losses are added"""
    pooling: Literal["mean", "first", "last"] | None = read_by("embedding", default=None)
    """which tokens' states become the vector (default: the model's own, or mean)"""
    normalize_embeddings: bool | None = read_by("embedding", default=None)
    """scale vectors to length 1 (default: the model's own; otherwise yes, but not for triplet and
    margin_mse, which learn from lengths)"""
    query_prompt: str | None = read_by("embedding", default=None)
    """text to put before every query, such as "query: " (default: the model's own)"""
    document_prompt: str | None = read_by("embedding", default=None)
    """text to put before every document, such as "passage: " (default: the model's own)"""
    pool_prompt: bool | None = read_by("embedding", default=None)
    """count the prompt's tokens in the vector (default: the model's own, or yes)"""
    positive_weight: float = read_by("reranking", default=1.0)
    """bce: how much more than other documents those that fit weigh: as many as a row has negatives,
    say"""
    negative_columns: list[str] | None = None
    """columns with hard negatives, or one with lists of them (default: found by name)"""


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
