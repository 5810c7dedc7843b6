"""Models whose layers do more than a Linear or an Embedding, or are edited on the way: right, or dense and said so."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from hf_comera import ComeraConfig, get_comera_model, plan
from hf_comera.compress.plan import CompressionPlan
from hf_comera.modules import TensorTrainModule

IDS = torch.arange(5, 23).view(2, 9)
ONE_LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SEAMLESS = {
    **{"vocab_size": 100, "t2u_vocab_size": 100, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"speech_encoder_layers": 1, "speech_encoder_attention_heads": 2, "t2u_encoder_layers": 1},
    **{"t2u_decoder_layers": 1, "t2u_encoder_attention_heads": 2, "t2u_decoder_attention_heads": 2},
}
LUKE = {**ONE_LAYER, "vocab_size": 100, "entity_vocab_size": 50, "entity_emb_size": 16, "max_position_embeddings": 66}
RWKV = {
    **{"vocab_size": 100, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 7},
    **{"intermediate_size": 64, "context_length": 64},
}
XLSTM = {
    **{"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 2},
    **{"chunk_size": 8, "qk_dim_factor": 1.0},
}


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("model_type", ["seamless_m4t", "seamless_m4t_v2"])
def test_an_embedding_that_shares_its_weight_with_scaled_ones_stays_dense(model_type, caplog):
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    dense = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(model_type, **SEAMLESS)).eval()
    expected = dense(**inputs)[0]
    model = get_comera_model(copy.deepcopy(dense), ComeraConfig(rank=10_000))
    assert type(model.shared) is nn.Embedding
    assert "ScaledWordEmbedding" in caplog.text
    assert "layers that share a weight stay dense, for example shared" in caplog.text
    assert relative(model(**inputs)[0], expected) < 1e-5
    assert relative(model.merge_and_unload()(**inputs)[0], expected) < 1e-5


def test_a_record_that_tied_scaled_embeddings_is_refused():
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("seamless_m4t_v2", **SEAMLESS))
    entry = {"kind": "ttm_embedding", "in_factors": [10, 10], "out_factors": [4, 8], "ranks": [8]}
    with pytest.raises(ValueError, match=r"'shared', whose weight .* shares, a SeamlessM4Tv2ScaledWordEmbedding"):
        plan(model, ComeraConfig(layers={"shared": entry}))


def test_a_head_tied_to_a_second_embedding_stays_dense_by_default():
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("luke", **LUKE))
    default = plan(model, ComeraConfig(rank=8))
    assert isinstance(default, CompressionPlan)
    assert "luke.embeddings.word_embeddings" in default.by_name
    assert not any(name.startswith("entity_predictions.decoder") for name in default.by_name)
    with pytest.raises(ValueError, match=r"'entity_predictions.decoder' shares its weight with 'luke.entity_embed"):
        plan(model, ComeraConfig(rank=8, target_modules=["entity_predictions.decoder"]))


def test_a_model_that_divides_its_weights_for_evaluation_goes_to_and_fro():
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", **RWKV))
    model = get_comera_model(copy.deepcopy(dense), ComeraConfig(rank=10_000))
    weights = {name: core.clone() for name, core in model.named_parameters()}
    for training in (True, False, True, False, True):
        with torch.no_grad():
            assert relative(model.train(training)(IDS).logits, dense.train(training)(IDS).logits) < 1e-5
    assert all(torch.equal(core, weights[name]) for name, core in model.named_parameters())


def test_a_model_that_clamps_a_weight_while_it_trains_does():
    """Gemma 3n's are a few coefficients, which stay dense."""
    settings = {**ONE_LAYER, "head_dim": 16, "num_key_value_heads": 1, "vocab_size": 100, "laurel_rank": 8}
    settings |= {"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma3n_text", **settings, layer_types=["full_attention"])
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=8), config=config).train()
    coefficients = model.model.layers[0].altup.prediction_coefs
    with torch.no_grad():
        coefficients.weight.fill_(1000.0)
    assert model(IDS).logits.isfinite().all()
    assert coefficients.weight.unique().tolist() == [config.altup_coef_clip]


def test_a_model_whose_initialiser_reads_the_model_around_it_is_built():
    """xLSTM's reads the embeddings of the model that initialises, which the head model has not."""
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=8), config=AutoConfig.for_model("xlstm", **XLSTM))
    assert sum(isinstance(module, TensorTrainModule) for module in model.modules()) > 10
    assert model.train()(torch.arange(5, 21).view(1, 16)).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")  # by the dense class
def test_layers_without_entries_stay_dense():
    """MobileBERT has one where its embedding is as wide as its layers."""
    settings = {**ONE_LAYER, "vocab_size": 100, "embedding_size": 32, "intra_bottleneck_size": 32}
    config = AutoConfig.for_model("mobilebert", **settings)
    model = get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=8), config=config)
    assert model.cls.predictions.dense.weight.numel() == 0
    assert model(IDS).logits.shape == (2, 9, 100)


WITHOUT_LAYERS = {
    "ibert": (AutoModelForMaskedLM, {**ONE_LAYER, "vocab_size": 100}, r"it has dense, decoder\..*QuantLinear \(6\)"),
    "mobilenet_v1": (AutoModelForImageClassification, {"image_size": 32}, r"it has classifier\..*Conv2d \(27\)"),
}


@pytest.mark.parametrize("model_type", WITHOUT_LAYERS)
def test_a_model_without_layers_to_compress_says_which_it_has(model_type):
    auto_class, settings, message = WITHOUT_LAYERS[model_type]
    with pytest.raises(ValueError, match=rf"The defaults leave nothing to compress in .*{message}"):
        get_comera_model(auto_class, ComeraConfig(rank=8), config=AutoConfig.for_model(model_type, **settings))
