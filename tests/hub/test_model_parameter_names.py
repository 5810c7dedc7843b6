"""hf_comera/hub/model.py: a checkpoint has the names of the model, whatever Transformers makes of dense ones."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from hf_comera import ComeraConfig, get_comera_model

PICTURE = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
INKLING = {
    **{"hidden_size": 48, "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "rel_extent": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "swa_num_attention_heads": 4, "d_rel": 4},
    **{"swa_num_key_value_heads": 2, "swa_head_dim": 12, "vocab_size": 131, "unpadded_vocab_size": 131},
    **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    **{"eos_token_id": 1, "bos_token_id": 2},
}
TIPS_TEXT = {
    **{"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96},
    **{"vocab_size": 131, "max_position_embeddings": 16},
}
CONVERTED = {  # Transformers joins query, key and value of the first two, and renames a layer of the third
    "radio": (AutoModel, {**PICTURE, "max_img_size": 56, "patch_dim": 588}, "pixel_values"),
    "dinov2": (AutoModel, {**PICTURE, "use_swiglu_ffn": True}, "pixel_values"),
    "inkling2_text": (AutoModelForCausalLM, INKLING, "input_ids"),
    # and would lengthen names of this one that are the model's own
    "tipsv2_text_model": (AutoModel, TIPS_TEXT, "input_ids"),
}


@pytest.mark.parametrize("model_type", [name for name in CONVERTED if name in CONFIG_MAPPING])
@pytest.mark.parametrize("asked", [None, True], ids=["by-default", "original-format-asked-for"])
def test_models_whose_weights_are_converted_come_back(model_type, asked, tmp_path):
    auto_class, settings, reads = CONVERTED[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    model = get_comera_model(auto_class, ComeraConfig(rank=6), config=config).eval()
    inputs = {reads: torch.rand(1, 3, 28, 28) if reads == "pixel_values" else torch.arange(2, 14).view(2, 6)}
    model.save_pretrained(tmp_path, **({} if asked is None else {"save_original_format": asked}))
    names = {name for name in load_file(tmp_path / "model.safetensors") if ".core_" in name}
    assert names == {name for name, _ in model.named_parameters() if ".core_" in name}
    loaded, found = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs)[0], model(**inputs)[0])
