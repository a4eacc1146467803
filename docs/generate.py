"""Make pages and tables of the docs from the code itself; a test checks that they are fresh.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from rapidformer.config import get_settings
from rapidformer.config.dialects import ALIASES
from rapidformer.config.flagai_names import FLAGAI
from rapidformer.config.foreign_names import ForeignName
from rapidformer.config.hugging_face_names import HUGGING_FACE
from rapidformer.config.switches import SWITCHES, Switch, get_switch, to_flag
from rapidformer.tasks.registry import PRETRAINING, PRETRAINING_DESCRIPTION, list_tasks
from rapidformer.training.trainer.arguments import TrainingArguments

FOLDER = Path(__file__).parent


def render_settings() -> str:
    """Every setting, with the names that other systems have for it."""
    names: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        names.setdefault(name, []).append(f"`{alias}`")
    lines = [
        "# Every setting",
        "",
        "As a flag with dashes; as a YAML key (`--config FILE`) and an attribute of the arguments",
        "with underscores. A switch has a `--no-` form. Precedence: code or flag, YAML, default.",
        "Made by `docs/generate.py` from `config/sections.py`.",
    ]
    for section, settings in groupby(get_settings().values(), key=lambda setting: setting.section):
        lines += ["", f"## {section}", "", "| flag | default | meaning | also known as |"]
        lines.append("|---|---|---|---|")
        for setting in settings:
            choices = f" ({', '.join(setting.choices)})" if setting.choices else ""
            default = "" if setting.default in (None, False) else f"`{setting.default}`"
            meaning = (setting.help + choices).replace("|", "\\|")
            also = ", ".join(names.get(setting.name, []))
            lines.append(f"| `{setting.flag}` | {default} | {meaning} | {also} |")
    return "\n".join(lines) + "\n"


def render_tasks() -> str:
    """Every task, with the columns it looks for."""
    lines = [
        "# Tasks and data",
        "",
        "`rapidformer --task NAME`. Made by `docs/generate.py` from the tasks themselves.",
        "",
        "**Data** (`--data-path`, `--data-name`): a name on the Hub; a file or folder of json,",
        "jsonl, csv, tsv, parquet or arrow, where the file's name tells the split (train,",
        "validation, test); or a `save_to_disk` folder. `--train-data`, `--valid-data` and",
        "`--test-data` name files outright. **Models**: a name on the Hub or a local folder;",
        "`--from-scratch` takes only the configuration; `--model-type bert --num-layers …` builds",
        "one from sizes.",
        "",
        "Columns are found by name, in the order given; a flag names another. Accuracy, F1 and",
        "correlations are at most 1; EM/F1 of answers, BLEU and ROUGE are percentages. `loss` is",
        "the exact mean over the whole split.",
    ]
    for task in list_tasks():
        also = f" (also: {', '.join(task.aliases)})" if task.aliases else ""
        lines += ["", f"## {task.name}", "", f"{task.description}{also}.", ""]
        lines += ["| column | holds | names tried | flag |", "|---|---|---|---|"]
        for role in task.columns:
            need = "" if role.required else " (optional)"
            names = ", ".join(f"`{name}`" for name in role.candidates)
            lines.append(f"| {role.name}{need} | {role.holds} | {names} | `{role.flag}` |")
    lines += ["", f"## {PRETRAINING}", "", f"{PRETRAINING_DESCRIPTION}."]
    lines += ["Data, flags and examples: [pre-training](pretraining.md)."]
    return "\n".join(lines) + "\n"


def render_switches() -> str:
    """The table of switches, in the order in which they are applied."""
    lines = [
        "| switch | settings | exact? | with `--deepspeed` | `verify` |",
        "|---|---|---|---|---|",
    ]
    settings = get_settings()
    verified = {"off": "compares it", "left out": "leaves it out", "refused": "refuses it"}
    for switch in SWITCHES:
        if switch.settings:
            flags = [f"`{settings[name].flag}`: {settings[name].help}" for name in switch.settings]
            lines.append(
                f"| {switch.name} | {'<br>'.join(flags)} | {switch.exact} "
                f"| {_describe_with_deepspeed(switch)} | {verified[switch.verification]} |"
            )
    return "\n".join(lines) + "\n"


def _describe_with_deepspeed(switch: Switch) -> str:
    deepspeed = get_switch("DeepSpeed")
    if switch is deepspeed:
        return ""
    if any(rule.switch == switch.name for rule in deepspeed.excludes):
        return "refused"
    return "done by DeepSpeed" if switch.done_by_deepspeed else "applied"


def render_exclusions() -> str:
    """Which switches cannot be combined, with the reason that an error gives."""
    lines = ["| switch | cannot be combined with | why, or what to do |", "|---|---|---|"]
    for switch in SWITCHES:
        for rule in switch.excludes:
            other = f"{rule.switch} (`{rule.describe()}`)"
            lines.append(f"| {switch.name} (`{switch.describe()}`) | {other} | {rule.reason} |")
    for switch in SWITCHES:
        if switch.turned_on_by and switch.needs:
            needed = " or ".join(f"`{rule.describe()}`" for rule in switch.needs)
            without = "a run without" if len(switch.needs) == 1 else "a run without either"
            effect = "refused" if switch.is_refused_alone else "no effect, and a warning"
            own = to_flag(switch.turned_on_by[0])
            lines.append(f"| {switch.name} (`{own}`) | {without} {needed} | {effect} |")
    return "\n".join(lines) + "\n"


def render_hugging_face() -> str:
    """What becomes of every name of transformers' TrainingArguments."""
    lines = ["| name | default | here | |", "|---|---|---|---|"]
    for each in dataclasses.fields(TrainingArguments):
        row = HUGGING_FACE[each.name]
        make: Any = each.default_factory
        default = make() if make is not dataclasses.MISSING else each.default
        lines.append(_render_name(each.name, default, row))
    return "\n".join(lines) + "\n"


