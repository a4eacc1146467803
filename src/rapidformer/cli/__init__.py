"""The ``rapidformer`` command: one file per sub-command; bare flags train. Imports nothing."""

COMMANDS = {
    "train": "train or fine-tune (the default)",
    "evaluate": "compute a model's metrics on a split of the data",
    "predict": "predict on texts or files, or chat",
    "export": "turn a checkpoint into a Hugging Face folder, and prove it",
    "launch": "run a Python script in every process",
    "verify": "prove that a run's switches do not change its result",
    "bench": "measure a run's speed and memory, and what would make it faster",
    "plan": "say what a run will need, in memory and time, without running it",
    "sweep": "try settings on runs of their own, and find the best",
    "explain": "list every change that a run would make, and why",
    "config": "ask a few questions and write a file for --config",
    "tasks": "list the tasks and the columns they expect",
    "preprocess": "turn a corpus into pre-training files",
    "data": "show a run's data, inspect pre-training files",
    "runs": "list the runs and checkpoints in a folder",
    "check": "verify every hash and tensor of a checkpoint",
    "report": "write the page of a run, or follow it in a browser",
    "plot": "draw the loss curves of runs",
}
"""What each sub-command does; its module of this package has a ``run``."""
DISTRIBUTED = frozenset({"train", "evaluate", "predict"})
"""Take the flags of a run, and start one process per GPU."""
OWN_FLAGS = COMMANDS.keys() - DISTRIBUTED - {"explain", "tasks"}
"""Have their own flags, and therefore their own help."""
