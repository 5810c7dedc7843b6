"""Texts from files: each once, and a share held out by a hash of the content, so that none is on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compress.settings import Settings
from loop.batches import bucket
from loop.checkpoint import fingerprint
from loop.settings import check_files
from loop.tables import READERS, read_table

LINES = ".txt"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """All texts of a run."""

    train: list[str]
    held_out: list[str]
    num_read: int
    """Texts in the files, with empty and repeated ones."""

    @property
    def fingerprint(self) -> str:
        """A short name for the contents."""
        return fingerprint([np.frombuffer("\0".join(part).encode(), np.uint8) for part in (self.train, self.held_out)])


def load_texts(settings: Settings) -> Texts:
    """The texts of all files that the settings name.

    Raises:
        ValueError: If a file is missing, has no such column, or holds something else than text; or if there are too
            few texts to hold some out.
    """
    read = [text for path in settings.texts for text in _read(path, settings.column)]
    texts = list(dict.fromkeys(stripped for text in read if (stripped := text.strip())))
    if not texts:
        raise ValueError(
            f"--texts {' '.join(settings.texts)}: no text in {len(read):,} rows. Give files with some 1,000 texts or "
            "more, like those that the model will see."
        )
    share = settings.held_out_percentage
    held_out = [text for text in texts if bucket(text) < share]
    train = [text for text in texts if bucket(text) >= share]
    if not held_out or not train:
        raise ValueError(
            f"--held_out_percentage {share} takes {len(held_out)} of the {len(texts)} different texts, and both sides "
            "need some. Give more texts, or another share, for example 20."
        )
    return Texts(train=train, held_out=held_out[: settings.max_held_out], num_read=len(read))


def describe_texts(paths: Sequence[str]) -> str:
    """The files in a few words, for tables and cards."""
    return ", ".join(Path(path).name for path in paths)


def _read(path: str, column: str) -> list[str]:
    check_files(texts=path)
    if Path(path).suffix.lower() == LINES:
        try:
            return Path(path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--texts {path} is no text in UTF-8: {error}. Convert it, or give another file."
            ) from error
    if Path(path).suffix.lower() not in READERS:
        known = ", ".join((LINES, *READERS))
        raise ValueError(f"--texts {path} ends in {Path(path).suffix or 'nothing'}. Known endings: {known}.")
    rows = read_table(path, "texts", f"a column of texts, {column}")
    if column not in rows.column_names:
        raise ValueError(
            f"--column {column} is no column of {path}, which has {', '.join(rows.column_names)}. Name the one with "
            f"the texts, for example --column {rows.column_names[0]}."
        )
    texts = list(rows[column])
    wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str | None)), None)
    if wrong is not None:
        raise ValueError(
            f"--column {column} of {path} has {texts[wrong]!r} in row {wrong}, which is no text. Name a column "
            "of texts."
        )
    return [text for text in texts if text is not None]
