"""The commands of `dpis`: thin, every number comes from the library."""
