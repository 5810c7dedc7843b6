"""Quality of a trained sentence encoder after its decomposition, without any training: plain, calibrated, by size.

python -m benchmarks.quality.calibration all-MiniLM-L6-v2 stsb_en.parquet
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

from benchmarks.harness.timing import RESULTS
from benchmarks.quality.sentence_pairs import quality, read_pairs
from hf_comera import Calibration, ComeraConfig, calibrate, get_comera_model, plan
from loop.measure import MACHINE_IDENTITY, machine, replace_rows

DESCRIPTION = """\
Calibrate a sentence encoder on the first sentences of the train split, decompose
it in several ways, and measure the rank correlation (Spearman, times 100) of the
similarities of its sentence pairs with the scores that people gave: on the
development split, by which ways may be chosen, and on the test split.

"plain" is the SVD of the weights, "equal" the calibrated one with the same ratio
in each layer, "sensitivity" a size with ranks by measured sensitivity. Megabytes
are those of the checkpoint stored in int8.
"""
LINEARS_SMALLER = (2, 4, 8)
PARTS_OF_ALL = (0.5, 0.33, 0.25, 0.125)
WORDS = "word_embeddings"


def main() -> None:
    """Measure all ways, print the table, write the rows."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a dense sentence encoder with its tokenizer")
    parser.add_argument("pairs", type=Path, help="parquet file with sentence1, sentence2, score and split")
    parser.add_argument("--sentences", type=int, default=1600, help="sentences of the calibration (default: 1600)")
    parser.add_argument("--every", type=int, default=1, help="measure on every n-th pair (default: all)")
    parser.add_argument("--no-save", action="store_true", help="print the table only")
    args = parser.parse_args()
    texts = [row["sentence1"] for row in read_pairs(args.pairs, "train")][: args.sentences]
    splits = {split: read_pairs(args.pairs, split, args.every) for split in ("dev", "test")}
    settings = {"model": args.model.name, "sentences": len(texts), "every": args.every}
    rows = [{**settings, **row} for row in measure(args.model, texts, splits)]
    columns = ("layers", "ranks", "smaller", "parameters", "int8_megabytes", "dev", "test")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[key]) for key in columns))
    Console().print(table)
    if not args.no_save:
        here = machine()
        keys = ["model", "sentences", "every", "layers", "ranks", "smaller", *MACHINE_IDENTITY]
        replace_rows(RESULTS / "bench_calibration.csv", [{**row, **here} for row in rows], keys)


def measure(folder: Path, texts: list[str], splits: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dense = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    calibration = calibrate(dense, texts, processing_class=tokenizer)
    rows = []
    for facts, settings, found in ways(dense, calibration):
        model = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        model = get_comera_model(model, ComeraConfig(**settings), calibration=found).eval()
        with TemporaryDirectory() as place:
            model.save_pretrained(place, storage="int8")
            num_bytes = sum(path.stat().st_size for path in Path(place).glob("*.safetensors"))
        scores = {split: quality(model, tokenizer, pairs) for split, pairs in splits.items()}
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rows.append({**facts, "parameters": parameters, "int8_megabytes": round(num_bytes / 1e6, 1), **scores})
    return rows


def ways(dense: Any, calibration: Calibration) -> Iterator[tuple[dict[str, Any], dict[str, Any], Calibration | None]]:
    """What a row is of, its settings, and the calibration that it has."""
    whole = sum(parameter.numel() for parameter in dense.parameters())
    yield {"layers": "none", "ranks": "", "smaller": 1}, {"target_modules": [], "storage": "int8"}, None
    linears = plan(dense, ComeraConfig(exclude_modules=[WORDS])).layers
    in_linears = sum(layer.dense_parameters for layer in linears)
    for smaller in LINEARS_SMALLER:
        ranks = {
            re.escape(x.name): max(1, x.dense_parameters // (smaller * (x.in_size + x.out_size))) for x in linears
        }
        equal = {"num_factors": 1, "rank_pattern": ranks, "exclude_modules": [WORDS]}
        size = {"target_parameters": whole - in_linears + in_linears // smaller, "exclude_modules": [WORDS]}
        for name, settings, found in (
            ("plain", equal, None), ("equal", equal, calibration), ("sensitivity", size, calibration),
        ):  # fmt: skip
            yield {"layers": "linear", "ranks": name, "smaller": smaller}, settings, found
    for part in PARTS_OF_ALL:
        facts = {"layers": "linear, words", "ranks": "sensitivity", "smaller": round(1 / part, 1)}
        yield facts, {"target_ratio": part}, calibration


if __name__ == "__main__":
    main()
