"""``--fp8``: the blocks' large matrix products in 8-bit floating point."""
