"""training/cuda_graphs/capture.py: schedulers see floats, recorded steps read the same values from the device."""

import pytest
import torch

from hf_comera import CoatAdamW, TTMuon
from hf_comera.modules import TTLinear
from hf_comera.training.cuda_graphs.capture import DeviceRates, why_not_captured


def parameters():
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


def coat_adamw(model, lr, **settings):
    return CoatAdamW(model.parameters(), lr, **settings)


def test_rates_follow_the_groups_and_stay_where_they_are():
    first, second = parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    rates = DeviceRates(optimizer, torch.device("cpu"))
    with rates.in_place():
        tensors = [group["lr"] for group in optimizer.param_groups]
        assert all(group["capturable"] for group in optimizer.param_groups)
    for value in (0.1, 0.02):
        optimizer.param_groups[0]["lr"] = value
        rates.update()
        assert [tensor.item() for tensor in tensors] == [value, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert not any(group["capturable"] for group in optimizer.param_groups)


def test_floats_come_back_after_an_error():
    optimizer = torch.optim.AdamW(parameters(), lr=0.1, fused=True)
    with pytest.raises(RuntimeError, match="in the step"), DeviceRates(optimizer, torch.device("cpu")).in_place():
        raise RuntimeError("in the step")
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("new_optimizer", [TTMuon, coat_adamw], ids=["tt_muon", "coat_adamw"])
def test_the_same_steps_as_with_floats(new_optimizer):
    results = []
    for on_device in (False, True):
        torch.manual_seed(0)
        layer = TTLinear(12, 20, ranks=3)
        optimizer = new_optimizer(layer, 1e-2, weight_decay=0.1)
        rates = DeviceRates(optimizer, torch.device("cpu"))
        for step in range(3):
            layer(torch.ones(4, 12)).square().sum().backward()
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            if on_device:
                rates.update()
                with rates.in_place():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach() for parameter in layer.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "can"),
    [
        (lambda given: torch.optim.AdamW(given, capturable=True), True),
        (lambda given: torch.optim.AdamW(given, fused=True), True),
        (lambda given: torch.optim.SGD(given, 0.1, fused=True), True),
        (CoatAdamW, True),
        (lambda given: torch.optim.AdamW(given), False),
        (lambda given: torch.optim.SGD(given, 0.1), False),
        (lambda given: torch.optim.AdamW([{"params": given[:1], "fused": True}, {"params": given[1:]}]), False),
    ],
    ids=["capturable", "fused", "fused sgd", "coat adamw", "adamw", "sgd", "one group of two"],
)
def test_which_optimizers_can_be_recorded(make, can):
    reason = why_not_captured(make(parameters()))
    assert (reason is None) == can
    assert reason is None or "made with capturable=True or fused=True" in reason
