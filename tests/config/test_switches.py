"""The table of switches: no setting without a row, and everything that is derived from rows."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rapidformer.config import Settings, parse_arguments, resolve
from rapidformer.config.explain import list_missed
from rapidformer.config.row import _ROWS as ROWS
from rapidformer.config.row import Rule
from rapidformer.config.schema import get_settings
from rapidformer.config.sections import AccelerationArguments, ParallelArguments
from rapidformer.config.switches import (
    SWITCHES,
    Situation,
    Switch,
    get_switch,
)
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError
from rapidformer.verification.settings import Job, change_settings

NAMES = [switch.name for switch in SWITCHES]
SETTINGS = get_settings()


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
            assert {rule.switch, rule.beside} - {""} <= set(NAMES)
            assert rule.describe() and (rule.switch or not rule.beside)
            row = get_switch(rule.switch) if rule.switch else switch
            assert not rule.setting or rule.setting in (row.settings if rule.switch else SETTINGS)
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


def find_reason(switch: Switch, args: Settings, situation: Situation) -> str:
    obstacle = switch.find_obstacle(args, situation)
    return "" if obstacle is None else obstacle.reason


def test_a_switch_that_was_not_asked_for_gives_way() -> None:
    args = parse_arguments(["--expert-model-parallel-size", "2"]).replace("test", world_size=2)
    assert not [p for p in find_problems(args) if "cannot be combined" in p]
    row = get_switch("dynamic shape")
    assert row.is_on(args) and not row.is_asked(args)
    place = Situation(device="cpu")
    assert "not been tried together" in find_reason(row, args, place)
    assert "CUDA device" in find_reason(get_switch("CUDA graph"), args, place)


@pytest.mark.parametrize(
    ("by_itself", "asked"), [(True, False), (False, True), (True, True), (False, False)]
)
def test_an_exclusion_works_from_either_side(
    by_itself: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that was asked for stays beside one that was not, whichever of them has the rule."""
    first = ("activation_offload",) if asked else ()
    second = () if by_itself else ("cpu_offload",)
    one = Switch("one", turned_on_by=first, excludes=(Rule("two", "both cannot be"),))
    two = Switch("two", turned_on_by=second)
    for row in (one, two):
        monkeypatch.setitem(ROWS, row.name, row)
    args = parse_arguments(["--activation-offload", "--cpu-offload"])
    reasons = [find_reason(row, args, Situation()) for row in (one, two)]
    assert bool(reasons[0]) == (not by_itself or not asked)
    assert bool(reasons[1]) == asked
    assert all(reason.endswith(": both cannot be") for reason in filter(None, reasons))


def test_a_run_is_not_told_to_add_what_would_be_refused() -> None:
    place = Situation(device="cuda", precision="fp32")
    assert "--compile" in str(list_missed(parse_arguments([]), place, 1000))
    args = parse_arguments(["--dynamic-shape", "on"])
    assert "--compile" not in str(list_missed(args, place, 1000))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_zero_costs(stage: int) -> None:
    """Nothing on one rank; on several, the graphs of prediction, but not those of training."""
    flag = f"--zero-{stage}-memory-optimization"
    args = parse_arguments([flag, "--mixed-precision"])
    two = args.replace("test", world_size=2)
    for name in ("CUDA graph", "forward graphs"):
        place = Situation(device="cuda", precision="bf16", is_training=name == "CUDA graph")
        assert not find_reason(get_switch(name), args, place)
        reason = find_reason(get_switch(name), two, place)
        assert flag in reason if name != "CUDA graph" else not reason


def test_a_refusal_says_once_what_to_do() -> None:
    args = parse_arguments(["--dynamic-shape", "on", "--compile"])
    row, place = get_switch("dynamic shape"), Situation(device="cuda", precision="fp32")
    refusal = row.refuse(args, find_reason(row, args, place))
    assert refusal.endswith("Add --mixed-precision, or leave out --dynamic-shape.")
    elsewhere = find_reason(row, args, Situation(device="mps"))
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
