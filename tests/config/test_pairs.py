"""Every pair of rows in every kind of run: rows, validation, ``explain`` and the docs say the same.

A row is there in full: asked for, with what it needs. Then a second one is asked for as well.
Whatever that changes stands in a table of the docs, and whatever stands there is so.
``tests/accel/test_pairs.py`` composes the pairs that one machine can run.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.config import Settings, parse_arguments
from rapidformer.config.explain import explain
from rapidformer.config.row import Obstacle
from rapidformer.config.schema import get_settings
from rapidformer.config.switches import SWITCHES, Situation, Switch, get_switch
from rapidformer.config.validate import find_problems

RANKS, FILE = 8, "/nowhere/deepspeed.json"
PLACES = [
    Situation(device=device, precision=precision, is_training=is_training)
    for device, precision, is_training in itertools.product(
        ("cpu", "cuda"), ("fp32", "bf16", "fp16"), (True, False)
    )
]
PLAIN = parse_arguments([])
DOCS = Path(__file__).parents[2] / "docs"
OUTCOMES = {"refused": "refused", "off, with a warning": "warned of", "off": "left off"}
Values = dict[str, Any]


def insist(switch: Switch) -> Values:
    """The settings of a user who wants this row, with what it needs; sizes are 2."""
    given: Values = {}
    for need in switch.needs[:1]:
        if not need.is_given(PLAIN):
            given |= insist(get_switch(need.switch)) if need.switch else {need.setting: 2}
            given |= {need.setting: need.values[0]} if need.values else {}
    if switch.turned_on_by:
        name = switch.turned_on_by[0]
        given[name] = next(iter(switch.on_values), None) or choose_value(name, switch)
    return given


def list_rows(switch: Switch) -> set[str]:
    """The names of the rows that are on then."""
    needed = [list_rows(get_switch(need.switch)) for need in switch.needs if need.switch]
    return {switch.name}.union(*needed)


def choose_value(name: str, switch: Switch) -> Any:
    setting = get_settings()[name]
    if setting.choices:
        return next(v for v in setting.choices if v not in (switch.get_off_values()[name], "auto"))
    return {bool: True, int: 2}.get(setting.kind, FILE)


@functools.cache
def build(values: frozenset[tuple[str, Any]], ranks: int) -> Settings:
    return PLAIN.replace("test", world_size=ranks, **dict(values))


def find(switch: Switch, values: Values, place: Situation, ranks: int = RANKS) -> Obstacle | None:
    args = build(frozenset(values.items()), ranks)
    assert switch.is_on(args), switch.name
    return switch.find_obstacle(args, place)


def list_places(values: Values) -> list[Situation]:
    """The kinds of run that these settings may have."""
    kind = values.get("mixed_precision") or next((k for k in ("fp16", "bf16") if k in values), None)
    return [place for place in PLACES if kind in (None, place.precision)]


# ---- what the docs say ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Two rows that do not combine: the first is off."""

    row: str
    other: str
    """A row's name; empty: a setting or a kind of run."""
    flags: tuple[str, ...]
    where: str
    outcome: str
    reason: str

    @property
    def values(self) -> Values:
        """The settings of both."""
        both = insist(get_switch(self.row)) | (insist(get_switch(self.other)) if self.other else {})
        for flag in self.flags:
            word, _, value = flag.removeprefix("--").partition(" ")
            name = word.replace("-", "_")
            kind: Any = get_settings()[name].kind
            both[name] = value or (True if kind is bool else 2 if kind is int else FILE)
        return both

    def excludes(self, rows: set[str], values: Values) -> bool:
        """Whether it refuses one of these rows, with these settings, in any kind of run."""
        is_refused = self.outcome == "refused" and not self.where
        is_about = bool(self.other) and {self.row, self.other} <= rows
        is_asked = bool(get_switch(self.row).turned_on_by)
        return is_refused and is_about and is_asked and self.values.items() <= values.items()

    def fits(self, place: Situation) -> bool:
        """Whether it speaks of this kind of run."""
        names = [word for word in ("cpu", "cuda") if word.upper() in self.where]
        kinds = [word for word in ("fp32", "bf16", "fp16") if word in self.where]
        phases = [word for word in ("training", "prediction") if f"in {word}" in self.where]
        parts = ((place.device, names), (place.precision, kinds), (place.phase, phases))
        rows = [get_switch(name) for name in (self.row, self.other) if name]
        is_used = all(row.only_in in ("", place.phase) for row in rows)
        return is_used and all(not words or value in words for value, words in parts)


