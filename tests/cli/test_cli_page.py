"""docs/command_line.md: its commands run as printed, top to bottom, in one folder."""

import re
import shlex
from pathlib import Path

from hf_comera.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def test_commands_run_as_printed(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    ran = 0
    for fence in FENCE.finditer(PAGE.read_text(encoding="utf-8")):
        if fence["info"] == "python":
            exec(compile(fence["code"], str(PAGE), "exec"), {"__name__": "__main__"})
        elif fence["info"] == "bash":
            for line in fence["code"].splitlines():
                program, *arguments = shlex.split(line)
                assert program == "hf-comera"
                answer = call(*arguments)
                assert answer.code == 0, f"{line}: {answer.error}"
                ran += 1
    assert ran >= 10
    assert {"small-tt", "small-dense", "small-onnx", "small-for-others", "ranks.png"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_every_command_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`hf-comera {command.name}" in text for command in app.registered_commands)
