"""Conversations about images: rows, templates, batches of text and pixels."""
