"""Other names of the tasks. Settings are read and checked under a task's own name."""

from __future__ import annotations

ALIASES = {
    "sequence_classification": ("text_classification", "classification", "regression"),
    "token_classification": ("ner", "sequence_labeling", "sequence_labelling", "tagging"),
    "question_answering": ("extractive_question_answering", "qa", "squad"),
    "masked_lm": ("mlm", "masked_language_modeling", "fill_mask"),
    # The documents of the original system spell it "casual".
    "causal_lm": ("casual_lm", "clm", "language_modeling", "text_generation"),
    "seq2seq_lm": ("seq2seq", "summarization", "translation", "text2text_generation"),
    "multiple_choice": ("swag",),
    "image_classification": ("vision",),
    "speech_recognition": ("asr", "automatic_speech_recognition", "speech_to_text"),
    "audio_classification": ("audio",),
    "distillation": ("distill", "gkd", "knowledge_distillation"),
    "preference": ("dpo", "kto", "orpo", "simpo", "preferences"),
    "reward": ("reward_model", "reward_modeling", "rm"),
    "grpo": ("rl", "reinforcement_learning"),
    "embedding": ("embeddings", "sentence_transformers", "retrieval"),
    "reranking": ("reranker", "cross_encoder"),
    "image_text": ("image_text_to_text", "vlm", "vision_language"),
    "pretraining": (),
}
_TASKS = {alias: task for task, aliases in ALIASES.items() for alias in aliases}
_LOSSES = ("kto", "orpo", "simpo")
"""Names of --task preference that say which --loss it has."""


def read_task(word: str) -> tuple[str, str | None]:
    """The task's own name, and the loss that the word implies."""
    name = word.lower().replace("-", "_")
    return _TASKS.get(name, name if name in ALIASES else word), name if name in _LOSSES else None
