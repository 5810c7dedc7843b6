"""Python functions and their docstrings: found in source files, and taken apart."""

import ast
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def documented_functions(path: Path) -> Iterator[dict[str, str]]:
    """The functions and methods of a file that have a docstring and do something besides.

    Functions inside functions stay part of the outer one. A file that is not valid Python of this version, or not
    UTF-8, yields nothing.

    Yields:
        ``func_name``, ``docstring`` and ``code``: the source from its decorators on, dedented, without the docstring.
    """
    try:
        source = path.read_text(encoding="utf-8")
        tree = _parse(source)
    except (SyntaxError, ValueError, RecursionError):  # UnicodeDecodeError and null bytes are ValueErrors
        return
    lines = source.splitlines(keepends=True)
    for node in _functions(tree):
        docstring = ast.get_docstring(node)
        if docstring and len(node.body) > 1:
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            code = _cut_docstring(lines[: node.end_lineno], node, first_line)
            yield {"func_name": node.name, "docstring": docstring, "code": code}


def without_docstring(code: str, docstring: str) -> str:
    """The source of one function without ``docstring``, for sources that leave it in the code.

    Code that does not contain it is given back as it is, and so is code in a language other than Python.
    """
    first_line = next((line.strip() for line in docstring.splitlines() if line.strip()), "")
    if not first_line or first_line not in code:
        return code
    source = textwrap.dedent(code)
    try:
        node = next(_functions(_parse(source)), None)
    except (SyntaxError, ValueError, RecursionError):
        return _without_quoted(code, first_line)
    if node is None or ast.get_docstring(node) is None or len(node.body) == 1:
        return code
    return _cut_docstring(source.splitlines(keepends=True), node, 1)


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in somebody else's code
        return ast.parse(source)


def _functions(tree: ast.AST) -> Iterator[FunctionNode]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionNode):
            yield node
        else:
            yield from _functions(node)


def _cut_docstring(lines: list[str], node: FunctionNode, first_line: int) -> str:
    """Lines ``first_line`` (counted from 1) and after, without the docstring of ``node``, dedented."""
    docstring = node.body[0]
    before = lines[first_line - 1 : docstring.lineno - 1]
    after = lines[docstring.end_lineno :]
    # Columns of the syntax tree count bytes. A docstring may share its first line with the
    # header ("def f(): 'text'; return 1") and its last line with a comment or a statement.
    head = lines[docstring.lineno - 1].encode()[: docstring.col_offset].decode()
    tail = lines[docstring.end_lineno - 1].encode()[docstring.end_col_offset :].decode()
    rest = head + tail.lstrip("; \t") if head.strip() or tail.strip() else ""
    return textwrap.dedent("".join([*before, rest, *after])).strip("\n")


def _without_quoted(code: str, first_line: str) -> str:
    """Cut the first triple-quoted string if ``first_line`` stands in it: for code this Python cannot parse."""
    starts = [(code.find(quote), quote) for quote in ('"""', "'''") if quote in code]
    if not starts:
        return code
    start, quote = min(starts)
    end = code.find(quote, start + 3)
    if end < 0 or first_line not in code[start:end]:
        return code
    return code[:start].rstrip() + code[end + 3 :]
