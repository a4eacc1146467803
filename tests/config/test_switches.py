"""The table of switches: no setting without a row, and everything that is derived from rows."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rapidformer.config import parse_arguments, resolve
from rapidformer.config.schema import get_settings
from rapidformer.config.sections import AccelerationArguments, ParallelArguments
from rapidformer.config.switches import (
    SWITCHES,
    Rule,
    Situation,
    Switch,
    get_switch,
    to_flag,
)
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError
from rapidformer.verification.settings import Job, change_settings

NAMES = [switch.name for switch in SWITCHES]


def test_every_setting_of_acceleration_and_parallelism_has_one_row() -> None:
    """Without a row it would stay on in verify's reference run and be declared equal."""
    fields = [
        field.name
        for section in (AccelerationArguments, ParallelArguments)
        for field in dataclasses.fields(section)
    ]
    fields.remove("without")  # it names rows
    rows = Counter(name for switch in SWITCHES for name in switch.settings if name in fields)
    assert rows == Counter(fields)


def test_everything_that_is_done_by_itself_says_what_and_has_an_off_value() -> None:
    """Or a word why there is none: results would be wrong without it."""
    for switch in SWITCHES:
        assert switch.settings or (switch.does and switch.has_word != switch.is_needed)
        assert switch.settings or switch.kind != "asked"


def test_rows_speak_of_each_other_by_name() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for switch in SWITCHES:
        for rule in (*switch.needs, *switch.excludes):
            assert rule.switch in NAMES or (rule.setting in get_settings() and not rule.switch)
            row = get_switch(rule.switch) if rule.switch else switch
            assert not (rule.setting and rule.switch) or rule.setting in row.settings
        for implication in switch.implies:
            assert implication.setting in switch.settings
            assert {implication.sets, *implication.unless} <= set(get_settings())


def test_moments_follow_the_order_of_the_rows() -> None:
    moments = ["whole", "weights", "placed", "final"]
    places = [moments.index(switch.moment) for switch in SWITCHES if switch.module]
    assert places == sorted(places)


def give_other_value(name: str) -> object:
    """A value of a setting that is not the default."""
    setting = get_settings()[name]
    if setting.kind is bool:
        return not setting.default
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    return "other" if setting.kind is str else setting.kind((setting.default or 0) + 7)


COMPARED = [s for s in SWITCHES if s.settings and s.verification != "kept"]


@pytest.mark.parametrize("switch", COMPARED, ids=lambda switch: switch.name)
def test_nothing_of_a_switch_is_left_in_verifys_reference_run(switch: Switch) -> None:
    given = {name: give_other_value(name) for name in switch.settings}
    if switch.on_values:
        given = {switch.turned_on_by[0]: switch.on_values[0]}
    args = parse_arguments(["--task", "causal_lm"]).replace("test", **given)
    job = Job(
        folder="/nowhere", kind="whole", updates=1, processes=2, is_full_size=True,
        global_batch_size=4, micro_batch_size=4,
    )  # fmt: skip
    reference = change_settings(args, job)
    assert {name: getattr(reference, name) for name in switch.settings} == switch.get_off_values()
    assert not any(row.is_on(reference) for row in SWITCHES if row.has_word)


# ---- every pair ----------------------------------------------------------------------------------


def get_flags(switch: Switch) -> list[str]:
    """What a user types to insist on a switch."""
    name = switch.turned_on_by[0]
    setting = get_settings()[name]
    if setting.kind is bool:
        return [to_flag(name)]
    if switch.on_values or setting.choices:
        off = switch.get_off_values()[name]
        values = switch.on_values or [v for v in setting.choices if v not in (off, "auto")]
        return [to_flag(name), values[0]]
    return [to_flag(name), "2" if setting.kind is int else "/nowhere/deepspeed.json"]


ASKED = [switch for switch in SWITCHES if switch.turned_on_by]
PAIRS = [(one, other) for i, one in enumerate(ASKED) for other in ASKED[i + 1 :]]


