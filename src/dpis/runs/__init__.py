"""The files of a run: its folder and lock, the secret checkpoint, the summary. Needs no torch."""
