"""scripts/own_process.py: another process, with as many threads as asked for, and errors that arrive."""

import math
import os

import pytest
import torch

from own_process import in_own_process


def test_another_process_does_the_work():
    assert in_own_process(1, os.getpid) != os.getpid()
    assert in_own_process(3, torch.get_num_threads) == 3


def test_errors_arrive():
    with pytest.raises(ValueError, match="math domain error"):
        in_own_process(1, math.sqrt, -1.0)
