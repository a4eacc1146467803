"""Megatron's module names."""
