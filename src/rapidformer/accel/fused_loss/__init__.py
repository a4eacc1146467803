"""``--fused-loss``: cross entropy from hidden states, so that no rank holds all logits at once."""
