"""Where the numbers of a run go: ``metrics.jsonl``, and copies of it in trackers.

A tracker has three methods, called on rank 0 only; the loop and the dialects all report through it.
``metrics.jsonl`` has everything. Trackers are copies, so one that fails is dropped with a warning
and never ends a run; all but TensorBoard's are called from a thread of their own.
"""

from rapidformer.training.trackers.background import Background
from rapidformer.training.trackers.metrics_file import MetricsFile
from rapidformer.training.trackers.tensorboard import TensorBoard
from rapidformer.training.trackers.tracker import TrackedRun, Tracker, TrackerList

__all__ = ["Background", "MetricsFile", "TensorBoard", "TrackedRun", "Tracker", "TrackerList"]
