"""Tensor parallelism: ``parallel`` applies it, ``styles`` are the layers, ``sequence`` splits
tokens as well.
"""
