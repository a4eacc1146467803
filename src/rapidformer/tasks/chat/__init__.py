"""Conversations: columns, turns, templates, labels on the answers."""
