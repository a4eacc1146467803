"""Data that is read while it is trained on: shards, their order, and the rows of a stream."""
