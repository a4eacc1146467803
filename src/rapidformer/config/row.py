"""What a row of the table of switches says; the rows themselves are in ``switches.py``.

A row is one change that the library makes to a model, an optimizer or a process. Refusals, start-up
lines, ``verify``, ``explain`` and the docs' tables follow from it: no module has rules of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from rapidformer.config.effect import Effect
from rapidformer.config.schema import get_settings, to_flag
from rapidformer.config.settings import Settings
from rapidformer.errors import end_sentence

Kind = Literal["asked", "automatic", "always"]
"""asked: a setting turns it on; automatic: on wherever it applies, with a start-up line; always:
the same, but silent by nature: start-up only lists its name."""

Moment = Literal["whole", "weights", "placed", "final"]
"""When a row is applied. whole: to the model as built, before its weights are moved; weights: they
are on the device, and not yet equal on every rank; placed: they are equal; final: no parameter is
replaced any more."""

Verification = Literal["off", "left out", "kept", "refused"]
"""What ``rapidformer verify`` does with a switch. off: on in the verified run, off in the reference
run; left out: off in both, for the reason given; kept: on in both, since it says what is trained;
refused: the run cannot be verified."""

UnderDeepSpeed = Literal["applied", "done by DeepSpeed", "not applied"]

Phase = Literal["", "training", "prediction"]
"""What a model is composed for; empty: either."""

IfAsked = Literal["refused", "warned of", "left off"]
"""What becomes of a switch that the user insists on and that cannot be applied. Any other is left
off. Left off, without a warning: what it would do is done, or not needed, in such a run."""

_ROWS: dict[str, Switch] = {}

AUTO = "auto"
"""The value of a setting that leaves the decision to the library."""
_EXCLUDED = "it does not combine with "


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides beside the settings; None: not known yet."""

    device: str | None = None
    """Its type: ``cpu``, ``cuda``."""
    precision: str | None = None
    """``fp32``, ``bf16`` or ``fp16``."""
    is_training: bool = True

    @property
    def phase(self) -> Phase:
        """What the model is composed for."""
        return "training" if self.is_training else "prediction"


@dataclass(frozen=True)
class Obstacle:
    """Why a switch that is on by the settings is not applied in a run."""

    reason: str
    if_asked: IfAsked = "refused"


@dataclass(frozen=True)
class Rule:
    """Another switch, values of a setting or a kind of run, and why it matters here."""

    switch: str = ""
    """Empty: the rest alone decides."""
    reason: str = ""
    _: KW_ONLY
    setting: str = ""
    values: tuple[Any, ...] = ()
    """Those of the setting for which it holds; empty: all but its default."""
    beside: str = ""
    """A second switch that must be on as well."""
    among_replicas: bool = False
    """Whether it only holds if several ranks have different tokens."""
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    """The devices and precisions on which it holds; empty: all."""
    only_in: Phase = ""
    if_asked: IfAsked = "refused"
    """What becomes of a switch that it excludes, if the user insists on that."""

    def is_given(self, args: Settings) -> bool:
        """Whether the settings say so, whatever comes of that in this run."""
        names = filter(None, (self.switch, self.beside))
        return self.has_value(args) and all(get_switch(name).is_on(args) for name in names)

    def has_value(self, args: Settings) -> bool:
        """Whether its setting has one of its values; also if it is about none."""
        if not self.setting:
            return True
        value, default = getattr(args, self.setting), get_settings()[self.setting].default
        return value in self.values if self.values else bool(value != default)

    def holds(
        self, args: Settings, situation: Situation | None = None, *, if_unknown: bool = False
    ) -> bool:
        """Whether it is so in this run; ``if_unknown``: also if that is not known yet."""
        situation = situation or Situation()
        return (
            self.is_given(args)
            and self.fits(args, situation, if_unknown=if_unknown)
            # What has no effect itself matters to nothing else.
            and all(get_switch(s).counts(args, situation) for s in (self.switch, self.beside) if s)
        )

    def fits(self, args: Settings, situation: Situation, *, if_unknown: bool = False) -> bool:
        """Whether it speaks of such a run."""
        return (
            (not self.among_replicas or args.num_replicas > 1)
            and _admits(self.devices, situation.device, if_unknown=if_unknown)
            and _admits(self.precisions, situation.precision, if_unknown=if_unknown)
            and self.only_in in ("", situation.phase)
        )

    def describe(self, args: Settings | None = None) -> str:
        """The flag to name in a message: the one given, or the switch's first."""
        if self.setting:
            value = f" {self.values[0]}" if self.values and self.values[0] is not True else ""
            return to_flag(self.setting) + value
        if self.switch:
            words = [get_switch(name).describe(args) for name in (self.switch, self.beside) if name]
            return " and ".join(words)
        if self.among_replicas:
            return "several data-parallel ranks"
        devices = [f"a {name.upper()} device" for name in self.devices]
        return " or ".join(devices or [f"a run in {name}" for name in self.precisions])


