"""hf_comera/compress/prediction.py: counted operations are those of a real step, and time follows from two rates."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_comera import ComeraConfig, get_comera_model, predict_speed
from hf_comera.compress.prediction import MachineRates
from tests.architectures import ARCHITECTURES, every_architecture

RATES = MachineRates(flops=1e12, bytes=1e11)


@every_architecture
def test_operations_of_a_dense_model_are_those_that_torch_counts(architecture):
    model = architecture.new_model().train()
    found = predict_speed(model, batch_size=2, seq_len=8, rates=RATES)
    with torch.device("meta"):
        on_meta = architecture.auto_class.from_config(architecture.new_config())
    assert found == predict_speed(on_meta, batch_size=2, seq_len=8, rates=RATES)
    model.set_attn_implementation("eager")  # torch counts no fused attention of a CPU
    batch = architecture.training_inputs()
    batch = {name: tensor.new_zeros(2, 8) if tensor.ndim == 2 else tensor for name, tensor in batch.items()}
    if architecture.config.model_type == "t5":
        batch = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


@every_architecture
def test_steps_of_compressed_models_are_counted_with_and_without_values(architecture):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    live = predict_speed(model, batch_size=2, seq_len=8, rates=RATES)
    meta = predict_speed(model.to("meta"), batch_size=2, seq_len=8, rates=RATES)
    assert (live.flops, live.bytes) == (meta.flops, meta.bytes)
    assert live.flops > 0


def test_a_wide_model_is_predicted_to_be_faster_in_tensor_train_form():
    config = ARCHITECTURES["bert-classifier"].new_config()
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 768, 3072, 12
    with torch.device("meta"):
        dense = ARCHITECTURES["bert-classifier"].auto_class.from_config(config)
        ours = get_comera_model(ARCHITECTURES["bert-classifier"].auto_class, ComeraConfig(rank=30), config=config)
    times = [predict_speed(model, batch_size=32, seq_len=128, rates=RATES).seconds for model in (dense, ours)]
    assert times[0] > 2 * times[1]


def test_time_is_the_slower_of_two_limits():
    model = ARCHITECTURES["bert-mlm"].new_model()
    sizes = {"batch_size": 2, "seq_len": 8}
    by_flops = predict_speed(model, rates=MachineRates(flops=1e6, bytes=1e30), **sizes)
    assert by_flops.seconds == pytest.approx(by_flops.flops / 1e6, rel=1e-6)
    by_bytes = predict_speed(model, rates=MachineRates(flops=1e30, bytes=1e6), **sizes)
    assert by_bytes.seconds == pytest.approx(by_bytes.bytes / 1e6, rel=1e-6)
    both = predict_speed(model, rates=MachineRates(flops=1e6, bytes=1e6), **sizes)
    assert max(by_flops.seconds, by_bytes.seconds) < both.seconds < by_flops.seconds + by_bytes.seconds


def test_recomputation_costs_operations():
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4))
    kept = predict_speed(model, batch_size=2, seq_len=8, rates=RATES)
    again = predict_speed(model, batch_size=2, seq_len=8, rates=RATES, policy="rank")
    assert again.flops > kept.flops


def test_rates_of_this_machine_are_measured():
    rates = MachineRates.measure()
    assert 1e8 < rates.flops < 1e14
    assert 1e8 < rates.bytes < 1e13
