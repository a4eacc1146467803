"""Task names to tasks. Importing this imports no torch: `rapidformer tasks` answers at once."""

from __future__ import annotations

import difflib
import functools

from rapidformer.errors import ConfigurationError
from rapidformer.tasks.base import Task
from rapidformer.tasks.causal_lm import CausalLM
from rapidformer.tasks.image_classification import ImageClassification
from rapidformer.tasks.masked_lm import MaskedLM
from rapidformer.tasks.multiple_choice import MultipleChoice
from rapidformer.tasks.question_answering import QuestionAnswering
from rapidformer.tasks.seq2seq_lm import Seq2SeqLM
from rapidformer.tasks.sequence_classification import SequenceClassification
from rapidformer.tasks.token_classification import TokenClassification

_TASKS: tuple[type[Task], ...] = (
    SequenceClassification,
    TokenClassification,
    QuestionAnswering,
    MaskedLM,
    CausalLM,
    Seq2SeqLM,
    MultipleChoice,
    ImageClassification,
)


@functools.cache
def list_tasks() -> tuple[Task, ...]:
    """Every task, in the order in which they are shown."""
    return tuple(task() for task in _TASKS)


def get_task(name: str) -> Task:
    """The task of that name or alias."""
    normal = name.lower().replace("-", "_")
    for task in list_tasks():
        if normal == task.name or normal in task.aliases:
            return task
    names = [known for task in list_tasks() for known in (task.name, *task.aliases)]
    near = difflib.get_close_matches(normal, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    known = ", ".join(task.name for task in list_tasks())
    raise ConfigurationError(f"--task {name} is not a task: use one of {known}.{hint}")
