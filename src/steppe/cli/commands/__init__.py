"""The commands of `steppe`."""
