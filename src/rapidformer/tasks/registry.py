"""Look up tasks by name, and the flags that a task does not read. Imports no torch."""

from __future__ import annotations

from rapidformer.config import Settings
from rapidformer.config.schema import Setting, get_settings
from rapidformer.config.task_names import read_task
from rapidformer.errors import ConfigurationError
from rapidformer.nearest import suggest
from rapidformer.tasks.base import Task
from rapidformer.tasks.causal_lm import CausalLM
from rapidformer.tasks.distillation import Distillation
from rapidformer.tasks.embedding.embedding import Embedding
from rapidformer.tasks.embedding.reranking import Reranking
from rapidformer.tasks.grpo.task import Grpo
from rapidformer.tasks.image_classification import ImageClassification
from rapidformer.tasks.image_text.image_text import ImageText
from rapidformer.tasks.masked_lm import MaskedLM
from rapidformer.tasks.multiple_choice import MultipleChoice
from rapidformer.tasks.preference.preference import Preference
from rapidformer.tasks.preference.reward import Reward
from rapidformer.tasks.question_answering import QuestionAnswering
from rapidformer.tasks.seq2seq_lm import Seq2SeqLM
from rapidformer.tasks.sequence_classification import SequenceClassification
from rapidformer.tasks.speech.classification import AudioClassification
from rapidformer.tasks.speech.recognition import SpeechRecognition
from rapidformer.tasks.token_classification import TokenClassification

PRETRAINING = "pretraining"
PRETRAINING_DESCRIPTION = (
    "Train a model on raw text in .bin/.idx files: a decoder on next tokens, an encoder on "
    "masked tokens, an encoder-decoder on masked spans"
)
_TASKS: tuple[Task, ...] = (
    SequenceClassification(), TokenClassification(), QuestionAnswering(), MaskedLM(), CausalLM(),
    Seq2SeqLM(), MultipleChoice(), ImageClassification(), SpeechRecognition(),
    AudioClassification(), Distillation(), Preference(), Reward(), Grpo(), Embedding(), Reranking(),
    ImageText(),
)  # fmt: skip


def list_tasks() -> tuple[Task, ...]:
    """Every task, in display order."""
    return _TASKS


def is_pretraining(name: str | None) -> bool:
    """Whether this is pre-training, whose data is a corpus in files and not a table of rows."""
    return name is not None and name.lower().replace("-", "_") == PRETRAINING


def get_task(name: str) -> Task:
    normal, _ = read_task(name)
    for task in list_tasks():
        if normal == task.name:
            return task
    if is_pretraining(name):
        raise ConfigurationError(
            "--task pretraining only trains and evaluates: to use a pre-trained model, run "
            "`rapidformer predict --task causal_lm` or `--task masked_lm`."
        )
    names = [known for task in list_tasks() for known in (task.name, *task.aliases)] + [PRETRAINING]
    known = ", ".join([*(task.name for task in list_tasks()), PRETRAINING])
    hint = suggest(name.lower().replace("-", "_"), names)
    raise ConfigurationError(f"--task {name} is not a task: use one of {known}.{hint}")


def describe_unused_flags(args: Settings, task: Task) -> str | None:
    """One sentence about every flag that the user gave and the task does not read."""
    changed = [setting for setting in get_settings().values() if args.is_changed(setting.name)]
    unused = [setting.flag for setting in changed if not _is_read(setting, task)]
    return f"no effect with --task {task.name}: {', '.join(unused)}." if unused else None


def _is_read(setting: Setting, task: Task) -> bool:
    if setting.tasks:
        return not {task.name, *task.reads_as}.isdisjoint(setting.tasks)
    readers = [t for t in list_tasks() if any(role.setting == setting.name for role in t.columns)]
    return not readers or task in readers
