"""The parts of ``train_mnli.py``."""
