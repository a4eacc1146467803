"""``--compile``: compiled blocks, and how their graphs are rewritten."""
