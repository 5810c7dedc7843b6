"""The parts of ``pretrain_codebert.py``."""
