"""Tensor-train mathematics: pure functions on plain tensors; imports torch only."""
