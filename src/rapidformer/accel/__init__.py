"""The switches: each a module with an ``apply``, called in the order of ``config/switches.py``."""