_OTHER = re.compile(r"^(?:(?P<name>[^(`]+) \()?`(?P<flags>[^`]+)`\)?(?P<where>.*)$")


def read_table(page: str, name: str) -> Iterator[list[str]]:
    text = (DOCS / page).read_text("utf-8").split(f"<!-- {name}: ")[1].split("<!-- end")[0]
    for line in text.splitlines():
        if line.startswith("| ") and "---" not in line:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def read_exclusions() -> Iterator[Line]:
    lines = itertools.islice(read_table("parity.md", "exclusions"), 1, None)
    for first, second, outcome, *reason in (
        (line[0], other, *line[2:]) for line in lines for other in line[1].split("<br>")
    ):
        row = first.split(" (`")[0]
        is_adapter = second.startswith(("learned tokens", "prefix tuning"))
        if second.startswith("a run without") or is_adapter:
            continue  # ``needs`` and a model's adapter, which other tests are about
        found = _OTHER.match(second)
        name, flags, where = found.group("name", "flags", "where") if found else ("", "", second)
        words = tuple(flags.split(" and ")) if flags else ()
        yield Line(row, name or "", words, where, OUTCOMES[outcome], " | ".join(reason).strip())


def read_under_deepspeed() -> dict[str, str]:
    """What the docs say of each row with ``--deepspeed``; by name or by word."""
    return {
        cells[0].strip("`").replace(" (always needed)", ""): cells[3 if offset else 4].strip(" |")
        for offset, table in enumerate(("switches", "automatic"))
        for cells in itertools.islice(
            ([c[0], *c[1:]] if offset == 0 else [c[0], *c[2:], ""] for c in
             read_table("switches.md", table)), 1, None,
        )
    }  # fmt: skip


LINES = list(read_exclusions())


def test_what_the_docs_exclude_is_off_and_for_that_reason() -> None:
    for line in LINES:
        switch, values = get_switch(line.row), line.values
        known = PLACES if "fp32" in line.where else list_places(values)  # a CPU may stay in it
        places = [place for place in known if line.fits(place)]
        found = [obstacle for p in places if (obstacle := find(switch, values, p)) is not None]
        meant = [each for each in found if each.reason.endswith(line.reason)]
        assert meant, (line, found)
        assert all(each.if_asked == line.outcome for each in meant if switch.turned_on_by), line
        # In no run of this kind are both there.
        assert len(found) == len(places), line


def test_a_pair_that_is_refused_is_refused_from_either_side() -> None:
    for line in LINES:
        switch, places = get_switch(line.row), [p for p in PLACES if line.fits(p)]
        if line.outcome != "refused" or not line.other or not switch.turned_on_by:
            continue
        for place in places:
            own = find(switch, line.values, place)
            is_meant = own is not None and own.reason.endswith(line.reason)
            if is_meant and find(switch, insist(switch), place) is None:
                other = find(get_switch(line.other), line.values, place)
                assert other is not None and other.if_asked == "refused", (line, place)


