"""The rows of the table of switches, in files by the moment when they are applied."""
