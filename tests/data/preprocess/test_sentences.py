"""Sentences: abbreviations, numbers, quotes, other scripts, and white space that is kept."""
# ruff: noqa: RUF001  (the look-alikes of other scripts are meant)

from __future__ import annotations

import random

import pytest

from rapidformer.data.preprocess.sentences import build_splitter
from tests.data.preprocess.vocabularies import get_library_sources, make_random_text


@pytest.mark.parametrize(
    "sentences",
    [
        ["One ends.", "Two begins!", "Three?", "Four."],
        ["Dr. Smith met Mrs. Jones, e.g. at St. Mary's vs. Leeds.", "He left."],
        ["J. R. R. Tolkien wrote it.", "C. S. Lewis read it."],
        ["It costs $3.50 or 1,000.25 at example.com.", "Fine."],
        ['"Yes!" he said.', '"No."', "She left."],
        ['He asked (really?) why.', "(So he did.)", "[Yes.]", "Good."],
        ["Wait... what happened?!", "Nothing...", "Then it rained."],
        ["It was the U.S. Army of Acme Inc. in the U.S.", "The end."],
        ["At 5 p.m. John came.", "At 6 p.m.", "He went."],
        ["See Fig. 3 and No. 5, vol. II.", "No.", "I ate a fig.", "Then two."],
        ["1. First thing.", "2. Second thing.", "A. Third thing."],
        ["Yahoo! is a name.", "It was I.", "In 1999.", "5 came."],
        ["A line\nthat is wrapped.", "Another\none."],
        ["今日は晴れ。", "元気？", "「はい！」", "そう"],
        ["¿Qué tal?", "¡Bien!", "Ça va…", "Été comme hiver."],
        ["क्या हाल है।", "सब ठीक।", "ما اسمك؟", "اسمي علي۔"],
        ["no stop at the end"],
    ],
)  # fmt: skip
def test_sentences_are_found_again(sentences: list[str]) -> None:
    is_cjk = sentences[0].startswith("今")
    text = ("" if is_cjk else " ").join(sentences)
    assert build_splitter()(text) == sentences


def test_a_blank_line_ends_a_sentence_without_a_stop() -> None:
    text = "A heading\n\nA paragraph about Mr.\n \nSmith, e.g. this\nline."
    assert build_splitter()(text) == [
        "A heading", "A paragraph about Mr.", "Smith, e.g. this\nline.",
    ]  # fmt: skip


def test_only_english_knows_abbreviations() -> None:
    text = "Der Prof. Meier kam."
    assert build_splitter("english")(text) == [text]
    assert build_splitter("german")(text) == ["Der Prof.", "Meier kam."]
    assert build_splitter("german")("J. S. Bach lebte. Er starb.") == [
        "J. S. Bach lebte.", "Er starb.",
    ]  # fmt: skip


def test_without_text_there_are_no_sentences() -> None:
    for text in ("", " \n \n", "\n\n\n"):
        assert build_splitter()(text) == []


def test_white_space_behind_a_sentence_is_kept_if_asked_for() -> None:
    text = "One.  Two.\n\nThree \n\n\nFour.\n"
    kept = build_splitter(keep_newlines=True)(text)
    assert kept == ["One.  ", "Two.\n\n", "Three \n\n\n", "Four."]
    assert build_splitter()(text) == ["One.", "Two.", "Three", "Four."]


def test_no_character_but_white_space_is_lost() -> None:
    dice = random.Random(0)
    texts = [make_random_text(dice, 60) + ". A? b… " for _ in range(500)] + get_library_sources(3)
    for text in texts:
        kept = build_splitter(keep_newlines=True)(text)
        assert "".join(kept) == text.rstrip()
        plain = build_splitter()(text)
        assert "".join("".join(plain).split()) == "".join(text.split())
        assert all(sentence.strip() for sentence in plain)
