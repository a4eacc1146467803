"""From gradients to updates: optimizers and learning-rate schedules."""
