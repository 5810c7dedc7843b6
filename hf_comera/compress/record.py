"""The record of compressed layers in ``config.json``, checked before anything is built from it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["KINDS", "check_record", "record_digest", "refuse_rank_activation"]

KINDS = ("tt_linear", "ttm_embedding", "factorized_embedding")
"""The kinds of compressed layers."""

REMEDY = "Restore the config.json that was saved with these weights"


def check_record(layers: Any) -> None:
    """Refuse a record that does not say of every layer what it became.

    Args:
        layers: ``quantization_config.layers`` of a ``config.json``; None where nothing is recorded.

    Raises:
        ValueError: With the layer, the entry, what was found and what is needed.
    """
    if layers is None:
        return
    if not isinstance(layers, Mapping):
        raise ValueError(
            f"layers is a {type(layers).__name__}, but is needed as a dictionary of layer names and entries. {REMEDY}."
        )
    for name, entry in layers.items():
        if isinstance(entry, Mapping):
            refuse_rank_activation(entry.get("rank_activation"), f"layers[{name!r}]: ")
        problem = _problem(entry)
        if problem is not None:
            raise ValueError(f"layers[{name!r}]: {problem}. {REMEDY}.")


def refuse_rank_activation(value: Any, place: str = "") -> None:
    """Refuse a nonlinearity between the halves, which earlier releases had; None is how they wrote that there is none.

    Raises:
        ValueError: If there is one.
    """
    if value is not None:
        raise ValueError(
            f"{place}rank_activation={_shown(value)} was removed: models with a nonlinearity between the halves of "
            "their layers learned no better, and had no dense weights. Leave it out; a checkpoint of a model that was "
            "trained with it loads with the release of hf_comera that saved it."
        )


def record_digest(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """A short name for all that decides what the layers compute; ranks are left out, since the cores have them.

    >>> entry = {"kind": "tt_linear", "in_factors": [2, 3], "out_factors": [2, 2], "ranks": [2, 4, 2]}
    >>> record_digest({"fc": entry}) == record_digest({"fc": {**entry, "ranks": [2, 3, 2], "error": 0.5}})
    True
    >>> record_digest({"fc": entry}) == record_digest({"fc": {**entry, "in_factors": [3, 2]}})
    False
    """
    facts = {
        name: {key: value for key, value in entry.items() if key not in ("ranks", "error", "output_error")}
        for name, entry in layers.items()
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _problem(entry: Any) -> str | None:
    """The fault of one entry, or None."""
    if not isinstance(entry, Mapping):
        return f"{_shown(entry)} is not a dictionary"
    if entry.get("kind") not in list(KINDS):  # a list, since a bad value may be unhashable
        return f"kind={_shown(entry.get('kind'))} is needed as one of {', '.join(map(repr, KINDS))}"
    for key in ("in_factors", "out_factors", "ranks"):
        least = 0 if key == "ranks" else 1
        if not _are_integers(entry.get(key), least):
            return f"{key}={_shown(entry.get(key))} is needed as a list of integers of at least {least}"
    return _misfit(entry) or _wrong_detail(entry)


def _misfit(entry: Mapping[str, Any]) -> str | None:
    """Whether factors and ranks are as many as belong together."""
    num_in, num_out, ranks = len(entry["in_factors"]), len(entry["out_factors"]), entry["ranks"]
    if not num_in or not num_out:
        return "in_factors and out_factors must have at least one factor each"
    if entry["kind"] != "tt_linear" and num_in != num_out:
        return f"an embedding needs as many in_factors as out_factors, but there are {num_in} and {num_out}"
    num_bonds = (num_in + num_out if entry["kind"] == "tt_linear" else num_in) - 1
    if len(ranks) != num_bonds:
        return f"ranks={_shown(ranks)} has {len(ranks)} entries, but these factors have {num_bonds} bonds"
    if 0 in ranks and any(ranks):
        return f"ranks={_shown(ranks)} are partly zero; a layer keeps all its bonds, or is removed with all of them"
    return None


def _wrong_detail(entry: Mapping[str, Any]) -> str | None:
    gates = entry.get("rank_gates", False)
    for key in ("error", "output_error"):
        error = entry.get(key)
        if error is not None and (isinstance(error, bool) or not isinstance(error, int | float) or not error >= 0):
            return f"{key}={_shown(error)} is needed as a number of at least 0"
    if (entry["kind"] == "factorized_embedding") != _are_integers([entry.get("width")], 1):
        return f"width={_shown(entry.get('width'))} is needed as a positive integer of a factorized embedding alone"
    if not isinstance(gates, bool):
        return f"rank_gates={_shown(gates)} is needed as true or false"
    return None


def _are_integers(values: Any, least: int) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values
    )


def _shown(value: Any) -> str:
    """A value in a message: long ones are cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
