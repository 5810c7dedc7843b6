"""Where the text comes from: this Python's standard library, a local file, or a data set of the Hub.

Whatever the source, what leaves this file has the columns ``docstring`` and ``code`` (the docstring taken out of the
code), or the one column ``text``, in the splits ``train`` and ``validation``.
"""

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

from codebert.settings import DataSettings
from loop.batches import bucket

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# Column pairs (code, docstring): ours and CodeSearchNet's raw files, then CodeSearchNet on the Hub.
BIMODAL_COLUMNS = (("code", "docstring"), ("func_code_string", "func_documentation_string"))
READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
HELD_OUT_NAMES = ("validation", "valid", "dev", "test")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


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


def load_corpus(settings: DataSettings) -> DatasetDict:
    """Training and held-out text from the source the settings name.

    Raises:
        ValueError: If the source is empty, is of an unknown kind, or has no column this script understands.
    """
    if settings.train_file:
        splits = _read_files(settings)
    elif settings.dataset_name:
        splits = load_dataset(settings.dataset_name, settings.dataset_config_name)
    else:
        splits = DatasetDict(train=Dataset.from_list(standard_library_functions()))
    splits = _with_held_out(splits, settings.validation_split_percentage)
    for name, limit in (("train", settings.max_train_samples), ("validation", settings.max_eval_samples)):
        if limit is not None and limit < len(splits[name]):
            # The held-out rows come in the order of files: spread the choice over all of them.
            rows = range(limit) if name == "train" else [i * len(splits[name]) // limit for i in range(limit)]
            splits[name] = splits[name].select(rows)
    return DatasetDict({name: _canonical(split, name) for name, split in splits.items()})


def describe_source(settings: DataSettings) -> str:
    """The training data in a few words, for tables and the model card."""
    if settings.train_file:
        return Path(settings.train_file).name
    if settings.dataset_name:
        return " ".join(filter(None, (settings.dataset_name, settings.dataset_config_name)))
    return f"functions with docstrings of the Python {sysconfig.get_python_version()} standard library"


def standard_library_functions(root: Path | None = None, held_out_percentage: int = 8) -> list[dict]:
    """Functions with a docstring from the modules below ``root``, each once, with the split their file falls into.

    Args:
        root: A folder of Python files. None: the standard library of the running Python.
        held_out_percentage: Share of the files that is held out, by a hash of their path: the same on every machine.

    Raises:
        ValueError: If there is no such function, as where Python comes without its sources.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    rows, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        split = "validation" if bucket(relative.as_posix()) < held_out_percentage else "train"
        for row in documented_functions(path):
            if row["code"] not in seen:  # a copy in another file would leak into the held-out part
                seen.add(row["code"])
                rows.append(row | {"path": relative.as_posix(), "split": split})
    if not rows:
        raise ValueError(
            f"No function with a docstring was found below {root}: this Python seems to come without the sources of "
            "its library. Give --train_file functions.jsonl or --dataset_name code-search-net/code_search_net."
        )
    return rows


def bimodal_columns(names: Iterable[str]) -> tuple[str, str] | None:
    """The columns (code, docstring) among ``names``; None for plain text.

    Raises:
        ValueError: If neither a known pair nor ``text`` is there.
    """
    names = list(names)
    for pair in BIMODAL_COLUMNS:
        if set(pair) <= set(names):
            return pair
    if "text" in names:
        return None
    known = "; ".join(" and ".join(pair) for pair in BIMODAL_COLUMNS)
    raise ValueError(
        f"The data has the columns {', '.join(names)}. Needed: {known}; or text. Rename the columns to one of these."
    )


def _read_files(settings: DataSettings) -> DatasetDict:
    files = {"train": settings.train_file, "validation": settings.validation_file}
    files = {name: Path(path) for name, path in files.items() if path}
    readers = {_reader(path) for path in files.values()}
    if len(readers) > 1:
        raise ValueError(
            f"{' and '.join(map(str, files.values()))} are of different kinds. Give two files of one kind."
        )
    try:
        splits = load_dataset(readers.pop(), data_files={name: str(path) for name, path in files.items()})
    except DatasetGenerationError as error:
        raise ValueError(
            f"{' or '.join(map(str, files.values()))} has no rows or cannot be read: {error.__cause__}. Each row "
            "needs code and docstring, or text."
        ) from error
    for name, split in splits.items():
        if not len(split):
            raise ValueError(
                f"--{name}_file {files[name]} has no rows. It needs code and docstring, or text, in each."
            )
    return splits


def _reader(path: Path) -> str:
    if path.suffix.lower() not in READERS:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}. Known endings: {', '.join(READERS)}.")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty. It needs rows with code and docstring, or with text.")
    return READERS[path.suffix.lower()]


def _with_held_out(splits: DatasetDict, percentage: int) -> DatasetDict:
    """The splits ``train`` and ``validation``: those the data has, or one that a ``split`` column or a hash makes."""
    if "train" not in splits:
        raise ValueError(f"The data set has the splits {', '.join(splits)}, but none is called train.")
    given = [name for name in HELD_OUT_NAMES if name in splits and len(splits[name])]
    if given:
        return DatasetDict(train=splits["train"], validation=splits[given[0]])
    train = splits["train"]
    held_out = _held_out_rows(train, percentage)
    rows = {
        name: [i for i, out in enumerate(held_out) if out is wanted]
        for name, wanted in (("train", False), ("validation", True))
    }
    for name, chosen in rows.items():
        if not chosen:
            raise ValueError(
                f"None of the {len(train)} rows falls into the part for {name}. Give more rows, another "
                f"--validation_split_percentage than {percentage}, or a --validation_file."
            )
    return DatasetDict({name: train.select(chosen) for name, chosen in rows.items()})


def _held_out_rows(rows: Dataset, percentage: int) -> list[bool | None]:
    """For each row whether it is held out; None where the data keeps it for a test of its own."""
    if "split" in rows.column_names:
        names = list(rows["split"])
        held_out_name = next((name for name in HELD_OUT_NAMES if name in names), None)
        if "train" in names and held_out_name:
            return [{"train": False, held_out_name: True}.get(name) for name in names]
    columns = bimodal_columns(rows.column_names) or ("text",)
    contents = zip(*(rows[column] for column in columns), strict=True)
    return [bucket("\0".join(str(part) for part in content)) < percentage for content in contents]


def _canonical(split: Dataset, name: str) -> Dataset:
    """The split with our column names and without the docstring in the code."""
    columns = bimodal_columns(split.column_names)
    if columns is None:
        return split.select_columns(["text"])
    code, docstring = columns

    def rename(row: dict) -> dict:
        text = row[docstring] or ""
        return {"docstring": text, "code": without_docstring(row[code] or "", text)}

    renamed = split.map(rename, remove_columns=split.column_names, desc=f"reading {name}")
    return renamed.select_columns(["docstring", "code"])
