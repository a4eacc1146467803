from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.pretraining.corpus import write_bert_corpus, write_gpt_corpus


@pytest.fixture(scope="session")
def gpt_corpus(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return write_gpt_corpus(tmp_path_factory.mktemp("gpt"))


@pytest.fixture(scope="session")
def bert_corpus(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return write_bert_corpus(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def scripts() -> Path:
    return Path(__file__).parents[3] / "examples" / "pretraining"
