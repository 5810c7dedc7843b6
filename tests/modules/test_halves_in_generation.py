"""halves_bank.py and ttm_embedding.py of hf_comera/modules: generation makes halves and tables only once."""

import pytest

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear, TTMEmbedding, ttm_embedding
from tests.architectures import ARCHITECTURES


@pytest.fixture
def tables(monkeypatch):
    """One entry for each pair of half tables that is made."""
    made = []
    half_tables = ttm_embedding.half_tables
    monkeypatch.setattr(ttm_embedding, "half_tables", lambda cores: made.append(1) or half_tables(cores))
    return made


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5"])
def test_two_generations_build_once(name, builds, tables):
    architecture = ARCHITECTURES[name]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    for _ in range(2):
        ids = architecture.inputs()["input_ids"]
        model.generate(input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    kinds = [type(module) for module in model.modules()]
    assert sum(builds) == 2 * kinds.count(TTLinear), "a left and a right half of each layer"
    assert len(tables) == kinds.count(TTMEmbedding) == 1
