"""Private names of other libraries, used here and nowhere else.

One file per library and part of it. A function is named for what it does and imports what it needs
when called, unless importing the file already implies torch. ``PRIVATE_NAMES`` lists what a file
relies on and what for: when a new version moves a name, a test says which.
"""
