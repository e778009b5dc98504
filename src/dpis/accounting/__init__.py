"""How much noise a budget asks for, and what a finished run has spent. Needs no torch."""