def render_flagai() -> str:
    """What becomes of every argument of FlagAI's Trainer."""
    lines = ["| name | default | here | |", "|---|---|---|---|"]
    lines += [_render_name(name, default, row) for name, (default, row) in FLAGAI.items()]
    return "\n".join(lines) + "\n"


def _render_name(name: str, default: Any, row: ForeignName) -> str:
    ours = f"`--{row.setting.replace('_', '-')}`" if row.setting else row.outcome
    return f"| `{name}` | `{default!r}` | {ours} | {row.note} |"


def render_aliases() -> str:
    """Every other name of a setting."""
    lines = ["| name | here |", "|---|---|"]
    lines += [f"| `{name}` | `--{ours.replace('_', '-')}` |" for name, ours in ALIASES.items()]
    return "\n".join(lines) + "\n"


TABLES = {
    ("coming_from.md", "hugging-face"): render_hugging_face,
    ("coming_from.md", "flagai"): render_flagai,
    ("coming_from.md", "aliases"): render_aliases,
    ("switches.md", "switches"): render_switches,
    ("parity.md", "exclusions"): render_exclusions,
}


def fill_tables(page: str, text: str) -> str:
    """A page with its tables made anew, each between two comments that name it."""
    for (owner, name), render in TABLES.items():
        if owner == page:
            begin, end = f"<!-- {name}: made by docs/generate.py -->\n", f"<!-- end of {name} -->"
            before, rest = text.split(begin)
            text = before + begin + "\n" + render() + "\n" + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    for name in {page for page, _ in TABLES}:
        filled = fill_tables(name, (FOLDER / name).read_text(encoding="utf-8"))
        (FOLDER / name).write_text(filled, encoding="utf-8")
    (FOLDER / "settings.md").write_text(render_settings(), encoding="utf-8")
    (FOLDER / "tasks.md").write_text(render_tasks(), encoding="utf-8")
