"""The tokenizer: RoBERTa's byte-level BPE, trained on the corpus or loaded by name."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset
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
