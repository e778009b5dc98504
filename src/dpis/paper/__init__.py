"""The evaluation of the paper: its models, data and tables."""
