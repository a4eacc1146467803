"""Other libraries' own tests, run with the import line changed. Not collected by pytest."""