@dataclass(frozen=True)
class Implication:
    """A setting that sets another one, unless that one or one of ``unless`` is set."""

    setting: str
    sets: str
    to: Any
    unless: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """What ``rapidformer config`` asks about a switch; the answer ``no`` leaves it off."""

    flag: str
    text: str
    answers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Switch:
    """One switch: everything about it except the code that applies it."""

    name: str
    """Its name in start-up lines and docs."""
    does: str = ""
    """What it does, in a sentence; if empty, the help text of its first setting says so."""
    _: KW_ONLY
    kind: Kind = "asked"
    gain: str = ""
    """What was measured; only figures that stand in docs/speed.md or docs/performance.md."""
    times: Mapping[str, float] = field(default_factory=dict)
    """How many times as fast that was, by the type of device. A run that leaves it off is told."""
    pays_from: int = 0
    """Steps of a run from which on it takes less time than it saves."""

    turned_on_by: tuple[str, ...] = ()
    """Any of these settings turns it on. If empty, it is on whenever its needs are met."""
    on_values: tuple[str, ...] = ()
    """The values that turn it on, if not every value but the one that turns it off."""
    options: tuple[str, ...] = ()
    """Settings that configure it; without effect while it is off."""
    off: Mapping[str, Any] = field(default_factory=dict)
    """The values that turn it off, if those are not the defaults."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """What each setting that turns it on stands for; two different ones exclude each other."""
    is_needed: bool = False
    """Whether results would be wrong without it, so that ``--without`` does not take its name."""

    module: str = ""
    """The module with its ``apply``, under ``accel``; empty if another row's module applies it."""
    moment: Moment = "placed"
    only_in: Phase = ""
    """What a model must be composed for; otherwise it is left out."""
    under_deepspeed: UnderDeepSpeed = "applied"

    devices: tuple[str, ...] = ()
    """The types of device that it works on; empty: any."""
    precisions: tuple[str, ...] = ()
    """The precisions that it works in; empty: any."""
    is_idle_elsewhere: bool = False
    """Whether it has no effect on other devices, and says so, instead of being refused."""

    package: str = ""
    """An optional package that it needs."""
    needs: tuple[Rule, ...] = ()
    """One of these must hold, or it has no effect."""
    is_refused_alone: bool = False
    """Whether unmet needs are an error rather than a warning."""
    excludes: tuple[Rule, ...] = ()
    """Each pair once, on either side. If both were asked for, they are refused; if one was, the
    other is off; if none was, this one is."""
    excludes_adapters: Mapping[str, str] = field(default_factory=dict)
    """Kinds of adapter (``prompt``: all with learned tokens) that it excludes, and why."""
    implies: tuple[Implication, ...] = ()

    verification: Verification = "off"
    why: str = ""
    """Why verification cannot compare it."""
    verified_with: Mapping[str, Any] = field(default_factory=dict)
    """What a verified run uses of its settings where they are left to the library."""
    question: Question | None = None
    exact: str = "to 1e-6"
    """For the docs: how closely its result matches a run without it."""
    effect: Effect = field(default_factory=Effect)
    """For ``rapidformer plan``."""

    @property
    def settings(self) -> tuple[str, ...]:
        """All of its settings."""
        return (*self.turned_on_by, *self.options)

    @property
    def word(self) -> str:
        """Its name for ``--without``."""
        return self.name.lower().replace(" ", "-")

    @property
    def has_word(self) -> bool:
        """Whether ``--without`` turns it off."""
        return not self.turned_on_by and not self.options and not self.is_needed

    def is_on(self, args: Settings) -> bool:
        """Whether the settings turn it on, or do not turn it off."""
        if not self.turned_on_by:
            return self.word not in (args.without or ())
        if self.on_values:
            return any(getattr(args, name) in self.on_values for name in self.turned_on_by)
        return any(getattr(args, name) != self._get_off_value(name) for name in self.turned_on_by)

    def is_asked(self, args: Settings) -> bool:
        """Whether the user insists: it is refused, not left off, if it cannot be applied."""
        if not self.is_on(args):
            return False
        can_choose = any(get_settings()[name].default == AUTO for name in self.turned_on_by)
        return any(
            getattr(args, name) not in (self._get_off_value(name), *[AUTO] * can_choose)
            for name in self.turned_on_by
        )

    def has_what_it_needs(self, args: Settings, situation: Situation | None = None) -> bool:
        """Whether it would have an effect, as far as is known."""
        return not self.needs or any(
            rule.holds(args, situation, if_unknown=True) for rule in self.needs
        )

    def find_obstacle(self, args: Settings, situation: Situation) -> Obstacle | None:
        """Why it cannot be applied in this run, as far as settings, device and ranks show."""
        return self.find_own_obstacle(args, situation) or self._find_excluding(args, situation)

    def find_own_obstacle(self, args: Settings, situation: Situation) -> Obstacle | None:
        """The same by what this row says, so that each pair is found once."""
        rules = self.excludes
        return self._find_unfit(args, situation) or self._find_excluded(args, situation, rules)

    def _find_unfit(self, args: Settings, situation: Situation) -> Obstacle | None:
        """What stands in its way whatever it is combined with."""
        if self.only_in not in ("", situation.phase):
            return Obstacle(f"it is for {self.only_in}", "left off")
        uses_deepspeed = situation.is_training and get_switch("DeepSpeed").is_on(args)
        if self.under_deepspeed != "applied" and uses_deepspeed:
            return Obstacle(f"with --deepspeed it is {self.under_deepspeed}", "left off")
        if not self.has_what_it_needs(args, situation):
            needed = " or ".join(rule.describe() for rule in self.needs)
            if_asked: IfAsked = "refused" if self.is_refused_alone else "warned of"
            return Obstacle(f"it needs {needed}", if_asked)
        if not _admits(self.devices, situation.device):
            wanted, found = " or ".join(self.devices), situation.device or ""
            return Obstacle(
                f"it needs a {wanted.upper()} device, and this run is on {found.upper()}",
                "warned of" if self.is_idle_elsewhere else "refused",
            )
        if not _admits(self.precisions, situation.precision):
            words = " and ".join(self.precisions)
            return Obstacle(f"it works in {words}, and this run is in {situation.precision}")
        return None

    def _find_excluded(
        self, args: Settings, situation: Situation, rules: tuple[Rule, ...]
    ) -> Obstacle | None:
        for rule in rules:
            if rule.holds(args, situation):
                is_own = not rule.switch and (rule.setting in self.settings or not rule.setting)
                found = "" if is_own else f"{_EXCLUDED}{rule.describe(args)}: "
                return Obstacle(f"{found}{rule.reason}", rule.if_asked)
        return None

    def _find_excluding(self, args: Settings, situation: Situation) -> Obstacle | None:
        """Another row that excludes this one and was asked for."""
        for other in _ROWS.values():
            for rule in other.excludes:
                is_meant = self.name in (rule.switch, rule.beside) and rule.if_asked == "refused"
                stays = is_meant and other.is_asked(args)
                if stays and other._excludes(self, rule, args, situation):
                    return Obstacle(f"{_EXCLUDED}{other.describe(args)}: {rule.reason}")
        return None

    def _excludes(self, row: Switch, rule: Rule, args: Settings, situation: Situation) -> bool:
        """Whether this row stays and the other one cannot, if that was on, too."""
        rest = [get_switch(n) for n in (rule.switch, rule.beside) if n not in ("", row.name)]
        alone = tuple(each for each in self.excludes if not each.switch)
        return (
            rule.has_value(args)
            and rule.fits(args, situation)
            and all(other.is_on(args) for other in rest)
            and self._find_unfit(args, situation) is None
            and self._find_excluded(args, situation, alone) is None
        )

    def applies(self, args: Settings, situation: Situation) -> bool:
        """Whether it is on and nothing is in its way, as far as is known before it is applied."""
        return self.is_on(args) and self.find_obstacle(args, situation) is None

    def counts(self, args: Settings, situation: Situation) -> bool:
        """Whether others must take it into account: it applies, or the user insists on it."""
        if not self.is_on(args):
            return False
        obstacle = self.find_obstacle(args, situation)
        return obstacle is None or (obstacle.if_asked == "refused" and self.is_asked(args))

    def refuse(self, args: Settings, reason: str) -> str:
        """The message about an obstacle; a rule's reason already says what to do."""
        says_what = reason.startswith(_EXCLUDED) or ". " in reason
        hint = "" if says_what else " Leave the flag out."
        return f"{self.describe(args)}: {end_sentence(reason)}{hint}"

    def list_given(self, args: Settings, names: tuple[str, ...] | None = None) -> list[str]:
        """Those of its settings (or of ``names``) that are not at their defaults."""
        names = self.settings if names is None else names
        if self.on_values and not self.is_on(args):
            return []
        return [name for name in names if getattr(args, name) != get_settings()[name].default]

    def get_off_values(self) -> dict[str, Any]:
        """The settings that turn it off."""
        return {name: self._get_off_value(name) for name in self.settings}

    def _get_off_value(self, name: str) -> Any:
        return self.off[name] if name in self.off else get_settings()[name].default

    def describe(self, args: Settings | None = None) -> str:
        """Its flag: the one that turned it on, or its first, with its value if it has a choice."""
        if not self.turned_on_by:
            return self.name
        given = self.list_given(args, self.turned_on_by) if args is not None else []
        name = (given or self.turned_on_by)[0]
        value = getattr(args, name) if given else next(iter(self.on_values), None)
        has_choices = bool(get_settings()[name].choices) and isinstance(value, str)
        return f"{to_flag(name)} {value}" if has_choices else to_flag(name)

    def find_contradiction(self, args: Settings) -> list[str]:
        """The flags that turn it on in different ways; empty if they agree."""
        given = self.list_given(args, self.turned_on_by) if self.kinds else []
        kinds = {name: self.kinds.get(name, getattr(args, name)) for name in given}
        if len(set(kinds.values()) - {AUTO}) < 2:
            return []
        return [
            to_flag(name) if name in self.kinds else f"{to_flag(name)} {kind}"
            for name, kind in kinds.items()
        ]


def register(*rows: Switch) -> tuple[Switch, ...]:
    """Make these rows known by name, so that others can refer to them."""
    _ROWS.update({row.name: row for row in rows})
    return rows


def get_switch(name: str) -> Switch:
    """The row of that name."""
    return _ROWS[name]


def _admits(values: tuple[str, ...], value: str | None, *, if_unknown: bool = True) -> bool:
    """Whether one of these is there, or any will do; ``if_unknown`` if that is not known yet."""
    return not values or (if_unknown if value is None else value in values)
