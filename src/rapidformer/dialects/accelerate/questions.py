"""The questions of ``accelerate config`` in their order, for those who know them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Ask = Callable[[str, str, str, Callable[[str], str]], str]
"""name, question, default, check -> answer"""

START = "0"
"""The first answer, "This machine", to our first question starts this dialogue."""
_MACHINES = ("no distributed training", "multi-CPU", "multi-GPU")


def ask_as_accelerate(ask: Ask) -> dict[str, Any]:
    """The settings that the answers after the first mean."""
    listed = ", ".join(f"[{number}] {name}" for number, name in enumerate(_MACHINES))
    kind = ask("machine", f"Which type of machine are you using? ({listed})", "0", _check_machine)
    machines = int(ask("machines", "How many different machines will you use?", "1", check_number))
    values: dict[str, Any] = {}
    if _ask_yes(ask, "Do you want to use DeepSpeed? [yes/NO]"):
        values["zero_2_memory_optimization"] = True
    total = int(ask("total", "How many processes in total will you use?", "1", check_number))
    if _ask_yes(ask, "Do you wish to use FP16 (mixed precision)? [yes/NO]"):
        values["mixed_precision"] = "fp16"
    if kind != "0":
        values["device"] = "cpu" if kind == "1" else "cuda"
    if machines > 1:
        values["nnodes"] = machines
    return {**values, "nproc_per_node": max(total // machines, 1)}


def _ask_yes(ask: Ask, question: str) -> bool:
    return ask("yes_or_no", question, "no", _check_yes)[0].lower() == "y"


def check(words: str, is_right: Callable[[str], bool], answer: str) -> str:
    """The answer, if it is right; ``words`` say what is."""
    if not is_right(answer):
        raise ValueError(f"must be {words}, not {answer!r}.")
    return answer


_check_machine = partial(check, "0, 1 or 2", lambda answer: answer in ("0", "1", "2"))
check_number = partial(
    check, "a whole number of at least 1", lambda answer: answer.isdecimal() and int(answer) > 0
)
_check_yes = partial(check, "yes or no", lambda answer: answer.lower() in ("y", "yes", "n", "no"))
