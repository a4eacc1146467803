"""The interface of a task: everything between the user's rows and the training loop.

Task modules import torch only inside methods, so that `rapidformer tasks` is instant. Evaluation is
exact: a record has a row's *summed* loss and its number of terms, and a tally gets each once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rapidformer.config import Settings
from rapidformer.config.task_names import ALIASES
from rapidformer.errors import DataError
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole, find_columns
from rapidformer.tasks.rows.rows import as_rows, get_column_names, get_first_table, get_splits

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rapidformer.objectives import Objective

Batch: TypeAlias = "dict[str, torch.Tensor]"
Record = dict[str, Any]
Records = Sequence[Record]
"""Those of a batch, one per row, perhaps not yet read off the device."""
Row = dict[str, Any] | str
"""A row to predict on; a plain string is the text of a row."""
Tables = Mapping[str, Any]
"""The rows of splits, by their names."""
Answers = list[dict[str, Any]]
IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A task's data, ready for loaders, and what its model and metrics need in addition."""

    train: Any | None = None
    validation: Any | None = None
    test: Any | None = None
    collate: Callable[[list[Any]], Batch]
    processor: Any
    """Tokenizer or image processor, saved with the model by ``save_pretrained``."""
    model_settings: dict[str, Any] = field(default_factory=dict)
    """Overrides of the model's configuration: num_labels, id2label, problem_type, ..."""
    saved: Any | None = None
    """What is saved with the model by ``save_pretrained``, if not the processor alone."""
    objective: Objective | None = None
    """What is learnt, if it depends on the data."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What the task itself needs later, such as the user's rows and the label names."""
    parts: Mapping[str, PreparedData] = field(default_factory=dict)
    """The data sets of a mixture by name; the splits then have the rows of all of them."""

    def get_split(self, name: str) -> Any | None:
        return {"train": self.train, "validation": self.validation, "test": self.test}.get(name)

    def is_labelled(self, split: str) -> bool:
        """Whether metrics can be computed on the split (GLUE's test sets have no labels)."""
        return bool(self.extras.get("labelled", {}).get(split, True))


class FrozenModel(NamedTuple):
    """A model that an objective asks, as built; it is composed beside the one that learns."""

    module: nn.Module
    precision: str | None = None
    """Of its weights and its arithmetic, if not the run's."""
    layout: Mapping[str, Any] = {}
    """The settings in which its layout differs from that of the model that learns."""


