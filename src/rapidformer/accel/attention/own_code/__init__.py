"""Fused attention for models that multiply queries by keys in code of their own (GPT-J, Bloom)."""
