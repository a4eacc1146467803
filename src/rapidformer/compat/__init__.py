"""The private names of other libraries, each used here and nowhere else.

A file per library and part of it; a function is named for what it does, and imports what it needs
when it is called, unless importing the file already means that torch is there. ``PRIVATE_NAMES``
lists what a file relies on and what for: when a new version moves one of them, a test says which.
"""
