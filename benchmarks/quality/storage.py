"""Bytes, errors and quality of a trained sentence encoder in each storage: floats, int8 and int4 rows.

python -m benchmarks.quality.storage all-MiniLM-L6-v2 stsb_en.parquet
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from benchmarks.harness.timing import RESULTS
from benchmarks.quality.sentence_pairs import quality, read_pairs
from hf_comera import ComeraConfig, get_comera_model
from loop.measure import MACHINE_IDENTITY, machine, replace_rows

DESCRIPTION = """\
Save a sentence encoder in each storage, load it again, and measure the bytes of
the file, the relative error of all weights together, and the rank correlation
(Spearman, times 100) of the similarities of its sentence pairs with the scores
that people gave. Embeddings are means over tokens.

The tensor trains are two factors a layer, from a plain SVD and not trained, so
their quality is that of no use yet: compare the storages with each other.
"""
TABLE_IN_INT4 = {"word_embeddings": "int4", "*": "int8"}
STORAGES: dict[str, Any] = {"float32": "float", "int8": "int8", "int4 table, int8": TABLE_IN_INT4, "int4": "int4"}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"target_modules": [], "storage": "int8"},
    "two factors, rank 128": {"rank": 128, "num_factors": 1, "exclude_modules": ["word_embeddings"]},
}


def main() -> None:
    """Measure all forms in all storages, print the table, write the rows."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a dense sentence encoder with its tokenizer")
    parser.add_argument("pairs", type=Path, help="parquet file with sentence1, sentence2, score and split")
    parser.add_argument("--split", default="test", help="split of the pairs (default: test)")
    parser.add_argument("--every", type=int, default=1, help="measure on every n-th pair (default: all)")
    parser.add_argument("--no-save", action="store_true", help="print the table only")
    args = parser.parse_args()
    pairs = read_pairs(args.pairs, args.split, args.every)
    name = args.model.name
    rows = [{"model": name, "pairs": len(pairs), **row} for row in measure(args.model, pairs)]
    table = Table("form", "storage", "MB", "times smaller", "error %", "STS")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("form", "storage", "megabytes", "ratio", "error_percent", "sts")))
    Console().print(table)
    if not args.no_save:
        here = machine()
        keys = ["model", "form", "storage", *MACHINE_IDENTITY]
        replace_rows(RESULTS / "bench_storage.csv", [{**row, **here} for row in rows], keys)


def measure(folder: Path, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each form in each storage."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, whole = [], None
    for form, settings in FORMS.items():
        model = get_comera_model(AutoModel.from_pretrained(folder, add_pooling_layer=False), ComeraConfig(**settings))
        expected = {key: parameter.detach() for key, parameter in model.named_parameters()}
        for storage, value in STORAGES.items():
            with TemporaryDirectory() as place:
                if value == "float" and not settings.get("target_modules", True):
                    AutoModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(place)
                else:
                    model.save_pretrained(place, storage=value)
                num_bytes = sum(path.stat().st_size for path in Path(place).glob("*.safetensors"))
                loaded = AutoModel.from_pretrained(place, add_pooling_layer=False).eval()
            whole = whole or num_bytes
            row = {"megabytes": round(num_bytes / 1e6, 1), "ratio": round(whole / num_bytes, 1)}
            row |= {"error_percent": round(100 * error(expected, loaded), 2), "sts": quality(loaded, tokenizer, pairs)}
            rows.append({"form": form, "storage": storage, **row})
    return rows


@torch.no_grad()
def error(expected: dict[str, Tensor], loaded: torch.nn.Module) -> float:
    """Norm of the difference of all parameters, over the norm of the parameters."""
    found = dict(loaded.named_parameters())
    lost = sum((found[key].double() - value.double()).square().sum() for key, value in expected.items())
    whole = sum(value.double().square().sum() for value in expected.values())
    return float((lost / whole).sqrt())


if __name__ == "__main__":
    main()
