"""Tensor parallelism: ``parallel`` applies it, ``styles`` are the split layers, ``sequence`` also
splits tokens.
"""
