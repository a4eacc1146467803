"""Tensor parallelism: ``parallel`` applies it, ``styles`` split layers, ``sequence`` tokens."""
