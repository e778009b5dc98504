"""Public datasets by name: where they come from, how they are checked, what they hold."""
