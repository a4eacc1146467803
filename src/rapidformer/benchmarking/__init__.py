"""``rapidformer bench``: how fast a run is, where its time goes, and what to try next."""
