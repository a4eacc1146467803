"""The switches: a module with an ``apply`` each, in the order of their rows in ``config``."""
