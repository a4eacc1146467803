"""The proof that switches change nothing: a run is recorded and compared with one process."""
