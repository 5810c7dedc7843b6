"""benchmarks/harness/process.py: another process, as asked for; errors arrive, and limits hold."""

import math
import os
import re

import pytest
import torch

from benchmarks.harness.process import Stopped, call_limited, in_own_process


def test_another_process_does_the_work():
    assert in_own_process(1, os.getpid) != os.getpid()
    assert in_own_process(3, torch.get_num_threads) == 3


def test_errors_arrive():
    with pytest.raises(ValueError, match="math domain error"):
        in_own_process(1, math.sqrt, -1.0)


@pytest.fixture
def work(monkeypatch, request):
    """The functions that run in processes of their own."""
    monkeypatch.syspath_prepend(request.path.parent)
    import limited_work

    return limited_work


def test_a_process_sends_what_it_finds(work):
    assert call_limited(work.tell, ["a", {"b": 1}], seconds=60, gib=8) == ["a", {"b": 1}]


@pytest.mark.parametrize(
    ("name", "values", "limits", "reason", "messages"),
    [
        ("tell_and_wait", ["so far"], {"seconds": 0.5}, "stopped after 0.5 seconds", ["so far"]),
        ("fill_memory", [16], {"gib": 4}, "MemoryError", []),
        ("end", [3], {}, "SystemExit: 3", ["begun"]),
    ],
)
def test_a_process_past_its_limit_is_stopped(work, name, values, limits, reason, messages):
    with pytest.raises(Stopped) as stopped:
        call_limited(getattr(work, name), values, **{"seconds": 60, "gib": 8, **limits})
    assert re.match(reason, stopped.value.args[0])
    assert stopped.value.args[1] == messages
