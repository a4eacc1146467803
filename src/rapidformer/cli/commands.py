"""The sub-commands: their modules and descriptions. Imports nothing heavy."""

from __future__ import annotations

# Commands with their own flags, and therefore their own help.
OWN_FLAGS = frozenset(
    {"preprocess", "data", "launch", "config", "verify", "bench", "runs", "check", "export"}
)
# Sub-command -> (module with a `run(argv)`, does it start one process per GPU, what it does)
COMMANDS: dict[str, tuple[str, bool, str]] = {
    "train": ("rapidformer.cli.train", True, "train or fine-tune (the default)"),
    "evaluate": (
        "rapidformer.cli.evaluate",
        True,
        "compute a model's metrics on a split of the data",
    ),
    "predict": (
        "rapidformer.cli.predict",
        True,
        "predict on texts or files, or chat",
    ),
    "export": (
        "rapidformer.cli.export",
        False,
        "turn a checkpoint into a Hugging Face folder, and prove it",
    ),
    "launch": ("rapidformer.cli.launch", True, "run a Python script in every process"),
    "verify": (
        "rapidformer.cli.verify",
        False,
        "prove that a run's switches do not change its result",
    ),
    "bench": (
        "rapidformer.cli.bench",
        False,
        "measure a run's speed and memory, and what would make it faster",
    ),
    "explain": (
        "rapidformer.cli.explain",
        False,
        "list every change that a run would make, and why",
    ),
    "config": (
        "rapidformer.cli.config",
        False,
        "ask a few questions and write a file for --config",
    ),
    "tasks": ("rapidformer.cli.tasks", False, "list the tasks and the columns they expect"),
    "preprocess": ("rapidformer.cli.preprocess", False, "turn a corpus into pre-training files"),
    "data": (
        "rapidformer.cli.data",
        False,
        "show a run's data, inspect pre-training files",
    ),
    "runs": ("rapidformer.cli.runs", False, "list the runs and checkpoints in a folder"),
    "check": ("rapidformer.cli.check", False, "verify every hash and tensor of a checkpoint"),
    "plot": ("rapidformer.cli.plot", False, "draw a run's loss curve"),
}
