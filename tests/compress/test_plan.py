"""hf_comera/compress/plan.py: the plan says what will be, before a weight moves."""

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    ResNetConfig,
)

from hf_comera import ComeraConfig, get_comera_model, plan, size_report
from hf_comera.modules import TensorTrainModule
from hf_comera.tt.planner import RULE
from tests.architectures import ARCHITECTURES, every_architecture

PUBLISHED = {  # arXiv:2405.14377, the six-encoder model
    "rank_pattern": {"word_embeddings": 32},
    "factor_pattern": {"word_embeddings": {"in_factors": [16, 20, 10, 10], "out_factors": [4, 4, 8, 6]}},
}


@every_architecture
def test_the_plan_of_a_new_model_comes_true(architecture):
    config = ComeraConfig(rank=4)
    compression = plan(architecture.new_model(), config)
    model = get_comera_model(architecture.auto_class, config, config=architecture.new_config())
    assert sum(p.numel() for p in model.parameters()) == compression.parameters
    assert list(model.comera_plan()) == list(compression)


@every_architecture
def test_the_plan_comes_true(architecture):
    config = ComeraConfig(rank=4)
    model = architecture.new_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    compression = plan(model, config)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert len(compression.layers) == architecture.num_layers
    assert len(compression.ties) == architecture.num_tied
    model = get_comera_model(model, config)
    assert sum(p.numel() for p in model.parameters()) == compression.parameters
    for layer in compression:
        module = model.get_submodule(layer.name)
        assert isinstance(module, TensorTrainModule)
        assert (module.in_factors, module.out_factors, module.ranks) == (
            layer.in_factors,
            layer.out_factors,
            layer.ranks,
        )
        assert module.num_core_parameters == layer.parameters
        assert module.num_dense_parameters == layer.dense_parameters


def test_the_published_six_encoder_model():
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(BertConfig(num_hidden_layers=6))
    sizes = {
        layer.name.rpartition("layer.0.")[2]: layer.parameters for layer in plan(model, ComeraConfig(**PUBLISHED))
    }
    assert sizes["attention.self.query"] == 20_448
    assert sizes["intermediate.dense"] == sizes["output.dense"] == 28_960


def test_the_printed_table():
    compression = plan(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank=4))
    text = str(compression)
    for part in (
        "bert.encoder.layer.1.attention.self.query",
        "4x4x3 -> 3x4x4",
        "4 4 4 4 4",
        "whole model",
        "2,304",
        "ratio",
    ):
        assert part in text
    assert "cls.predictions.decoder uses the cores of bert.embeddings.word_embeddings" in " ".join(text.split())
    assert f"{compression.parameters:,}" in text


def test_layers_that_would_grow_are_pointed_out():
    compression = plan(ARCHITECTURES["bert-classifier"].new_model(), ComeraConfig(rank=1000, target_modules=["query"]))
    assert "no smaller than dense at these ranks" in " ".join(str(compression).split())


def test_layers_on_the_dense_path_are_pointed_out():
    model = ARCHITECTURES["bert-classifier"].new_model()
    low, high = (
        " ".join(str(plan(model, ComeraConfig(rank=rank, target_modules=["query"]))).split()) for rank in (4, 48)
    )
    assert f"multiplied as a dense matrix ({RULE}): bert.encoder.layer.0.attention.self.query" in high
    assert "dense matrix" not in low


def test_patterns_choose_factors_and_ranks_per_layer():
    config = ComeraConfig(
        rank=3,
        target_modules=["query", "key", "word_embeddings"],
        rank_pattern={r"layer\.0\..*query": 5, "key": [2, 3, 1]},
        factor_pattern={
            "key": {"in_factors": [6, 8], "out_factors": [8, 6]},
            "word_embeddings": {"out_factors": [6, 8]},
        },
    )
    layers = {layer.name: layer for layer in plan(ARCHITECTURES["bert-classifier"].new_model(), config)}
    assert max(layers["bert.encoder.layer.0.attention.self.query"].ranks) == 5
    assert max(layers["bert.encoder.layer.1.attention.self.query"].ranks) == 3
    assert layers["bert.encoder.layer.1.attention.self.key"].ranks == (2, 3, 1)
    assert layers["bert.embeddings.word_embeddings"].out_factors == (6, 8)
    assert len(layers["bert.embeddings.word_embeddings"].in_factors) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"factor_pattern": {"query": {"in_factors": [4, 8]}}},
            r"factor_pattern: in_factors of bert\.encoder.*query=\(4, 8\) multiply to 32, but the layer has size 48",
        ),
        (
            {"factor_pattern": {"word_embeddings": {"in_factors": [16, 16], "out_factors": [3, 4, 4]}}},
            "differ in number",
        ),
        ({"rank_pattern": {"query": [1, 2]}}, "rank_pattern for bert.*query=.* has 2 entries, but the cores have 5"),
    ],
)
def test_settings_that_do_not_fit_the_layers_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(ARCHITECTURES["bert-classifier"].new_model(), ComeraConfig(**settings))


def test_a_tied_head_alone_cannot_be_compressed():
    with pytest.raises(ValueError, match=r"'lm_head' shares its weight with 'transformer.wte', which is not selected"):
        plan(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(target_modules=["lm_head"]))


def test_a_compressed_model_is_refused():
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=2))
    with pytest.raises(ValueError, match=r"already holds compressed layers. Call model.merge_and_unload"):
        plan(model, ComeraConfig(rank=2))


def test_recorded_layers_of_another_architecture_are_refused():
    recorded = {"nowhere": {"kind": "tt_linear", "in_factors": [4], "out_factors": [4], "ranks": [2]}}
    with pytest.raises(ValueError, match="None of the compressed layers of this checkpoint"):
        plan(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(layers=recorded))


def test_meta_models_are_planned_without_memory():
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(BertConfig())
    assert plan(model, ComeraConfig()).ratio > 10


def test_linear_layers_that_share_a_weight_stay_dense(caplog):
    """Deformable DETR has its heads twice; two trains could not share their cores."""
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = DeformableDetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5, with_box_refine=True,
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
    )  # fmt: skip
    model = DeformableDetrForObjectDetection(config).eval()
    size = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        images = {"pixel_values": torch.randn(1, 3, 256, 256)}
        expected = model(**images).logits
        compressed = get_comera_model(model, ComeraConfig(rank=10_000, target_modules="all-linear"))
        torch.testing.assert_close(compressed(**images).logits, expected, rtol=1e-4, atol=1e-4)
    assert "layers that share a weight stay dense, for example model.decoder.bbox_embed" in caplog.text
    assert "and both are linear layers" in caplog.text
    assert size_report(compressed).dense_parameters == size
