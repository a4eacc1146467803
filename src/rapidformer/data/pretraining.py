"""Pre-training data sets in Megatron's format: a name for scripts that import it already."""

from __future__ import annotations

from typing import Any

from rapidformer.errors import RapidformerError


def build_train_valid_test_datasets_for_huggingface(*args: Any, **kwargs: Any) -> Any:
    """Training, validation and test data from one corpus."""
    raise RapidformerError(
        "build_train_valid_test_datasets_for_huggingface is not in this version yet: return data "
        "sets of your own from train_valid_test_datasets_provider."
    )
