"""The ``rapidformer`` command: one file per sub-command; bare flags train."""
