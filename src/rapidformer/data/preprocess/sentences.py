"""Sentence boundaries, by rules that need no download and give the same result everywhere.

This is not NLTK's punkt, which learns abbreviations from a corpus. A full stop ends a sentence if
whitespace follows and the next word can start one; known abbreviations, initials, acronyms and list
numbers do not end it. A blank line always does.
"""
# ruff: noqa: RUF001  (the look-alikes of other scripts are meant)

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_CLOSING = "\"'”’»›)\\]}」』】）〉》"
_OPENING = "\"'“‘«‹(\\[{「『【（〈《¿¡*•–—-"
_CJK_STOPS = "。！？｡"
# A run of stops with closing quotes and brackets (CJK needs no whitespace between characters), or
# the end of a line before a blank one.
_CANDIDATE = re.compile(
    rf"[.!?…؟۔।॥።]+[{_CLOSING}]*(?=\s)|[{_CJK_STOPS}]+[{_CLOSING}]*|\n(?=[^\S\n]*\n)"
)
_WORD_BEFORE = re.compile(r"[^\s(\[{\"'“‘«]*$")
_LONGEST_WORD = 40
_FOLLOWING = re.compile(rf"\s*[{_OPENING}]*\s?(\w*)")
_BLANK_LINE = re.compile(r"[^\S\n]*\n[^\S\n]*\n")
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[A-Z][a-z]\.[A-Z]")
_LIST_MARK = re.compile(r"\s*[(\[]?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,4})")
_NUMERAL = re.compile(r"\d.*|[A-Z]|[IVXLC]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These come before a name, so they never end a sentence.
_BEFORE_NAMES = _words(
    "mr mrs ms mx messrs mme mlle dr prof rev hon st gen col capt cmdr lt sgt cpl maj adm gov sen "
    "rep pres supt vs v viz cf e.g i.e eg ie resp approx ca jan feb apr jun jul aug sep sept oct "
    "nov dec mt u.s.s h.m.s"
)
# These do not end a sentence before a number; elsewhere they are ordinary words, or come last.
_BEFORE_NUMBERS = _words("no nos nr p pp ch chap sec art par ref refs tab eq eqs fig figs vol vols")
# These may come last: they end a sentence only before a word that often starts one.
_MAY_END = _words(
    "etc al inc ltd co corp bros llc plc jr sr esq ph.d m.d b.a m.a b.sc m.sc d.c u.s u.k u.n e.u "
    "a.m p.m a.d b.c dept univ assn ave blvd rd ext hr hrs oz lb lbs"
)
_STARTERS = _words(
    "the a an this that these those it its he she they we i you his her their our my your there "
    "here in on at by for from to with as if when while after before since although though but "
    "and or so yet however then thus what who why how where which not no all some many most one "
    "two each both such"
)


def build_splitter(
    lang: str = "english", *, keep_newlines: bool = False
) -> Callable[[str], list[str]]:
    """A function from a text to its sentences, with the whitespace after each if it is kept."""
    has_abbreviations = lang == "english"

    def split(text: str) -> list[str]:
        spans = _iterate_spans(text.rstrip(), has_abbreviations)
        if keep_newlines:
            return [text[start:following] for start, _, following in spans]
        return [text[start:end].rstrip() for start, end, _ in spans]

    return split


def _iterate_spans(text: str, has_abbreviations: bool) -> Iterator[tuple[int, int, int]]:
    """Start and end of each sentence, and where the whitespace after it ends."""
    start = 0
    for match in _CANDIDATE.finditer(text):
        if match.start() < start or not _ends_sentence(text, start, match, has_abbreviations):
            continue
        end = match.start() if match.group() == "\n" else match.end()
        following = end
        while following < len(text) and text[following].isspace():
            following += 1
        if not text[start:end].strip():
            continue  # blank lines before the first sentence belong to it
        yield start, end, following
        start = following
    if start < len(text):
        yield start, len(text), len(text)


def _ends_sentence(text: str, start: int, match: re.Match[str], has_abbreviations: bool) -> bool:
    stop = match.group()
    if stop == "\n" or stop[0] in _CJK_STOPS or _BLANK_LINE.match(text, match.end()):
        return True
    following = _FOLLOWING.match(text, match.end())
    word = following.group(1) if following else ""
    if word[:1].islower():
        return False
    if stop[0] != "." or stop.startswith(".."):
        return True
    if _LIST_MARK.fullmatch(text, start, match.start()):
        return False
    before = _WORD_BEFORE.search(text, max(start, match.start() - _LONGEST_WORD), match.start())
    return _ends_with(before.group() if before else "", word, has_abbreviations)


def _ends_with(word: str, following: str, has_abbreviations: bool) -> bool:
    """Whether a full stop after this word ends a sentence, given the next word."""
    if len(word) == 1 and word.isupper() and word != "I":
        return False
    lowered = word.lower()
    if has_abbreviations:
        if lowered in _BEFORE_NAMES:
            return False
        if lowered in _BEFORE_NUMBERS:
            is_digit = following[:1].isdigit()
            return not (is_digit or (lowered != "no" and _NUMERAL.fullmatch(following)))
        if lowered in _MAY_END or _ACRONYM.fullmatch(word):
            return following.lower() in _STARTERS
    return not _ACRONYM.fullmatch(word)
