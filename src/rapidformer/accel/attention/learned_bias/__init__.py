"""Fused attention with a learned relative position bias (T5)."""
