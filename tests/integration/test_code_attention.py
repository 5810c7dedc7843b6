"""Every class of attention that is said to take codes takes them, and computes what it computes without."""

import pytest
import torch
from hf_comera.compress.siblings import ATTENTIONS, attends_to_codes
from hf_comera.modules.unwritten_heads import UnwrittenHeads
from transformers import AutoModel, ViTConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear, unwritten_heads
from hf_comera.ops import kept_bits

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
WORDS = {"vocab_size": 241, "max_position_embeddings": 66, "pad_token_id": 0, **SIZES}
IMAGES = {"image_size": 32, "patch_size": 8, **SIZES}
MODELS = {  # model type -> (class of its attention, sizes)
    "bert": ("BertSelfAttention", WORDS),
    "roberta": ("RobertaSelfAttention", WORDS),
    "xlm-roberta": ("XLMRobertaSelfAttention", WORDS),
    "camembert": ("CamembertSelfAttention", WORDS),
    "electra": ("ElectraSelfAttention", {**WORDS, "embedding_size": 48}),
    "ernie": ("ErnieSelfAttention", WORDS),
    "layoutlm": ("LayoutLMSelfAttention", WORDS),
    "distilbert": (
        "DistilBertSelfAttention",
        {"vocab_size": 241, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "vit": ("ViTAttention", IMAGES),
    "deit": ("DeiTAttention", IMAGES),
    "dinov2": ("Dinov2Attention", IMAGES),
    "siglip_vision_model": ("SiglipAttention", IMAGES),
    "gpt2": ("GPT2Attention", {"vocab_size": 241, "n_positions": 66, "n_embd": 48, "n_layer": 2, "n_head": 4}),
    "opt": (
        "OPTAttention",
        {**WORDS, "ffn_dim": 96, "word_embed_proj_dim": 48, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "clip_text_model": ("CLIPAttention", {**WORDS, "bos_token_id": 0, "eos_token_id": 1}),
}


def test_every_class_has_a_model_here():
    assert {name for name, _ in MODELS.values()} == set(ATTENTIONS)


def inputs_for(sizes):
    if "image_size" in sizes:
        return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(2, 241, (2, 9)), "attention_mask": mask}


def results(model, inputs):
    torch.manual_seed(2)
    y = model(**inputs).last_hidden_state
    model.zero_grad()
    (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum().backward()
    return y, [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def models(monkeypatch):
    """Makes a model whose layers are large enough, as it were; its gradients are in float64."""
    monkeypatch.setattr(TTLinear, "prefers_dense", False)
    monkeypatch.setattr(unwritten_heads, "WORTH_CODES", 1)
    monkeypatch.setattr(kept_bits, "serves", lambda *args: False)  # drop what attention of tensors drops

    def model_of(model_type, sizes, **settings):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type](**sizes)
        model = get_comera_model(AutoModel, ComeraConfig(rank=7, **settings), config=config).double().train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
        return model

    return model_of


def groups(model):
    return {module.joined for module in model.modules() if isinstance(module, TTLinear) and module.joined}


@pytest.mark.parametrize(("model_type", "row"), MODELS.items(), ids=MODELS)
def test_models(model_type, row, models, monkeypatch):
    attention, sizes = row
    model, inputs = models(model_type, sizes), inputs_for(sizes)
    assert any(type(module).__name__ == attention for module in model.modules())
    codes, original = [], UnwrittenHeads.code
    monkeypatch.setattr(UnwrittenHeads, "code", lambda self, left: codes.append(1) or original(self, left))
    monkeypatch.setattr(UnwrittenHeads, "_made", None)
    found = results(model, inputs)
    assert len(codes) == 2
    for group in groups(model):
        group.attention = None
    torch.testing.assert_close(found, results(model, inputs))
    assert len(codes) == 2


def test_a_prompt_in_codes_goes_on_as_one_in_tensors(models):
    model, ids = models("gpt2", MODELS["gpt2"][1]).eval(), torch.randint(2, 241, (2, 9))
    found = []
    for _ in range(2):
        with torch.no_grad():
            prompt = model(ids, use_cache=True)
            found.append(model(ids[:, :4], past_key_values=prompt.past_key_values).last_hidden_state)
        for group in groups(model):
            group.attention = None
    torch.testing.assert_close(*found)


def test_gpt2_with_cross_attention_does_without_there(models):
    model = models("gpt2", {**MODELS["gpt2"][1], "add_cross_attention": True})
    assert sum(group.attention is not None for group in groups(model)) == 2


@pytest.mark.parametrize("model_type", ["bert", "vit"])
def test_another_implementation_of_attention_gets_tensors(model_type, models):
    sizes = MODELS[model_type][1]
    model, inputs = models(model_type, sizes), inputs_for(sizes)
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        model.set_attn_implementation("eager")
        found = model(**inputs, output_attentions=True)
    torch.testing.assert_close(found.last_hidden_state, expected)
    assert found.attentions[0].shape[:2] == (2, 4)


def test_a_decoder_and_a_model_without_all_three_do_without(models):
    decoder = models("bert", {**WORDS, "is_decoder": True})
    partly = models("bert", WORDS, exclude_modules=["key"])
    assert not any(group.attention for model in (decoder, partly) for group in groups(model))


def test_a_class_of_somebody_else_of_the_same_name_does_without():
    namesake = type("ViTAttention", (torch.nn.Module,), {})()
    assert not attends_to_codes(namesake)
    namesake.config = ViTConfig()
    assert not attends_to_codes(namesake)
