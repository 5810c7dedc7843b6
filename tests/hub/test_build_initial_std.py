"""hf_comera/hub/build.py: what the recorder says is what the architecture's initialiser really draws."""

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
)

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.hub.build import initial_stds
from hf_comera.modules import TensorTrainModule
from tests.architectures import SIZES, WORDS, every_architecture


@every_architecture
def test_recorded_deviations_are_those_of_real_draws(architecture):
    with torch.device("meta"):
        on_meta = architecture.auto_class.from_config(architecture.new_config())
    stds = initial_stds(on_meta)
    dense = dict(architecture.new_model().named_parameters())
    large = [name for name, p in dense.items() if p.ndim == 2 and p.numel() > 1000]
    assert large
    for name in large:
        assert stds[name] == pytest.approx(dense[name].std().item(), rel=0.12), name


@every_architecture
def test_new_models_start_with_them(architecture):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    dense = architecture.new_model()
    for name, module in model.named_modules():
        if isinstance(module, TensorTrainModule):
            expected = dense.get_submodule(name).weight.std().item()
            assert module.dense().std().item() == pytest.approx(expected, rel=0.12), name


def llava():
    """Two models in one, with deviations that differ by far; the language model's are wide."""
    text = LlamaConfig(**SIZES, **WORDS, num_key_value_heads=2, initializer_range=0.5)
    vision = CLIPVisionConfig(**SIZES, image_size=32, patch_size=8)
    return LlavaConfig(text_config=text, vision_config=vision)


def test_layers_of_a_model_inside_a_model_start_as_that_one_would_have_them():
    model = get_comera_model(AutoModelForImageTextToText, ComeraConfig(rank=10_000), config=llava())
    dense = AutoModelForImageTextToText.from_config(llava())
    stds = {
        name: (module.dense().std().item(), dense.get_submodule(name).weight.std().item())
        for name, module in model.named_modules()
        if isinstance(module, TensorTrainModule)
    }
    towers = {name.split(".")[1] for name in stds}
    assert {"vision_tower", "language_model"} <= towers
    for name, (ours, expected) in stds.items():
        assert ours == pytest.approx(expected, rel=0.12), name


COMPOSITE = ("glm4v_moe", "ernie4_5_vl_moe", "glm5_next", "mistral_large4", "aimv2", "muse_spark")


@pytest.mark.parametrize("model_type", COMPOSITE)
def test_a_config_around_others_need_not_say_how_weights_start(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type]()
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        for name in ("num_hidden_layers", "depth"):
            if getattr(part, name, None):
                setattr(part, name, 1)
    auto_class = AutoModel if model_type == "aimv2" else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto_class.from_config(config)
    stds = initial_stds(model)
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    assert linears
    assert all(stds[f"{name}.weight"] > 0 for name in linears)
