"""benchmarks/quality/tasks.py: files that cannot work are refused."""

import pytest
from datasets import Dataset

from benchmarks.quality.tasks import read_pairs

REFUSED = [
    ({"premise": ["a"], "hypothesis": ["b"], "label": ["neutral"]}, "but not fold. It needs premise, hypothesis"),
    (
        {name: ["a"] for name in ("premise", "hypothesis", "label")} | {"fold": ["train"]},
        "at least 64 for train, and some for valid and test",
    ),
]


@pytest.mark.parametrize(("columns", "message"), REFUSED)
def test_files_that_cannot_work_are_refused(columns, message, tmp_path):
    path = tmp_path / "pairs.parquet"
    Dataset.from_dict(columns).to_parquet(path)
    with pytest.raises(ValueError, match=message):
        read_pairs(str(path))
