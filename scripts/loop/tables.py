"""Rows of a data file that a setting names, in any of the usual formats."""

from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_table(path: str, setting: str, needed: str) -> Dataset:
    """The rows of a file, by the ending of its name.

    Args:
        path: Of the file.
        setting: The option that names it.
        needed: The contents that it must have, for messages.

    Raises:
        ValueError: If the ending is unknown, the file is empty, or it cannot be read.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"--{setting} {path} ends in {suffix or 'nothing'}. Known endings: {', '.join(READERS)}.")
    if not Path(path).stat().st_size:
        raise ValueError(f"--{setting} {path} is empty. It needs {needed}.")
    options = {"sep": "\t"} if suffix == ".tsv" else {}
    try:
        return load_dataset(READERS[suffix], data_files=path, split="train", **options)
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(
            f"--{setting} {path} cannot be read: {error.__cause__ or error}. It needs {needed}."
        ) from error
