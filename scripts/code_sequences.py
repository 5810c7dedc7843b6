"""From text to token ids: ``<s> docstring </s> code </s>`` for functions, blocks of joined lines for plain text."""

from itertools import chain

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

DEFAULT_LENGTH = 128


def encode_corpus(
    corpus: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    *,
    line_by_line: bool = False,
    num_workers: int | None = None,
) -> DatasetDict:
    """Turn each split into rows of ``input_ids`` no longer than ``max_seq_length``.

    Raises:
        ValueError: If no sequence is left in a split.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        if "text" not in batch:
            return {"input_ids": bimodal_ids(batch["docstring"], batch["code"], tokenizer, max_seq_length)}
        return {"input_ids": text_ids(batch["text"], tokenizer, max_seq_length, line_by_line=line_by_line)}

    encoded = DatasetDict()
    for name, split in corpus.items():
        encoded[name] = split.map(
            encode, batched=True, remove_columns=split.column_names, num_proc=num_workers, desc=f"tokenising {name}"
        )
        if not len(encoded[name]):
            raise ValueError(f"The {name} text has {len(split)} rows but no token. It needs text that is not blank.")
    return encoded


def bimodal_ids(
    docstrings: list[str], codes: list[str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> list[list[int]]:
    """CodeBERT's input for each pair: ``<s> docstring </s> code </s>``, the longer part cut first."""
    start, separator = tokenizer.cls_token_id, tokenizer.sep_token_id
    budget = max_seq_length - 3
    pairs = zip(_plain_ids(docstrings, tokenizer), _plain_ids(codes, tokenizer), strict=True)
    sequences = []
    for docstring, code in pairs:
        kept = max(budget // 2, budget - len(code))
        docstring = docstring[:kept]
        sequences.append([start, *docstring, separator, *code[: budget - len(docstring)], separator])
    return sequences


def text_ids(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int, *, line_by_line: bool = False
) -> list[list[int]]:
    """``<s> text </s>`` for each line that is not blank, or for equal blocks of the joined lines."""
    start, separator = tokenizer.cls_token_id, tokenizer.sep_token_id
    budget = max_seq_length - 2
    if line_by_line:
        pieces = [ids[:budget] for ids in _plain_ids([text for text in texts if text.strip()], tokenizer)]
    else:
        joined = list(chain.from_iterable(_plain_ids([text + "\n" for text in texts], tokenizer)))
        pieces = [joined[i : i + budget] for i in range(0, len(joined), budget)]
    return [[start, *piece, separator] for piece in pieces if piece]


def check_length(max_seq_length: int | None, longest: int | None) -> int:
    """The sequence length to use: the wanted one, or as much of the default as the model takes.

    Args:
        max_seq_length: What the user asked for.
        longest: The most positions the model has; None if it has no limit.

    Raises:
        ValueError: If the wanted length is more than the model's positions, or too short to hold anything.
    """
    if max_seq_length is None:
        return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if longest is not None and max_seq_length > longest:
        raise ValueError(
            f"--max_seq_length {max_seq_length} is more than the model takes: its positions hold {longest} tokens. "
            f"Use --max_seq_length {longest}, or a model with random weights that is longer: --config_overrides "
            f'"max_position_embeddings={max_seq_length + 2}".'
        )
    if max_seq_length < 8:
        raise ValueError(f"--max_seq_length {max_seq_length} leaves no room between the separators. Use at least 8.")
    return max_seq_length


def sequence_lengths(rows: Dataset) -> np.ndarray:
    """Tokens in each sequence."""
    return np.concatenate([[len(ids) for ids in batch["input_ids"]] for batch in rows.iter(batch_size=10_000)])


def _plain_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids without special tokens, and without the warning that a text is longer than the model."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
