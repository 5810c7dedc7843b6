"""hf_comera/compress/wiring.py and siblings.py: layers work together by name, and a model computes as if alone."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MPNetConfig,
    OPTConfig,
    T5Config,
    ViTConfig,
)

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear, wide_hidden
from hf_comera.modules.halves_bank import HalvesBank
from hf_comera.modules.wide_hidden import WideHidden
from hf_comera.ops import wide_code

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5_SIZES = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
BART = BartConfig(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, **WORDS,
)  # fmt: skip
DISTILBERT = DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=99)
OPT = OPTConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, word_embed_proj_dim=32, **WORDS
)  # fmt: skip
T5 = {kind: T5Config(**T5_SIZES, vocab_size=99, feed_forward_proj=kind) for kind in ("relu", "gated-gelu")}
MODELS = {  # (class, config, groups of siblings, products they save, blocks without hidden layer)
    "bert": (AutoModelForMaskedLM, BertConfig(**SIZES, **WORDS), 2, 4, 2),
    "distilbert": (AutoModelForMaskedLM, DISTILBERT, 2, 4, 2),
    "mpnet": (AutoModelForMaskedLM, MPNetConfig(**SIZES, **WORDS), 2, 4, 2),
    "gpt2": (AutoModelForCausalLM, GPT2Config(n_embd=32, n_layer=2, n_head=2, **WORDS), 0, 0, 2),
    "neox": (AutoModelForCausalLM, GPTNeoXConfig(**SIZES, **WORDS), 0, 0, 2),
    "opt": (AutoModelForCausalLM, OPT, 2, 4, 2),
    "llama": (AutoModelForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=1, **WORDS), 4, 6, 2),
    "t5": (AutoModelForSeq2SeqLM, T5["relu"], 3, 5, 2),
    "t5-gated": (AutoModelForSeq2SeqLM, T5["gated-gelu"], 5, 7, 2),
    "bart": (AutoModelForSeq2SeqLM, BART, 3, 5, 2),
    "vit": (AutoModelForImageClassification, ViTConfig(**SIZES, image_size=16, patch_size=8), 2, 4, 2),
}  # fmt: skip


def inputs_of(config):
    if config.model_type == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 99, (2, 7))
    return {"input_ids": ids, "labels": ids}


def loss_and_gradients(model, inputs):
    loss = model(**inputs).loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [loss, *torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", MODELS)
def test_layers_together_compute_what_they_compute_alone(name, monkeypatch):
    auto_class, config, num_groups, num_saved, num_blocks = MODELS[name]
    monkeypatch.setattr(wide_hidden, "WORTH_CHUNKS", 1)
    monkeypatch.setattr(wide_code, "CHUNK_ENTRIES", 5 * 64)
    uses = []
    for method in ("code", "real"):
        original = getattr(WideHidden, method)
        record = lambda self, *args, method=method, original=original: uses.append(method) or original(self, *args)  # noqa: E731
        monkeypatch.setattr(WideHidden, method, record)
    model = get_comera_model(auto_class, ComeraConfig(rank=4), config=copy.deepcopy(config)).double().eval()
    layers = [module for module in model.modules() if isinstance(module, TTLinear)]
    groups = {id(layer.joined): layer.joined for layer in layers if layer.has_siblings}
    inputs = inputs_of(config)
    together = loss_and_gradients(model, inputs)
    assert len({id(layer.halves_bank) for layer in layers}) == 1
    assert len(groups) == num_groups
    assert sum(group.num_joined for group in groups.values()) == num_saved
    assert all(group.num_wasted == 0 and group.num_waiting == 0 for group in groups.values())
    assert uses == ["code"] * num_blocks
    for layer in layers:
        layer.join_bank(HalvesBank())
        layer.joined, layer.is_wide = None, False
    torch.testing.assert_close(together, loss_and_gradients(model, inputs))
