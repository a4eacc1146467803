"""The engine: a run and the verbs of training."""

from rapidformer.engine.engine import RapidformerEngine
from rapidformer.engine.evaluation import predict_rows

__all__ = ["RapidformerEngine", "predict_rows"]
