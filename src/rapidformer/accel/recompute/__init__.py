"""``--checkpoint-activations``: blocks computed again in the backward pass."""
