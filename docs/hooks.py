"""What building the site does beyond plugins: links into the repository, fences, the page of the command line."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.hf_comera")  # a warning there ends a strict build
ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^)\s]+)\)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>~?(?P<name>[\w.]+)</code>")
COMMANDS = "reference/command_line.md"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links at files outside docs/ to the repository, or drop them where its address is not known."""
    folder = Path(config["docs_dir"])
    here = (folder / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        path, _, anchor = link["target"].partition("#")
        target = (here / path).resolve()
        if not path or "://" in path or path.startswith("mailto:") or target.is_relative_to(folder):
            return link[0]
        if not target.exists():
            log.warning("%s has a link to %s, which is not in the repository", page.file.src_uri, path)
        address = config["repo_url"]
        if not address:
            return link["text"]
        way = "tree" if target.is_dir() else "blob"
        mark = f"#{anchor}" if anchor else ""
        return f"[{link['text']}]({address.rstrip('/')}/{way}/main/{target.relative_to(ROOT)}{mark})"

    markdown = LINK.sub(replaced, markdown.replace("```python no-run\n", "```python\n"))
    return markdown + commands() if page.file.src_uri == COMMANDS else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Turn roles of docstrings, such as ``:class:``, into links where the name has a place on the site."""
    return ROLE.sub(r'<autoref identifier="\g<name>" optional><code>\g<name></code></autoref>', html)


def commands() -> str:
    """Help of all commands as Markdown, by typer."""
    program = [sys.executable, "-m", "typer", "hf_comera.cli", "utils", "docs", "--name", "hf-comera"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        log.warning("%s does not print the commands: %s", " ".join(program), done.stderr)
    return "\n\n" + re.sub(r"^(#+ )", r"#\1", done.stdout, flags=re.MULTILINE)
