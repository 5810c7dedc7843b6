"""hf_comera/compress/reports.py: counts agree with the dense model, ties once."""

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, get_comera_model, print_trainable_parameters, size_report
from tests.architectures import every_architecture


@every_architecture
def test_counts_agree_with_the_dense_and_the_compressed_model(architecture):
    dense = architecture.new_model()
    expected_dense = sum(p.numel() for p in dense.parameters())
    model = get_comera_model(dense, ComeraConfig(rank=4))
    report = size_report(model)
    assert report.dense_parameters == expected_dense
    assert report.parameters == report.trainable_parameters == sum(p.numel() for p in model.parameters())
    assert report.bytes == 4 * report.parameters
    assert report.dense_bytes == 4 * expected_dense
    assert report.ratio == expected_dense / report.parameters
    assert (
        report.dense_parameters - report.parameters
        == report.compressed_dense_parameters - report.compressed_parameters
    )


def test_mixed_dtypes_and_frozen_parts():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, dtype=torch.bfloat16), "b": nn.Linear(4, 4).requires_grad_(False)})
    report = size_report(model)
    assert (report.bytes, report.trainable_parameters, report.compressed_ratio) == (40 + 80, 20, 1.0)


def test_printing(capsys):
    print_trainable_parameters(nn.Linear(1000, 1000))
    assert "parameters: 1,001,000 (4.00 MB)" in capsys.readouterr().out


def test_no_division_by_zero():
    assert size_report(nn.Module()).ratio == pytest.approx(0.0)
