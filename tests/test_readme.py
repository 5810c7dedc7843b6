"""README.md: its Python runs as printed, top to bottom, in one session of an empty folder."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
RUN, DO_NOT_RUN = "python", "python no-run"  # the second needs the real Hub


def snippets() -> list[tuple[str, str]]:
    """Info string and code of every Python fence, the code padded so that a traceback names the README's lines."""
    text = README.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["info"].startswith("py"):
            lines_before = text.count("\n", 0, match.start("code"))
            found.append((match["info"].strip(), "\n" * lines_before + match["code"]))
    return found


def test_every_python_fence_is_run_or_marked():
    infos = [info for info, _ in snippets()]
    assert RUN in infos, "README.md shows no Python that a newcomer can run"
    assert set(infos) <= {RUN, DO_NOT_RUN}, f"a Python fence is {RUN!r} or {DO_NOT_RUN!r}, found {sorted(set(infos))}"


def test_snippets_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {"__name__": "__main__"}
    for info, code in snippets():
        program = compile(code, str(README), "exec")
        if info == RUN:
            exec(program, session)
