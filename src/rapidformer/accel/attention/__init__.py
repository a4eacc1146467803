"""``--attention``: which kernel computes attention."""