def find_rule(one: Switch, other: Switch) -> tuple[Switch, Rule] | None:
    """What the table says about a pair, wherever it says so."""
    for switch, second in ((one, other), (other, one)):
        for rule in switch.excludes:
            is_general = not rule.setting and not rule.devices and not rule.precisions
            if rule.switch == second.name and is_general:
                return switch, rule
    return None


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda switch: switch.name.replace(" ", "-"))
def test_every_pair_is_refused_or_not_as_the_table_says(one: Switch, other: Switch) -> None:
    """By what a user would type; sizes of 2, on 8 ranks."""
    if one.turned_on_by == other.turned_on_by:
        return  # two values of one setting cannot be given together
    # Whatever else a switch needs is there: none of these rules is meant here.
    args = parse_arguments([*get_flags(one), *get_flags(other)])
    problems = find_problems(args.replace("test", world_size=8))
    texts = [p for p in problems if "cannot be combined with" in p]
    found = find_rule(one, other)
    if found is None:
        assert not texts
        return
    switch, rule = found
    start = f"{switch.describe(args)} cannot be combined with {rule.describe(args)}: {rule.reason}"
    assert [text for text in texts if text.startswith(start)], problems


def test_a_switch_that_was_not_asked_for_gives_way() -> None:
    args = parse_arguments(["--expert-model-parallel-size", "2"]).replace("test", world_size=2)
    assert not [p for p in find_problems(args) if "cannot be combined" in p]
    row = get_switch("dynamic shape")
    assert row.is_on(args) and not row.is_asked(args)
    assert "not been tried together" in (row.find_obstacle(args, Situation(device="cpu")) or "")
    assert "CUDA device" in (
        get_switch("CUDA graph").find_obstacle(args, Situation(device="cpu")) or ""
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_zero_costs(stage: int) -> None:
    """Nothing on one rank; on several, ZeRO-1 keeps the graphs of training steps."""
    flag = f"--zero-{stage}-memory-optimization"
    args = parse_arguments([flag, "--mixed-precision"])
    two, place = args.replace("test", world_size=2), Situation(device="cuda", precision="bf16")
    for name in ("CUDA graph", "forward graphs"):
        assert get_switch(name).find_obstacle(args, place) is None
        obstacle = get_switch(name).find_obstacle(two, place)
        if stage == 1 and name == "CUDA graph":
            assert obstacle is None
        else:
            assert flag in str(obstacle)


def test_a_refusal_says_once_what_to_do() -> None:
    args = parse_arguments(["--dynamic-shape", "on", "--compile"])
    row, place = get_switch("dynamic shape"), Situation(device="cuda", precision="fp32")
    refusal = row.refuse(args, row.find_obstacle(args, place) or "")
    assert refusal.endswith("Add --mixed-precision, or leave out --dynamic-shape.")
    elsewhere = row.find_obstacle(args, Situation(device="mps")) or ""
    assert row.refuse(args, elsewhere).endswith("this run is on MPS. Leave the flag out.")


@pytest.mark.parametrize("switch", [s for s in SWITCHES if s.has_word], ids=lambda s: s.word)
def test_without_turns_off_what_is_done_by_itself(switch: Switch) -> None:
    args = resolve(parse_arguments(["--without", switch.word]))
    assert not switch.is_on(args)
    assert switch.is_on(resolve(parse_arguments([])))


def test_without_refuses_other_names() -> None:
    with pytest.raises(ConfigurationError, match=r"--without host-mask: .* mean host-masks"):
        resolve(parse_arguments(["--without", "host-mask"]))
    with pytest.raises(ConfigurationError, match="it cannot be left out"):
        resolve(parse_arguments(["--without", "dropout-seeds"]))


def test_flags_that_mean_the_same_do_not_contradict_each_other() -> None:
    args = resolve(parse_arguments(["--mixed-precision", "--fp16"]))
    assert args.mixed_precision == "fp16"
    resolve(parse_arguments(["--zero-3-memory-optimization", "--fsdp-memory-optimization"]))
    with pytest.raises(ConfigurationError, match="exclude each other"):
        resolve(parse_arguments(["--zero-2-memory-optimization", "--fsdp-memory-optimization"]))
