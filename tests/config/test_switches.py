"""The table of switches: no setting without a row, and everything that is derived from rows."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rapidformer.config import parse_arguments, resolve
from rapidformer.config.schema import get_settings
from rapidformer.config.sections import AccelerationArguments, ParallelArguments
from rapidformer.config.switches import SWITCHES, Rule, Switch, get_switch
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
    rows = Counter(name for switch in SWITCHES for name in switch.settings)
    assert rows == Counter(fields)


def test_rows_speak_of_each_other_by_name() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for switch in SWITCHES:
        for rule in (*switch.needs, *switch.excludes):
            assert rule.switch in NAMES
            assert not rule.setting or rule.setting in get_switch(rule.switch).settings
        for implication in switch.implies:
            assert implication.setting in switch.settings
            assert {implication.sets, *implication.unless} <= set(get_settings())


def test_moments_follow_the_order_of_the_rows() -> None:
    moments = ["whole", "placed", "final"]
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


@pytest.mark.parametrize("switch", SWITCHES, ids=NAMES)
def test_nothing_of_a_switch_is_left_in_verifys_reference_run(switch: Switch) -> None:
    given = {name: give_other_value(name) for name in switch.settings}
    args = parse_arguments(["--task", "causal_lm"]).replace("test", **given)
    job = Job(
        folder="/nowhere", kind="whole", updates=1, processes=2, is_full_size=True,
        global_batch_size=4, micro_batch_size=4,
    )  # fmt: skip
    reference = change_settings(args, job)
    assert {name: getattr(reference, name) for name in switch.settings} == switch.get_off_values()


def get_flags(switch: Switch) -> list[str]:
    name = switch.turned_on_by[0]
    return [switch.describe(), *([] if get_settings()[name].kind is bool else ["2"])]


@pytest.mark.parametrize(
    ("switch", "rule"),
    [
        (switch, rule)
        for switch in SWITCHES
        for rule in switch.excludes
        if switch.name != "DeepSpeed"
    ],
    ids=lambda value: value.name if isinstance(value, Switch) else value.switch,
)
def test_pairs_that_exclude_each_other_are_refused_with_the_reason(
    switch: Switch, rule: Rule
) -> None:
    other = get_flags(get_switch(rule.switch)) + (rule.describe().split() if rule.setting else [])
    args = parse_arguments([*get_flags(switch), *other])
    found = find_problems(args.replace("test", world_size=4))
    start = f"{switch.describe()} cannot be combined with {rule.describe()}: {rule.reason}"
    assert any(problem.startswith(start) for problem in found), found


def test_flags_that_mean_the_same_do_not_contradict_each_other() -> None:
    args = resolve(parse_arguments(["--mixed-precision", "--fp16"]))
    assert args.mixed_precision == "fp16"
    resolve(parse_arguments(["--zero-3-memory-optimization", "--fsdp-memory-optimization"]))
    with pytest.raises(ConfigurationError, match="exclude each other"):
        resolve(parse_arguments(["--zero-2-memory-optimization", "--fsdp-memory-optimization"]))
