"""Jobs of the command line: from options to a trained model, and what can be done with one."""
