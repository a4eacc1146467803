"""Learning from preferences: which of two answers is better, or whether one is good."""
