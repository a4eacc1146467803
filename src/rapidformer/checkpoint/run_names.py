"""The names of what a run writes to its folder, besides checkpoints."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
RUN_FILE = ".run.json"
"""What the run writes, and the step of its best model."""
PREVIOUS = "previous"
"""An earlier run, kept by front ends that train into the same folder again."""
REPLACED = ".replaced"
"""A whole earlier run, until the new one has a checkpoint."""