def is_said(switch: Switch, other: Switch, place: Situation) -> bool:
    """Whether a table says why a row is off beside another one, which may be by what it needs."""
    if any(need.switch == other.name or need.setting in other.settings for need in switch.needs):
        return True  # with another value than it needs
    rows, others = list_rows(switch), list_rows(other)
    if other.name == "DeepSpeed" and any(get_switch(r).under_deepspeed != "applied" for r in rows):
        return True
    sides = ((rows, others), (others, rows))
    return any(
        line.row in one and line.other in two and line.fits(place)
        for line, (one, two) in itertools.product(LINES, sides)
    )


ASKED = [switch for switch in SWITCHES if switch.turned_on_by]


def list_pairs() -> Iterator[tuple[Switch, Switch, Values]]:
    """Every row with every other one that can be asked for, and the settings of both."""
    for switch, other in itertools.product(SWITCHES, ASKED):
        one, two = insist(switch), insist(other)
        # Two values of one setting cannot be given together.
        if switch is not other and all(one.get(name, two[name]) == two[name] for name in two):
            yield switch, other, one | two


def test_no_row_gives_way_to_another_one_unless_the_docs_say_so() -> None:
    for switch, other, values in list_pairs():
        for place in list_places(values):
            is_off = find(switch, values, place) is not None
            if is_off and find(switch, insist(switch), place) is None:
                assert is_said(switch, other, place), (switch.name, other.name, place)


def test_a_pair_is_refused_at_the_start_if_and_only_if_no_run_could_have_both() -> None:
    for switch, other, values in list_pairs():
        if switch not in ASKED:
            continue
        args = build(frozenset(values.items()), RANKS)
        texts = [text for text in find_problems(args) if "cannot be combined with" in text]
        rows = list_rows(switch) | list_rows(other)
        always = [line for line in LINES if line.excludes(rows, values)]
        assert bool(texts) == bool(always), (switch.name, other.name, texts, always)
        for line in always:
            start = f"{get_switch(line.row).describe(args)} cannot be combined with"
            assert any(t.startswith(start) and line.reason in t for t in texts), (line, texts)


def test_deepspeed_does_or_leaves_out_what_the_docs_say() -> None:
    said = read_under_deepspeed()
    deepspeed = {"deepspeed": FILE}
    for switch in SWITCHES:
        if switch.name == "DeepSpeed":
            continue
        rules = [rule.switch for rule in switch.excludes]
        assert switch.under_deepspeed == "applied" or "DeepSpeed" not in rules, "one says it all"
        words = said[switch.word if switch.has_word else switch.name]
        for place in PLACES:
            alone = find(switch, insist(switch), place)
            obstacle = find(switch, insist(switch) | deepspeed, place)
            if alone is not None or not place.is_training:
                assert (alone is None) == (obstacle is None), switch.name
            else:
                assert (obstacle is None) == (words == "applied"), (switch.name, words, obstacle)


def test_explain_says_what_the_rows_decide() -> None:
    """For each row asked for alone, on one rank and on several."""
    for switch, place, ranks in itertools.product(ASKED, PLACES, (1, RANKS)):
        args = build(frozenset(insist(switch).items()), ranks)
        for answer in explain(args, place):
            row = get_switch(answer.name)
            obstacle = row.find_obstacle(args, place)
            if not row.is_on(args):
                assert answer.state == "off"
            elif obstacle is None:
                assert answer.state == "on"
            else:
                assert answer.state == "not applicable" and obstacle.reason in answer.why


def test_without_a_row_the_others_are_as_before() -> None:
    """So ``--without`` needs no pairs."""
    named = {rule.switch for s in SWITCHES for rule in (*s.needs, *s.excludes)}
    assert not named & {switch.name for switch in SWITCHES if switch.has_word}


def test_rules_do_not_lead_in_a_circle() -> None:
    def visit(switch: Switch, seen: tuple[str, ...]) -> None:
        assert switch.name not in seen, seen
        for rule in (*switch.needs, *switch.excludes):
            for name in filter(None, (rule.switch, rule.beside)):
                visit(get_switch(name), (*seen, switch.name))

    for switch in SWITCHES:
        visit(switch, ())
