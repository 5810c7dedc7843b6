"""Runs the command line: ``python -m hf_comera``."""

from hf_comera.cli import app

app(prog_name="python -m hf_comera")
