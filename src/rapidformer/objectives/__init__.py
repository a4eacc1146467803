"""What is learnt: objectives, and how the engine runs one."""

from rapidformer.objectives.bound import BoundObjective
from rapidformer.objectives.objective import Context, Objective, Term, Terms, take_value

__all__ = ["BoundObjective", "Context", "Objective", "Term", "Terms", "take_value"]
