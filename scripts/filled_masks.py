"""Hide a name in held-out functions and let the model guess it: what the training is for, to be read by a person."""

import keyword
import re
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from code_sequences import bimodal_ids

_NAME = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True)
class FilledMask:
    """One function with a hidden name, and what the model puts there."""

    docstring: str
    code: str
    """The code the model saw, with the mask in it."""
    name: str
    guesses: list[tuple[str, float]]
    """Most probable tokens with their probabilities, best first."""


def fill_masks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    functions: Dataset,
    *,
    max_seq_length: int,
    wanted: int = 3,
    num_guesses: int = 5,
) -> list[FilledMask]:
    """Take functions spread evenly over ``functions``, hide the last use of a name, and ask the model for it.

    The choice looks at the text only, never at the model's answer. Text without code gives an empty list.
    """
    if "code" not in functions.column_names or not len(functions):
        return []
    filled = []
    for part in range(wanted):
        first, end = part * len(functions) // wanted, (part + 1) * len(functions) // wanted
        rows = (functions[row] for row in range(first, end))
        found = next(filter(None, (_hide_name(row, tokenizer, max_seq_length) for row in rows)), None)
        if found is not None:
            filled.append(_guess(model, tokenizer, *found, num_guesses))
    return filled


def _hide_name(
    row: dict[str, str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> tuple[dict[str, str], list[int], int] | None:
    """The function, its token ids and the place of a name to hide; None if it has no name that is one token.

    The name must occur in the code at least twice, so that a reader could guess it as well.
    """
    (ids,) = bimodal_ids([row["docstring"]], [row["code"]], tokenizer, max_seq_length)
    code_start = ids.index(tokenizer.sep_token_id) + 1
    words = [tokenizer.decode([token]).strip() for token in ids[code_start:-1]]
    texts = [tokenizer.decode([token]) for token in ids[code_start:-1]]
    for place in reversed(range(1, len(words) - 1)):
        name = words[place]
        if not _NAME.fullmatch(name) or keyword.iskeyword(name) or words.count(name) < 2:
            continue
        # A token may be a piece of a longer name: its neighbours tell.
        starts = texts[place] != name or not re.search(r"\w$", texts[place - 1])
        if starts and not re.match(r"\w", texts[place + 1]):
            return row, ids, code_start + place
    return None


@torch.no_grad()
def _guess(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, str],
    ids: list[int],
    place: int,
    num_guesses: int,
) -> FilledMask:
    hidden = [*ids[:place], tokenizer.mask_token_id, *ids[place + 1 :]]
    inputs = torch.tensor([hidden], device=model.device)
    probabilities = (
        model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0, place].float().softmax(-1)
    )
    best = probabilities.topk(num_guesses)
    guesses = [
        (tokenizer.decode([token]), p) for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    code_start = ids.index(tokenizer.sep_token_id) + 1
    lead = " " if tokenizer.decode([ids[place]]).startswith(" ") else ""
    code = (
        tokenizer.decode(ids[code_start:place])
        + f"{lead}{tokenizer.mask_token}"
        + tokenizer.decode(ids[place + 1 : -1])
    )
    return FilledMask(row["docstring"], code, tokenizer.decode([ids[place]]).strip(), guesses)
