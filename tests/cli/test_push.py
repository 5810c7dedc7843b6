"""hf_comera/cli/push.py: a folder goes to a Hub on this machine, and a dense one nowhere."""

import json
import os
import subprocess
import sys

from tests.hub.fake_hub import FakeHub


def test_a_folder_is_pushed(checkpoints, tmp_path):
    with FakeHub() as hub:
        done = subprocess.run(
            [sys.executable, "-m", "hf_comera", "push", checkpoints / "compressed", "tiny", "--private", "--json"],
            capture_output=True,
            text=True,
            env=os.environ | hub.environment(cache=str(tmp_path)),
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["url"].endswith(json.loads(done.stdout)["commit"])
        assert hub.repositories["me/tiny"].private
        assert "model.safetensors" in hub.repositories["me/tiny"].files()


def test_a_dense_folder_is_refused_before_the_hub_is_asked(checkpoints, call):
    answer = call("push", checkpoints / "dense", "me/dense")
    assert answer.code == 2
    assert "is dense, and the folder of a compressed checkpoint is needed" in answer.said


def test_a_name_that_is_none_is_refused(checkpoints, call):
    answer = call("push", checkpoints / "compressed", "me/../dense")
    assert answer.code == 2
    assert "is no name of a repository on the Hub" in answer.said
