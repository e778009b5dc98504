"""Per-record gradients of one parameter, as factors."""
