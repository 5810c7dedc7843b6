"""What the benchmarks share: candidates timed in turns, rows of results, processes of their own."""
