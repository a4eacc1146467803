"""Sweeps: what is tried, what was found. ``rapidformer sweep`` runs the trials."""
