"""What a user's Python code does besides computing, and what it depends on: found by reading it."""
