"""Fixtures of the tests of layers that work together: what is built, how stand-ins are used, small chunks."""

import pytest
from hf_comera.modules.wide_hidden import WideHidden

from hf_comera.modules import TTLinear, halves_bank, unwritten_heads, wide_hidden
from hf_comera.ops import dropped_attention, kept_bits, wide_code


@pytest.fixture
def builds(monkeypatch):
    """Layers in each family that is built."""
    seen = []
    build = halves_bank.model_halves

    def watched(sides):
        seen.extend(len(side.cores) for side in sides)
        return build(sides)

    monkeypatch.setattr(halves_bank, "model_halves", watched)
    return seen


@pytest.fixture
def low_rank_path(monkeypatch):
    """Every layer is on the low-rank path, also one so small that it would be dense."""
    monkeypatch.setattr(TTLinear, "prefers_dense", False)


@pytest.fixture
def stand_ins(monkeypatch):
    """Layers of any size work together as large ones do."""
    monkeypatch.setattr(TTLinear, "prefers_dense", False)
    monkeypatch.setattr(wide_hidden, "WORTH_CHUNKS", 1)
    monkeypatch.setattr(unwritten_heads, "WORTH_CODES", 1)
    monkeypatch.setattr(kept_bits, "WORTH_BITS", 1)


@pytest.fixture
def dense_path(monkeypatch):
    """Takes a layer, which from then on is on the dense path; all others are on the low-rank path."""
    chosen = []
    monkeypatch.setattr(TTLinear, "prefers_dense", property(lambda self: self in chosen))
    return chosen.append


@pytest.fixture
def small_chunks(stand_ins, monkeypatch):
    """Besides, in more than one chunk."""
    monkeypatch.setattr(wide_code, "CHUNK_ENTRIES", 60)
    monkeypatch.setattr(dropped_attention, "_CHUNK_SCORES", 40)


@pytest.fixture
def draws_of_torch(monkeypatch):
    """Stand-ins drop what torch drops of real tensors, for the same seed."""
    monkeypatch.setattr(kept_bits, "serves", lambda *args: False)


def watched(monkeypatch, kind, *names):
    """The names of methods of ``kind``, as they are called: how stand-ins are used."""
    seen = []
    for name in names:
        original = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, *args, name=name, original=original: seen.append(name) or original(self, *args)
        )
    return seen


@pytest.fixture
def uses(monkeypatch):
    """As a code, or made real."""
    return watched(monkeypatch, WideHidden, "code", "real")
