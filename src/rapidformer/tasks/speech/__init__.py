"""Tasks that listen: recognise speech, classify audio."""
