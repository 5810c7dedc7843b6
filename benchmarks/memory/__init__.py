"""The memory that a training takes, by policy and by method."""
