"""benchmarks/quality/training.py: each parameter has the rate it should, and Muon's steps the right norm."""

import math

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from benchmarks.quality.training import COHERENCE, make_optimizers, muon_rate_scale, rate_course
from hf_comera import ComeraConfig, comera_param_groups, get_comera_model, plan

LR, OTHER_LR = 0.5, 0.25
BERT = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=8,
)  # fmt: skip


def dense_weights(model):
    layers = plan(model, ComeraConfig())
    return {f"{layer.name}.weight": model.get_submodule(layer.name).weight for layer in layers}


def rates(model, optimizers):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = [(names[id(parameter)], group["lr"]) for group in groups for parameter in group["params"]]
    assert len(found) == len(names)
    return dict(found)


def test_adamw_gives_the_compared_weights_their_rate_and_all_else_the_other():
    model = BertForSequenceClassification(BERT)
    weights = dense_weights(model)
    assert any("word_embeddings" in name for name in weights)
    found = rates(model, make_optimizers("adamw", model, list(weights.values()), lr=LR, other_lr=OTHER_LR))
    assert {name for name, rate in found.items() if rate == LR} == set(weights)
    assert set(found.values()) == {LR, OTHER_LR}


def test_adamw_gives_cores_their_rate_and_all_else_the_other():
    model = get_comera_model(BertForSequenceClassification, ComeraConfig(rank=4), config=BERT)
    cores = {name: parameter for name, parameter in model.named_parameters() if ".core_" in name}
    found = rates(model, make_optimizers("adamw", model, list(cores.values()), lr=LR, other_lr=OTHER_LR))
    derived = {name: group["lr"] for group in comera_param_groups(model, LR) for name in group["names"]}
    assert {name: found[name] for name in cores} == {name: derived[name] for name in cores}
    assert {rate for name, rate in found.items() if name not in cores} == {OTHER_LR}


def test_muon_takes_matrices_of_linear_layers_and_leaves_embeddings_to_adamw():
    model = BertForSequenceClassification(BERT)
    weights = dense_weights(model)
    optimizers = make_optimizers("muon", model, list(weights.values()), lr=LR, other_lr=OTHER_LR)
    found = rates(model, optimizers)
    for name, weight in weights.items():
        embedding = "word_embeddings" in name
        assert found[name] == (OTHER_LR if embedding else pytest.approx(LR * muon_rate_scale(weight.shape)))
    muon, adamw = optimizers
    assert all(group["weight_decay"] * group["lr"] == pytest.approx(0.01 * LR) for group in muon.param_groups)
    assert {group["lr"] for group in adamw.param_groups} == {OTHER_LR}


def test_muon_moves_a_matrix_by_its_bound_whatever_its_shape():
    config = GPT2Config(
        vocab_size=32, n_embd=32, n_layer=1, n_head=2, n_positions=8, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    block = model.transformer.h[0]
    weights = [block.attn.c_attn.weight, block.attn.c_proj.weight, block.mlp.c_fc.weight, block.mlp.c_proj.weight]
    before = [weight.detach().clone() for weight in weights]
    optimizers = make_optimizers("muon", model, weights, lr=1e-3, other_lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        norm = torch.linalg.matrix_norm(weight.detach() - old, 2).item()
        # the iteration leaves singular values between 0.7 and 1.2 or so
        assert 0.6 < norm / (1e-3 * COHERENCE * math.sqrt(weight.numel())) < 1.3


@pytest.mark.parametrize("num_steps", [1, 5, 40, 5000])
def test_rates_rise_over_a_tenth_of_the_steps_and_fall_to_nothing(num_steps):
    share = rate_course(num_steps)
    shares = [share(step) for step in range(num_steps)]
    warmup = min(200, max(1, num_steps // 10))
    assert max(shares) == shares[warmup - 1] == 1
    assert 0 < min(shares)
    assert share(num_steps) == (0 if num_steps > 1 else pytest.approx(0))
    assert shares[:warmup] == sorted(shares[:warmup])
    assert shares[warmup:] == sorted(shares[warmup:], reverse=True)
