"""What a row of the table of switches says; the rows themselves are in ``switches.py``.

A row is one change that the library makes to a model, an optimizer or a process. Refusals, start-up
lines, ``verify``, ``explain`` and the docs' tables follow from it: no module has rules of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from rapidformer.config.schema import get_settings
from rapidformer.config.settings import Settings

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

_ROWS: dict[str, Switch] = {}

AUTO = "auto"
"""The value of a setting that leaves the decision to the library."""
_EXCLUDED = "it does not combine with "


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides beside the settings; None: not known yet."""

    device: str | None = None
    """Its type: ``cpu``, ``cuda``."""
    ranks: int | None = None
    precision: str | None = None
    """``fp32``, ``bf16`` or ``fp16``."""
    is_training: bool = True


@dataclass(frozen=True)
class Rule:
    """Another switch, or certain values of one of its settings, and why it matters here."""

    switch: str = ""
    """Empty: the setting's value alone decides."""
    reason: str = ""
    _: KW_ONLY
    setting: str = ""
    values: tuple[Any, ...] = ()
    among_ranks: bool = False
    """Whether it only holds in a run of several ranks."""
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    """The devices and precisions on which it holds; empty: all."""

    def holds(self, args: Settings, situation: Situation | None = None) -> bool:
        """Whether that switch is on, with one of the values if any are listed."""
        situation = situation or Situation()
        return (
            (not self.setting or getattr(args, self.setting) in self.values)
            and (not self.among_ranks or args.world_size > 1)
            and (not self.devices or situation.device in self.devices)
            and (not self.precisions or situation.precision in self.precisions)
            and (not self.switch or get_switch(self.switch).is_on(args))
        )

    def describe(self, args: Settings | None = None) -> str:
        """The flag to name in a message: the one given, or the switch's first."""
        if self.setting:
            value = "" if self.values[0] is True else f" {self.values[0]}"
            return to_flag(self.setting) + value
        return get_switch(self.switch).describe(args)


def not_with_images(reason: str) -> Rule:
    """What cannot be done to batches in which pixels of all images stand in one tensor."""
    return Rule(setting="task", values=("image_text",), reason=reason)


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


