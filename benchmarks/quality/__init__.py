"""How well tensor-train models learn, against dense ones, on real data."""
