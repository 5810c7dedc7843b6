"""training/cuda_graphs/step.py: what cannot be trained with CUDA graphs is refused, with what to do instead."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from hf_comera import GraphedStep
from hf_comera.training.cuda_graphs.step import check_trainer_graphs


def model_and_optimizer():
    model = torch.nn.Linear(3, 3)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.fixture
def accelerate():
    yield Accelerator
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_accumulation_is_refused(accelerate):
    model, optimizer = accelerate(cpu=True, gradient_accumulation_steps=4).prepare(*model_and_optimizer())
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4 is set in the Accelerator.*4 times as large"):
        GraphedStep(model, optimizer)


def test_a_scaler_is_refused():
    model, optimizer = model_and_optimizer()
    wrapper = SimpleNamespace(optimizer=optimizer, scaler=object())
    with pytest.raises(ValueError, match="Use mixed_precision='bf16'"):
        GraphedStep(model, wrapper)


def test_a_model_in_several_processes_is_refused():
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=r"The model is in DataParallel.*Pass the bare model"):
        GraphedStep(torch.nn.DataParallel(model), optimizer)
    model.weight.placements = ("sharded",)
    with pytest.raises(ValueError, match="The model is in FSDP"):
        GraphedStep(model, optimizer)


def test_an_adapter_of_another_optimizer_is_refused():
    model, optimizer = model_and_optimizer()
    adapter = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"another optimizer \(SGD\) than the one given \(AdamW\)"):
        GraphedStep(model, optimizer, adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 0},
        {"max_grad_norm": -1.0},
        {"num_warmup_steps": 0},
        {"num_warmup_steps": 1.5},
        {"buckets": ()},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"{name}=.* is needed as .*for example"):
        GraphedStep(*model_and_optimizer(), **settings)


def arguments(**settings):
    usual = {"gradient_accumulation_steps": 1, "fp16": False, "world_size": 1, "fsdp": "", "deepspeed": None}
    return SimpleNamespace(**{**usual, "torch_compile": False, "n_gpu": 0, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"fp16": True},
        {"world_size": 2},
        {"fsdp": "full_shard"},
        {"deepspeed": "config.json"},
        {"torch_compile": True},
    ],
    ids=str,
)
def test_training_arguments_that_do_not_go_with_graphs_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"cuda_graphs=True does not work with {name}={value!r}"):
        check_trainer_graphs(arguments(**settings), cuda_graphs=True, padding_buckets=None)
    check_trainer_graphs(arguments(**settings), cuda_graphs=False, padding_buckets=None)


def test_the_others_are_taken():
    check_trainer_graphs(arguments(), cuda_graphs=True, padding_buckets=(64,))
    with pytest.raises(ValueError, match="would use 2"):
        check_trainer_graphs(arguments(n_gpu=2), cuda_graphs=True, padding_buckets=None)
