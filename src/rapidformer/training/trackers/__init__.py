"""Where the numbers of a run go: ``metrics.jsonl``, and copies of it such as TensorBoard."""

from rapidformer.training.trackers.metrics_file import MetricsFile
from rapidformer.training.trackers.tensorboard import TensorBoard
from rapidformer.training.trackers.tracker import TrackedRun, Tracker, TrackerList

__all__ = ["MetricsFile", "TensorBoard", "TrackedRun", "Tracker", "TrackerList"]
