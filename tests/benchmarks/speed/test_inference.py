"""benchmarks/speed/inference.py: "anew" makes the halves for every forward pass, and leaves the model as it was."""

from functools import partial

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.speed import inference
from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import halves_cache


def test_halves_are_made_for_every_token(monkeypatch):
    built = []
    build = halves_cache._build
    monkeypatch.setattr(halves_cache, "_build", lambda members: built.append(1) or build(members))
    monkeypatch.setattr(inference, "NEW_TOKENS", 4)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=4), config=config).eval()
    run = partial(inference.generate, model, torch.ones(1, 3, dtype=torch.long))
    run()
    built.clear()
    run()
    assert len(built) == 0
    inference.anew(model, run)
    assert len(built) == 4
    run()
    assert len(built) == 4
