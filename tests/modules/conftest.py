"""Fixtures of the tests of layers that work together: what is built, small chunks."""

import pytest

from hf_comera.modules import halves_cache
from hf_comera.ops import bit_dropout, latent_attention, tiled_mlp


@pytest.fixture
def builds(monkeypatch):
    """Layers in each family that is built."""
    seen = []
    build = halves_cache.model_halves

    def watched(sides):
        seen.extend(len(side.cores) for side in sides)
        return build(sides)

    monkeypatch.setattr(halves_cache, "model_halves", watched)
    return seen


@pytest.fixture
def small_chunks(monkeypatch):
    """Blocks of any size do as large ones do, in more than one chunk."""
    monkeypatch.setattr(tiled_mlp, "CHUNK_ENTRIES", {"cpu": 60, "cuda": 60})
    monkeypatch.setattr(latent_attention, "_CHUNK_SCORES", 40)
    monkeypatch.setattr(bit_dropout, "MIN_NUMEL", 1)
