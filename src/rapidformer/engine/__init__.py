"""The engine: a run and the verbs of training."""

from rapidformer.engine.engine import RapidformerEngine

__all__ = ["RapidformerEngine"]