Kept = Literal["everything", "inputs", "products", "compiled"]
"""What a block keeps for its backward pass: all that autograd saves, its inputs alone, the results
of matrix products and attention, or what a compiled block saves."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a switch does to the memory and work of a run, as ``rapidformer plan`` adds them up."""

    keeps: Mapping[Any, Kept] = field(default_factory=dict)
    """What a block keeps, by the value of a setting that turns the switch on."""
    on_host: tuple[str, ...] = ()
    """Parts of the memory that move to the host."""
    shards_from: Mapping[str, int] = field(default_factory=dict)
    """Parts of the state that are sharded over the data-parallel ranks, from which stage on."""
    divides: Literal["", "layers", "stream", "tokens", "blocks", "experts"] = ""
    """What its size divides; the stream is what is between split layers."""
    moments: float | None = None
    """Bytes of optimizer state for each trained weight."""
    copies_gradients: Literal["", "always", "at the end"] = ""
    """When a second copy of all gradients is held."""
    takes: int = 0
    """Bytes that it takes whatever the model."""
    most_work: float | None = None
    """Operations of a micro-batch above which it is not worth its cost."""
    in_8_bits: bool = False
    """Whether the blocks' matrix products are in 8 bits."""


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
    is_for_training: bool = False
    """Whether it is left out if the model is only evaluated."""
    under_deepspeed: UnderDeepSpeed = "applied"

    devices: tuple[str, ...] = ()
    """The types of device that it works on; empty: any."""
    precisions: tuple[str, ...] = ()
    """The precisions that it works in; empty: any."""
    ranks: Literal["any", "several"] = "any"
    is_idle_elsewhere: bool = False
    """Whether it has no effect on other devices, and says so, instead of being refused."""

    package: str = ""
    """An optional package that it needs."""
    needs: tuple[Rule, ...] = ()
    """One of these must hold, or it has no effect."""
    is_refused_alone: bool = False
    """Whether unmet needs are an error rather than a warning."""
    excludes: tuple[Rule, ...] = ()
    """Each pair once, on either side. If it was asked for, the pair is refused, else it is off."""
    excludes_adapters: Mapping[str, str] = field(default_factory=dict)
    """Kinds of adapter (``prompt``: all with learned tokens) that it excludes, and why."""
    implies: tuple[Implication, ...] = ()

    verification: Verification = "off"
    why: str = ""
    """Why verification cannot compare it."""
    question: Question | None = None
    exact: str = "to 1e-6"
    """For the docs: how closely its result matches a run without it."""
    effect: Effect = Effect()
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
        off = self.get_off_values()
        values = {name: getattr(args, name) for name in self.turned_on_by}
        if self.on_values:
            return any(value in self.on_values for value in values.values())
        return any(value != off[name] for name, value in values.items())

    def is_asked(self, args: Settings) -> bool:
        """Whether the user insists: it is refused, not left off, if it cannot be applied."""
        off = self.get_off_values()
        can_choose = any(get_settings()[name].default == AUTO for name in self.turned_on_by)
        return self.is_on(args) and any(
            getattr(args, name) not in (off[name], *[AUTO] * can_choose)
            for name in self.turned_on_by
        )

    def has_what_it_needs(self, args: Settings) -> bool:
        """Whether it would have an effect."""
        return not self.needs or any(rule.holds(args) for rule in self.needs)

    def find_obstacle(self, args: Settings, situation: Situation) -> str | None:
        """Why it cannot be applied in this run, as far as settings, device and ranks show."""
        device, precision, ranks = situation.device, situation.precision, situation.ranks
        if self.is_for_training and not situation.is_training:
            return "it is for training"
        if device is not None and self.devices and device not in self.devices:
            wanted = " or ".join(kind.upper() for kind in self.devices)
            return f"it needs a {wanted} device, and this run is on {device.upper()}"
        if ranks == 1 and self.ranks == "several":
            return "it is for several ranks, and this run has one"
        if precision is not None and self.precisions and precision not in self.precisions:
            return f"it works in {' and '.join(self.precisions)}, and this run is in {precision}"
        for rule in self.excludes:
            if rule.holds(args, situation):
                if rule.setting in self.options:
                    return rule.reason
                return f"{_EXCLUDED}{rule.describe(args)}: {rule.reason}"
        return None

    def refuse(self, args: Settings, obstacle: str) -> str:
        """The message about an obstacle; a rule's reason already says what to do."""
        if obstacle.startswith(_EXCLUDED):
            return f"{self.describe(args)}: {end_sentence(obstacle)}"
        return f"{self.describe(args)}: {obstacle}. Leave the flag out."

    def list_given(self, args: Settings, names: tuple[str, ...] | None = None) -> list[str]:
        """Those of its settings (or of ``names``) that are not at their defaults."""
        names = self.settings if names is None else names
        if self.on_values and not self.is_on(args):
            return []
        return [name for name in names if getattr(args, name) != get_settings()[name].default]

    def get_off_values(self) -> dict[str, Any]:
        """The settings that turn it off."""
        return {name: get_settings()[name].default for name in self.settings} | dict(self.off)

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


def end_sentence(text: str) -> str:
    """With a full stop, unless the last sentence is in brackets and has its own."""
    return text if text.endswith(")") else f"{text}."


def to_flag(name: str) -> str:
    """A setting's name as a command-line flag."""
    return "--" + name.replace("_", "-")


def register(*rows: Switch) -> tuple[Switch, ...]:
    """Make these rows known by name, so that others can refer to them."""
    _ROWS.update({row.name: row for row in rows})
    return rows


def get_switch(name: str) -> Switch:
    """The row of that name."""
    return _ROWS[name]
