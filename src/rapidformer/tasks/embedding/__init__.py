"""Texts as vectors, and pairs of a query and a document as scores."""
