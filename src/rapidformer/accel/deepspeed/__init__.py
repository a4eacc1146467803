"""DeepSpeed as the training strategy, for users with a ``deepspeed.json``."""
