"""Training steps as CUDA graphs: capturing, replaying, and batches of a few fixed shapes."""
