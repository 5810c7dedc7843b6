"""Task "nli" of the quality benchmark: does one sentence follow from another? BERT from random weights."""

from pathlib import Path

import numpy as np
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from quality_task import Task, model_loss
from sentence_pairs import PairBatches, Pairs, encode_pairs

LENGTH, BATCH_SIZE, MEASURING_BATCH_SIZE = 96, 64, 128
HELD_OUT_PAIRS = 1024
COLUMNS = ("premise", "hypothesis", "label", "fold")
FOLDS = ("train", "valid", "test")


def nli_task(nli_file: str, tokenizer_folder: str) -> Task:
    """The task, on a parquet file with the columns premise, hypothesis, label and fold.

    Raises:
        ValueError: If a column or a fold is missing, or there are not enough rows for one batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = read_pairs(nli_file)
    labels = sorted(set(rows["label"]))
    numbers = [labels.index(label) for label in rows["label"]]
    numbered = rows.remove_columns("label").add_column("label", numbers)
    encoded = encode_pairs(numbered, tokenizer, LENGTH)
    folds = np.array(rows["fold"])
    pairs = {fold: Pairs(encoded.select(np.flatnonzero(folds == fold)), tokenizer.pad_token_id or 0) for fold in FOLDS}

    def build_config(width: int) -> BertConfig:
        return BertConfig(
            vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=4 * width, max_position_embeddings=LENGTH, num_labels=len(labels),
        )  # fmt: skip

    return Task(
        name="nli",
        data=Path(nli_file).name,
        steps_per_epoch=len(pairs["train"].lengths) // BATCH_SIZE,
        model_class=BertForSequenceClassification,
        build_config=build_config,
        target_modules=None,
        batches=lambda seed: PairBatches(pairs["train"], batch_size=BATCH_SIZE, seed=seed),
        held_out=pairs["valid"].in_order(MEASURING_BATCH_SIZE, HELD_OUT_PAIRS),
        loss=model_loss,
        num_targets=lambda batch: len(batch["labels"]),
        test=pairs["test"].in_order(MEASURING_BATCH_SIZE),
    )


def read_pairs(nli_file: str) -> Dataset:
    """The rows of the file.

    Raises:
        ValueError: If a column or a fold is missing, or there are not enough rows for one batch.
    """
    rows = load_dataset("parquet", data_files=nli_file, split="train")
    missing = [name for name in COLUMNS if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"--nli_file {nli_file} has the columns {', '.join(rows.column_names)}, but not {', '.join(missing)}. "
            f"It needs {', '.join(COLUMNS)}; rename its columns to these."
        )
    counts = {fold: list(rows["fold"]).count(fold) for fold in FOLDS}
    if counts["train"] < BATCH_SIZE or not counts["valid"] or not counts["test"]:
        raise ValueError(
            f"--nli_file {nli_file} has {counts} rows by the column fold. It needs at least {BATCH_SIZE} for train, "
            "and some for valid and test."
        )
    return rows
