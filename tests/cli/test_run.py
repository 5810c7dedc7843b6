"""hf_comera/cli/run.py: another program gets all that follows its name."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hf_comera.hub.client import AUTOLOAD

ROOT = str(Path(__file__).resolve().parents[2])

REPORT = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["PYTHONPATH"].split(os.pathsep)[0]]))
sys.exit(7)
"""


def test_everything_is_handed_on(tmp_path):
    (tmp_path / "client.py").write_text(REPORT)
    arguments = ["client.py", "--help", "-x", "a b", "--", "run"]
    command = [sys.executable, "-m", "hf_comera", "run", *arguments]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 7, result.stderr
    assert json.loads(result.stdout) == [arguments[1:], str(AUTOLOAD)]


def test_a_program_that_is_not_there_is_named(call):
    answer = call("run", "nothing-of-that-name")
    assert answer.code == 2
    assert "'nothing-of-that-name' is no program beside" in answer.said
