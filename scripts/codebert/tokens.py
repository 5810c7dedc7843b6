"""The tokenizer, RoBERTa's byte-level BPE, and from text to token ids.

Functions become ``<s> docstring </s> code </s>``, plain text blocks of joined lines.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# In the order of their ids, 0 to 4.
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
# As in RoBERTa the mask takes the space before it along: "x = <mask>" asks for a token that begins with a space.
_MASK = AddedToken("<mask>", lstrip=True, special=True)
SMALLEST_VOCABULARY = len(pre_tokenizers.ByteLevel.alphabet()) + len(SPECIAL_TOKENS)
DEFAULT_LENGTH = 128


def train_tokenizer(corpus: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with RoBERTa's special tokens, learned from every column of ``corpus``.

    Raises:
        ValueError: If ``vocab_size`` has no room for all bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab_size {vocab_size} is too small: the 256 bytes and {len(SPECIAL_TOKENS)} special tokens need "
            f"{SMALLEST_VOCABULARY}. 4096 suits a few thousand functions, 50265 is RoBERTa's."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*list(SPECIAL_TOKENS.values())[:-1], _MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer=trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        sep_token="</s>",
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS | {"mask_token": _MASK},
    )


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer by Hub name or folder, fit for masked language modelling.

    Raises:
        ValueError: If there is none under that name, or it lacks a token that masking and separating need.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"No tokenizer could be loaded from {name}: {error} Give --tokenizer_name, or train one on the data with "
            "--vocab_size 4096."
        ) from error
    needed = ("cls_token", "sep_token", "pad_token", "mask_token")
    missing = [token for token in needed if getattr(tokenizer, token) is None]
    if missing:
        raise ValueError(
            f"The tokenizer {name} has no {', '.join(missing)}. Use that of a masked model, e.g. roberta-base."
        )
    return tokenizer


def _texts(corpus: Dataset) -> Iterator[list[str]]:
    for batch in corpus.iter(batch_size=1000):
        for column in batch.values():
            yield [text for text in column if text]


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
