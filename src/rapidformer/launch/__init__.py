"""Starting the processes of a run."""
