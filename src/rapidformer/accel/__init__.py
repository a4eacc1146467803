"""The switches: one file, one ``apply_*`` function each; ``parallelize`` is their order."""
