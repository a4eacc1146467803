"""The sub-commands: where each one lives and what it does. Imports nothing heavy."""

from __future__ import annotations

# Commands with flags of their own, and so with a help of their own.
OWN_FLAGS = frozenset({"preprocess", "data", "launch", "config", "verify"})
# Sub-command -> (module with a `run(argv)`, does it start one process per GPU, what it does)
COMMANDS: dict[str, tuple[str, bool, str]] = {
    "train": ("rapidformer.cli.train", True, "train or fine-tune (the default)"),
    "evaluate": ("rapidformer.cli.evaluate", True, "metrics of a model on a split of the data"),
    "predict": ("rapidformer.cli.predict", True, "a model's answers to texts or a file"),
    "launch": ("rapidformer.cli.launch", True, "run a Python script in every process"),
    "verify": ("rapidformer.cli.verify", False, "prove that the switches of a run change nothing"),
    "config": ("rapidformer.cli.config", False, "ask a few questions, write a file for --config"),
    "tasks": ("rapidformer.cli.tasks", False, "list the tasks and the columns they expect"),
    "preprocess": ("rapidformer.cli.preprocess", False, "a corpus into pre-training files"),
    "data": ("rapidformer.cli.data", False, "look into pre-training files, or merge them"),
    "plot": ("rapidformer.cli.plot", False, "draw a run's loss curve as a picture"),
}