class Task(ABC):
    """One black-box task."""

    name: str
    description: str
    notes: str = ""
    """What a user of other trainers might not expect, for ``docs/tasks.md``."""
    columns: tuple[ColumnRole, ...]
    auto_class: str
    """Name of the Auto class in transformers that builds the model."""
    best_metric: str = "loss"
    greater_is_better: bool = False
    metrics: tuple[str, ...] = ("loss",)
    """Every metric that the task may compute: ``--metric-for-best-model`` must be one of them."""
    answer_keys: frozenset[str] = frozenset()
    """Keys in ``predictions`` that are the model's answers, not the user's columns."""
    answer_role: str | None = None
    """The role whose column only training and evaluation need."""
    needs_rows: str = ""
    """What a row to predict on has, if a plain string is not enough."""
    learns_classes = False
    """Whether the labels are classes, whose ids must mean the same in all sets of a mixture."""
    tally_reads_rows = False
    """Whether a tally reads the user's rows, and so takes the records of one data set only."""
    has_shifted_labels: bool = False
    """True if position i predicts label i+1, so that the first label of a row does not count."""
    smooths_labels: bool = True
    """Whether --label-smoothing is about the model's own loss, not about the objective's."""
    uses_dropout: bool = True
    """False: models are trained without dropout, which would blur what the objective compares."""
    streams: bool = False
    """Whether its training rows may be a stream (``--streaming``)."""
    reads_as: tuple[str, ...] = ()
    """Other tasks whose settings this one reads, too."""

    @property
    def aliases(self) -> tuple[str, ...]:
        return ALIASES.get(self.name, ())

    def find_problems(self, args: Settings) -> Iterator[str]:
        """What training and evaluation need beside the data, and the settings do not give."""
        yield from ()

    def prepare(self, args: Settings, splits: Tables | None = None) -> PreparedData:
        """The data that was given or that the settings name, ready for the model."""
        parts = self.load_parts(args)
        return self.prepare_tables(parts, self.load_tables(parts, splits))

    def prepare_tables(self, parts: Any, tables: Tables) -> PreparedData:
        """The rows of these splits; those of the first one say which columns all have."""
        columns = self.choose_columns(get_first_table(tables), parts.args, has_answers=True)
        return self.encode_tables(parts, tables, columns)

    def prepare_for_prediction(self, args: Settings, rows: Sequence[Row]) -> PreparedData:
        """Rows without labels, as the ``test`` split; label names come from the saved model."""
        parts = self.load_parts(args)
        table = self.read_input(rows, parts)
        columns = self.choose_columns(table, args, has_answers=False)
        return self.encode_input(parts, table, columns)

    @abstractmethod
    def load_parts(self, args: Settings) -> Any:
        """What the model brings, with the settings as ``args``."""

    def load_tables(self, parts: Any, splits: Tables | None) -> dict[str, Any]:
        """The given or loaded splits."""
        return get_splits(parts.args, splits)

    def read_input(self, rows: Sequence[Row], parts: Any) -> list[Record]:
        """Rows to predict on; a plain string stands for a row with one column."""
        if self.needs_rows and any(isinstance(row, str) for row in rows):
            raise DataError(f"{self.name} needs {self.needs_rows}: give a file with these columns.")
        return as_rows(rows, parts.args.text_column or "text")

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> Any:
        """The columns of the task, which the first rows must have."""
        roles = [role for role in self.columns if role.required]
        if not has_answers:
            roles = [role for role in roles if role.name != self.answer_role]
        if self.learns_classes:  # the label chooses first
            roles.sort(key=lambda role: role.name != self.answer_role)
        return find_columns(roles, get_column_names(rows), args)

    def check_head(self, rows: list[Record], args: Settings, *, has_answers: bool) -> None:
        """Raise an error if the first rows of the data cannot be used; nothing is loaded yet."""
        self.choose_columns(rows, args, has_answers=has_answers)

    @abstractmethod
    def encode_tables(self, parts: Any, tables: Tables, columns: Any) -> PreparedData:
        """Check the labels of the splits, and tokenize them."""

    @abstractmethod
    def encode_input(self, parts: Any, table: list[Record], columns: Any) -> PreparedData:
        """Tokenize rows to predict on."""

    def count_features(self, prepared: PreparedData) -> list[int] | None:
        """Features that each row to predict on has become; None if it is one for each."""
        return None

    @abstractmethod
    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> Records:
        """One small record per row of the batch, in order."""

    @abstractmethod
    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        """The running metrics of a labelled split; it gets the split's records in order."""

    def predictions(
        self, records: Sequence[Record], prepared: PreparedData, split: str, first: int = 0
    ) -> Answers:
        """One dictionary, writable as JSON, per example of the user's, from row ``first`` on."""
        numbered = enumerate(records, start=first)
        return [self.answer_row(record, prepared, split, number) for number, record in numbered]

    @abstractmethod
    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        """The answer to a row, by its record."""

    def build_model(
        self, args: Settings, prepared: PreparedData, *, must_be_trained: bool = False
    ) -> nn.Module:
        """The model with a head for this data; it ``must_be_trained`` already for predictions."""
        from rapidformer.models.build import build_pretrained

        return build_pretrained(
            self.get_auto_class(prepared), args, must_be_trained=must_be_trained,
            **prepared.model_settings,
        )  # fmt: skip

    def get_auto_class(self, prepared: PreparedData) -> str:
        return self.auto_class

    def build_objective(self, args: Settings) -> Objective:
        """What is learnt: the mean of ``forward`` over the labels, unless overridden."""
        from rapidformer.objectives.loss_function import LossFunction

        return LossFunction(self.forward)

    def build_frozen_models(self, args: Settings, prepared: PreparedData) -> dict[str, FrozenModel]:
        """The models that the objective needs besides the one that learns, by name.

        Not the ``reference``: the run makes it. Evaluations find them all in
        ``prepared.extras["context"]``.
        """
        return {}

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss over the labels of the micro-batch."""
        return model(**batch).loss

    def get_best_metric(self, prepared: PreparedData) -> tuple[str, bool]:
        """The metric that decides the best model on this data, and whether more of it is better."""
        return self.best_metric, self.greater_is_better

    @staticmethod
    def drop_labels(batch: Batch) -> Batch:
        """The batch without its labels: their loss is computed row by row."""
        return {key: value for key, value in batch.items() if key != "labels"}


def check_row_texts(values: Sequence[Any], column: str, split: str, first: int = 0) -> list[str]:
    """The column as strings; errors name the row (``first`` rows come before these)."""
    texts: list[str] = []
    for number, value in enumerate(values, start=first + 1):
        if value is None or isinstance(value, (list, dict)):
            actual = "nothing" if value is None else f"a {type(value).__name__}"
            raise DataError(
                f"{split}, row {number}: the column {column} must hold text, not {actual}."
            )
        texts.append(value if isinstance(value, str) else str(value))
    return texts
