"""scripts/codebert/corpus.py: functions are found with their docstrings, and the docstring leaves the code."""

import ast

import pytest

from codebert.corpus import documented_functions, without_docstring

MODULE = '''
import os

def documented(a, b=1):
    """First line.

    More."""
    # a comment stays
    return a + b

def bare(a):
    return a

class Thing:
    @property
    async def method(self):
        "One line."
        def inner():
            """Of a part."""
            return 1
        return inner

    def only_words(self):
        """Nothing but a docstring."""

if os.name:
    def conditional(): "Short."; return 0
'''


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE, encoding="utf-8")
    return {row["func_name"]: row for row in documented_functions(path)}


def test_finds_functions_that_have_a_docstring_and_do_something(rows):
    assert set(rows) == {"documented", "method", "conditional"}


def test_docstring_is_cleaned_and_gone_from_the_code(rows):
    assert rows["documented"]["docstring"] == "First line.\n\nMore."
    assert rows["documented"]["code"] == "def documented(a, b=1):\n    # a comment stays\n    return a + b"


def test_method_is_dedented_with_decorator_and_inner_function(rows):
    code = rows["method"]["code"]
    assert code.startswith("@property\nasync def method(self):\n    def inner():")
    assert "One line." not in code
    assert "Of a part." in code


def test_docstring_on_the_line_of_the_header(rows):
    assert rows["conditional"]["code"] == "def conditional(): return 0"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"def f(:\n", id="invalid-syntax"),
        pytest.param(b"print 'python 2'\n", id="old-python"),
        pytest.param(b"# \xff\xfe\ndef f():\n    'doc'\n    return 1\n", id="not-utf-8"),
        pytest.param(b"x = 1\0\n", id="null-byte"),
        pytest.param(b"", id="empty"),
    ],
)
def test_files_that_cannot_be_parsed_yield_nothing(tmp_path, content):
    path = tmp_path / "broken.py"
    path.write_bytes(content)
    assert list(documented_functions(path)) == []


def test_every_function_that_leaves_is_valid_python(rows):
    for row in rows.values():
        ast.parse(row["code"])


CODES = [
    pytest.param(
        'def f(x):\n    """Add one."""\n    return x + 1', "Add one.", "def f(x):\n    return x + 1", id="python"
    ),
    pytest.param(
        '    def f(x):\n        """Add one.\n\n        Really."""\n        return x + 1',
        "Add one.\n\nReally.",
        "def f(x):\n    return x + 1",
        id="indented-method",
    ),
    pytest.param(
        'def f(x):\n    """Add one."""\n    print x\n', "Add one.", "def f(x):\n    print x\n", id="python-2"
    ),
    pytest.param("int f() { return 1; }", "Gives one.", "int f() { return 1; }", id="other-language"),
    pytest.param("def f():\n    return 'Add one.'", "Add one.", "def f():\n    return 'Add one.'", id="text-in-body"),
    pytest.param("def f():\n    return 1", "", "def f():\n    return 1", id="no-docstring"),
    pytest.param('def f():\n    """Only."""', "Only.", 'def f():\n    """Only."""', id="nothing-else"),
]


@pytest.mark.parametrize(("code", "docstring", "expected"), CODES)
def test_without_docstring(code, docstring, expected):
    assert without_docstring(code, docstring) == expected


def test_without_docstring_keeps_its_own_result():
    once = without_docstring('def f(x):\n    """Add."""\n    """Add."""\n    return x', "Add.")
    assert once == 'def f(x):\n    """Add."""\n    return x'
