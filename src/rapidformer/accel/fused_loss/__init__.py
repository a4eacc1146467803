"""``--fused-loss``: cross entropy straight from hidden states, without ever holding all logits."""
