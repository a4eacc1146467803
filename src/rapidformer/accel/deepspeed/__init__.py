"""DeepSpeed as the training strategy, for users who bring a ``deepspeed.json``."""
