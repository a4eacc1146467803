"""Learning from rewards: the model answers prompts, and functions of the user score the answers."""
