"""hf_comera/tt/machine.py: rates between the entries of a table, ceilings by dtype, a harmless calibration."""

import math
import time

import pytest
import torch

from hf_comera.tt.machine import CPU_THREAD, H200, H200_TF32, Ceilings, Machine, calibrated_cpu

THIN = ((1, 0.1), (8, 0.5), (64, 1.0))


@pytest.mark.parametrize(("size", "share"), [(1, 0.1), (4.5, 0.3), (8, 0.5), (36, 0.75), (64, 1), (999, 1)])
def test_rates_are_interpolated_in_the_smallest_share(size, share):
    ceilings = Ceilings(torch.float32, 100.0, math.inf, thin_inner=THIN, thin_columns=((1, 0.9),))
    assert ceilings.rate(5000, size, 5000) == pytest.approx(100 * min(share, 0.9))


def test_a_product_is_limited_by_flops_or_by_bytes():
    assert Ceilings(torch.float32, 10.0, math.inf).seconds(2, 3, 5) == 2 * 2 * 3 * 5 / 10
    assert Ceilings(torch.bfloat16, math.inf, 10.0).seconds(2, 3, 5) == 2 * (6 + 15 + 10) / 10


def test_large_results_cost_new_memory():
    machine = Machine("new", "a test", (), fresh_bandwidth=10.0, fresh_bytes=100)
    assert (machine.fresh_seconds(99), machine.fresh_seconds(100)) == (0.0, 10.0)


@pytest.mark.parametrize("machine", [CPU_THREAD, H200, H200_TF32], ids=lambda machine: machine.name)
def test_presets_know_the_usual_dtypes_and_say_that_they_are_no_measurements(machine):
    assert "not measured here" in machine.source
    assert machine.of(torch.float32).dtype == torch.float32
    assert machine.of(torch.bfloat16).flops > machine.of(torch.float32).flops
    assert machine.of(torch.float64).dtype == torch.float64


def test_a_dtype_without_ceilings_takes_those_of_a_wider_one():
    assert CPU_THREAD.of(torch.float16).dtype == torch.float32
    narrow = Machine("narrow", "a test", (Ceilings(torch.bfloat16, 1.0, 1.0),))
    with pytest.raises(ValueError, match="'narrow' has ceilings for torch"):
        narrow.of(torch.float32)


def test_calibration_is_quick_once_a_process_and_leaves_random_numbers_alone():
    state = torch.get_rng_state()
    start = time.perf_counter()
    machine = calibrated_cpu()
    assert time.perf_counter() - start < 30  # a tenth of a second in peace; this only says that nothing hangs
    assert machine is calibrated_cpu(torch.float32)
    assert torch.equal(state, torch.get_rng_state())
    assert machine.source == "measured in this process"
    assert machine.name == "this CPU, 1 thread"
    ceilings = machine.of(torch.float32)
    assert min(ceilings.flops, ceilings.bandwidth, ceilings.overhead, machine.fresh_bandwidth) > 0
    assert {entry.dtype for entry in calibrated_cpu(torch.bfloat16).ceilings} == {torch.float32, torch.bfloat16}


def test_calibration_is_one_of_this_cpu_in_the_dtype_asked_for_wherever_it_is_called():
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        ceilings = calibrated_cpu(torch.float64).of(torch.float64)
    assert 0 < ceilings.flops < 20e12, "products on the meta device would take no time"
