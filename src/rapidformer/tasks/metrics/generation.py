"""BLEU and ROUGE of generated texts, in percent."""

from __future__ import annotations

from collections.abc import Sequence

_ROUGE_KEYS = ("rouge1", "rouge2", "rougeL")


def compute_generation(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU (sacreBLEU's 13a tokenizer) and the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    from torchmetrics.functional.text import rouge_score, sacre_bleu_score

    texts = [text.strip() for text in predictions]
    wanted = [text.strip() for text in references]
    bleu = 0.0
    if any(texts):
        bleu = 100 * float(sacre_bleu_score(texts, [[text] for text in wanted]))
    scores = rouge_score(texts, wanted, rouge_keys=_ROUGE_KEYS)
    rouge = {key: 100 * float(scores[f"{key}_fmeasure"]) for key in _ROUGE_KEYS}
    return {"bleu": bleu, **rouge}
