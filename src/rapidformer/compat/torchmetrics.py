"""ROUGE-Lsum by lines: torchmetrics' public function downloads a model to split sentences."""

from __future__ import annotations

from typing import Any

_ROUGE = "torchmetrics.functional.text.rouge"
PRIVATE_NAMES = {
    f"{_ROUGE}._rouge_lsum_score": "ROUGE-Lsum in load_metric('rouge')",
    f"{_ROUGE}._normalize_and_tokenize_text": "ROUGE-Lsum in load_metric('rouge')",
}


def compute_rouge_lsum(text: str, wanted: str, stemmer: Any = None) -> float:
    """The F1 of ROUGE-Lsum, from 0 to 1; one sentence per line, as rouge-score expects them."""
    from torchmetrics.functional.text.rouge import _normalize_and_tokenize_text, _rouge_lsum_score

    def split(lines: str) -> list[Any]:
        return [_normalize_and_tokenize_text(line, stemmer) for line in lines.split("\n") if line]

    return float(_rouge_lsum_score(split(text), split(wanted))["fmeasure"])
