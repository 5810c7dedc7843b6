"""The public names of the library: changing this set is a visible choice."""

import importlib

import pytest

PUBLIC = {
    "hf_comera": {
        "ActivationPolicy",
        "Calibration",
        "CoatAdamW",
        "ComeraCallback",
        "ComeraConfig",
        "ComeraTrainer",
        "CompressionPlan",
        "Explanation",
        "GraphedStep",
        "HealingArguments",
        "HealingTrainer",
        "MemoryEstimate",
        "RankAdaptation",
        "RankAdapter",
        "RankReport",
        "SizeReport",
        "TTMuon",
        "add_rank_gates",
        "calibrate",
        "comera_param_groups",
        "estimate_memory",
        "explain",
        "export_onnx",
        "fold_rank_gates",
        "get_comera_model",
        "inspect_checkpoint",
        "is_comera_model",
        "merge_and_unload",
        "plan",
        "print_trainable_parameters",
        "predict_speed",
        "push_folder",
        "push_to_hub",
        "rank_report",
        "set_activation_policy",
        "set_fp8_linears",
        "set_head_and_loss",
        "size_report",
        "write_model_card",
    },
    "hf_comera.memory": {
        "ActivationPolicy",
        "Fp8LinearsReport",
        "MemoryEstimate",
        "SavedBytes",
        "activation_policy",
        "estimate_memory",
        "set_activation_policy",
        "set_fp8_linears",
    },
    "hf_comera.modules": {
        "CompressedLayer",
        "FactorizedEmbedding",
        "TTLinear",
        "TTMEmbedding",
        "TensorTrainModule",
        "TiedEmbedding",
        "TiedHead",
        "compressed_layers",
    },
    "hf_comera.ops": {
        "dense_linear",
        "low_rank_linear",
        "tt_linear",
        "ttm_lookup",
        "ttm_project",
        "use_kernels",
    },
    "hf_comera.training": {
        "ComeraCallback",
        "ComeraTrainer",
        "ComeraTrainerMixin",
        "GraphedStep",
        "HealingArguments",
        "HealingTrainer",
        "RankAdaptation",
        "RankAdapter",
        "add_rank_gates",
        "fold_rank_gates",
    },
    "hf_comera.optim": {"CoatAdamW", "TTMuon", "comera_param_groups", "take_saved_groups"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name]
    for public in PUBLIC[name]:
        thing = getattr(module, public)
        assert thing.__doc__, f"{name}.{public} has no docstring"


def test_importing_twice_is_harmless():
    import hf_comera

    importlib.reload(hf_comera)
    importlib.reload(importlib.import_module("hf_comera.hub.quantizer"))
