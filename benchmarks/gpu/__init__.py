"""Everything that needs a GPU, tested and measured step by step: ``make gpu-report``."""
