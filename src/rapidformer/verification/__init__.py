"""Verify that switches change nothing: record a run and compare it with one process."""
