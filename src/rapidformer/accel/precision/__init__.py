"""``--mixed-precision``: autocast, and what the processor supports."""
