"""Imported before any test: no garbage collection until everything is imported.

It would take half of that time and find nothing. ``conftest.py`` turns it on again.
"""

import gc

gc.disable()
