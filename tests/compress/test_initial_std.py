"""hf_comera/compress/initial_std.py: what the recorder says is what the architecture's initialiser really draws."""

import pytest
import torch

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.compress.initial_std import initial_stds
from hf_comera.modules import TensorTrainModule
from tests.architectures import every_architecture


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
