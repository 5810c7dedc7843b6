"""README and docs: their Python runs as printed, top to bottom, in one session of an empty folder."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
RUN, DO_NOT_RUN = "python", "python no-run"  # the second needs the real Hub
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "```py" in page.read_text(encoding="utf-8")),
]


def snippets(page: Path) -> list[tuple[str, str]]:
    """Info string and code of every Python fence, the code padded so that a traceback names the page's lines."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["info"].startswith("py"):
            lines_before = text.count("\n", 0, match.start("code"))
            found.append((match["info"].strip(), "\n" * lines_before + match["code"]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_fence_is_run_or_marked(page):
    infos = [info for info, _ in snippets(page)]
    assert RUN in infos, f"{page} shows no Python that a newcomer can run"
    assert set(infos) <= {RUN, DO_NOT_RUN}, f"a Python fence is {RUN!r} or {DO_NOT_RUN!r}, found {sorted(set(infos))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {"__name__": "__main__"}
    for info, code in snippets(page):
        program = compile(code, str(page), "exec")
        if info == RUN:
            exec(program, session)


def test_readme_fits_a_few_screens():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120, "README.md is the front door: move what is long to a page of docs/"


def test_the_readme_has_no_dead_link():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
