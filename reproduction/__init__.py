"""The paper's evaluation, run again: what it published, what is run here, what came out."""
