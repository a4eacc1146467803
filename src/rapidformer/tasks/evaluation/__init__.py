"""Evaluate, predict and generate with a task's model."""
