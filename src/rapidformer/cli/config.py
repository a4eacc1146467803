"""``rapidformer config``: ask questions, and write a YAML file, which is read only by --config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rapidformer.cli.own_flags import CommandParser
from rapidformer.config import get_settings
from rapidformer.config.switches import SWITCHES, to_flag
from rapidformer.dialects.accelerate.file import START, ask_as_accelerate, check, check_number
from rapidformer.errors import ConfigurationError
from rapidformer.launch.environment import count_gpus

_DEFAULT_FILE = "rapidformer.yaml"
_QUESTIONS = [switch.question for switch in SWITCHES if switch.question is not None]
_MEETING = ("variables", "hostfile", "slurm")


@dataclass
class _Questions:
    """Asks on the terminal, except for answers that were given or if asking is off."""

    answers: dict[str, str | None]
    """Those that were given as flags."""
    is_asking: bool

    def ask(self, name: str, question: str, default: str, check: Callable[[str], str] = str) -> str:
        """An answer that passes the check; asks again after a wrong one."""
        answer = self.answers.get(name)
        if answer is not None:
            try:
                return check(answer)
            except ValueError as reason:
                raise ConfigurationError(f"{to_flag(name)}: {reason}") from None
        while self.is_asking:
            sys.stdout.write(f"{question} [{default}]: ")
            sys.stdout.flush()
            line = sys.stdin.readline()
            if not line:
                sys.stdout.write("\n")
                raise ConfigurationError(
                    "the input ended before all questions were answered: nothing was written. "
                    "--yes accepts the defaults, and each answer has a flag."
                )
            try:
                return check(line.strip() or default)
            except ValueError as reason:
                sys.stdout.write(f"  {reason}\n")
        return check(default)


def run(argv: list[str]) -> None:
    options = vars(_build_parser().parse_args(argv))
    path = Path(options.pop("output")).expanduser()
    is_overwriting, takes_defaults = options.pop("overwrite"), options.pop("yes")
    if path.exists() and not is_overwriting:
        raise ConfigurationError(
            f"{path} already exists: choose another --output, or add --overwrite."
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--output {path}: there is no folder {path.parent}.")
    if not takes_defaults and not sys.stdin.isatty() and sys.stdin.closed:
        raise ConfigurationError("there is no terminal to ask on: add --yes.")
    values, notes = _collect(_Questions(options, is_asking=not takes_defaults))
    path.write_text(_render(values, notes, path), encoding="utf-8")
    sys.stdout.write(
        f"written: {path}\n"
        f"rapidformer --config {path} ...   or   rapidformer launch --config {path} SCRIPT ...\n"
    )


def _collect(questions: _Questions) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    notes: list[str] = []
    gpus = count_gpus()
    default = "cuda" if gpus else "cpu"
    device = questions.ask("device", "Which device? (cpu, cuda)", default, _check_device)
    if device == START:
        return ask_as_accelerate(questions.ask), []
    values["device"] = device
    nodes = int(questions.ask("nnodes", "How many machines?", "1", check_number))
    if nodes > 1:
        values |= _ask_about_nodes(questions, nodes, notes)
    if "hostfile" not in values:
        default = str(gpus or 1) if values["device"] == "cuda" else "1"
        text = "How many processes per machine?"
        values["nproc_per_node"] = int(questions.ask("nproc_per_node", text, default, check_number))
    for question in _QUESTIONS:
        choices = _one_of(("no", *question.answers))
        answer = questions.ask(question.flag, question.text, "no", choices)
        values |= question.answers.get(answer, {})
    return values, notes


def _ask_about_nodes(questions: _Questions, nodes: int, notes: list[str]) -> dict[str, Any]:
    text = (
        "How are they started? (variables: run the command on each, with NODE_RANK; hostfile: over "
        "ssh from one; slurm: with srun)"
    )
    way = questions.ask("start", text, "variables", _one_of(_MEETING))
    if way == "slurm":
        notes.append(f"{nodes} nodes: srun --ntasks-per-node=1 determines how many and which.")
        return {}
    if way == "hostfile":
        text = "Where is the hostfile (lines `host slots=N`)?"
        return {"hostfile": questions.ask("hostfile", text, "hostfile")}
    text = "What is the address of the first machine?"
    address = questions.ask("master_addr", text, "127.0.0.1", _check_address)
    port = questions.ask("master_port", "Which port is free there?", "29500", _check_port)
    notes.append("on each machine, put NODE_RANK=0 (on the first), 1, ... before the command")
    return {"nnodes": nodes, "master_addr": address, "master_port": int(port)}


def _render(values: dict[str, Any], notes: Sequence[str], path: Path) -> str:
    import yaml

    settings = get_settings()
    lines = [f"# rapidformer --config {path.name} ...", *(f"# {note}" for note in notes)]
    for name, value in values.items():
        text = yaml.safe_dump({name: value}, default_flow_style=False).strip()
        lines.append(f"{text:<40} # {settings[name].help}")
    return "\n".join(lines) + "\n"


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def check(answer: str) -> str:
        text = answer.lower()
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {answer!r}.")
        return text

    return check


def _check_device(answer: str) -> str:
    return answer if answer == START else _one_of(("cpu", "cuda"))(answer)


_check_port = partial(
    check, "a port of at most 65535", lambda answer: answer.isdecimal() and 0 < int(answer) < 65536
)
_check_address = partial(check, "a name or an address", lambda answer: len(answer.split()) == 1)


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer config",
        description="Ask a few questions and write a file for --config. Each answer has a flag; "
        "questions that a flag answers are skipped.",
        allow_abbrev=False,
    )
    parser.add("--output", "FILE", "the file to write", default=_DEFAULT_FILE)
    parser.add("--overwrite", "", "overwrite an existing file")
    parser.add("--yes", "", "ask nothing: use the defaults for the rest")
    for name, text in (
        ("device", "cpu or cuda"),
        ("nnodes", "number of machines"),
        ("start", "variables, hostfile or slurm"),
        ("hostfile", "file with lines `host slots=N`"),
        ("master-addr", "address of the first machine"),
        ("master-port", "a free port there"),
        ("nproc-per-node", "processes per machine"),
        *((question.flag, f"no, {', '.join(question.answers)}") for question in _QUESTIONS),
    ):
        parser.add(to_flag(name), "ANSWER", text)
    return parser
