"""hf_comera/optim/tt_muon.py: which parameters it takes, and what it remembers: resuming, freezing, sharing."""

import copy

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, TTMuon, get_comera_model
from hf_comera.modules import TTLinear, TTMEmbedding
from tests.architectures import ARCHITECTURES


def layer():
    torch.manual_seed(0)
    return TTLinear(12, 20, in_factors=[4, 3], out_factors=[4, 5], ranks=3, dtype=torch.float64)


def trained(steps, resume=None, dtype=torch.float32):
    """A model after ``steps`` steps, and its optimizer's state in the middle."""
    architecture = ARCHITECTURES["gpt2"]
    torch.manual_seed(0)
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    model = model.to(dtype).eval()
    optimizer, start = TTMuon(model, lr=1e-3), 0
    if resume is not None:
        start = resume["step"]
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
    for step in range(start, steps):
        ids = torch.randint(2, 200, (2, 9), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"step": steps, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_bit_exact(dtype, tmp_path):
    torch.save(trained(3, dtype=dtype), tmp_path / "half.pt")
    resumed = trained(6, resume=torch.load(tmp_path / "half.pt", weights_only=True), dtype=dtype)
    for name, value in trained(6, dtype=dtype)["model"].items():
        assert torch.equal(value, resumed["model"][name])


def test_state_has_the_shape_of_the_parameter():
    module = layer()
    optimizer = TTMuon(module)
    module(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    for core in module.cores():
        assert optimizer.state[core]["momentum_buffer"].shape == core.shape
        assert all(value.numel() in (1, core.numel()) for value in optimizer.state[core].values())


def test_frozen_and_unused_parameters_stay():
    embedding = TTMEmbedding(20, 6, in_factors=[5, 4], out_factors=[2, 3])
    model = nn.ModuleList([layer(), layer(), nn.Linear(3, 3), embedding])
    model[1].requires_grad_(False)
    model[0].core_1.requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = TTMuon(model, lr=1e-2, weight_decay=0.0)
    model[0](torch.randn(3, 12, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    changed = {
        name
        for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(new, old)
    }
    assert changed == {"0.core_0", "0.core_2", "0.core_3", "0.bias"}


@pytest.mark.parametrize("trainable", [["core_0"], ["core_1"], ["core_0", "core_5"], ["core_3", "core_4"]], ids=str)
def test_a_core_moves_although_its_neighbours_are_frozen(trainable):
    torch.manual_seed(0)
    module = TTLinear(48, 60, in_factors=[4, 4, 3], out_factors=[3, 4, 5], ranks=6).requires_grad_(False)
    cores = {name: getattr(module, name).requires_grad_(True) for name in trainable}
    before = {name: core.detach().clone() for name, core in cores.items()}
    dense = module.dense().detach()
    module(torch.randn(8, 48)).square().sum().backward()
    TTMuon(module, lr=1e-3, weight_decay=0.0).step()
    assert not any(torch.equal(core, before[name]) for name, core in cores.items())
    for core in cores.values():
        core.grad = torch.zeros_like(core)
    moved = module.dense().detach()
    assert not torch.equal(moved, dense)
    TTMuon(module, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(module.dense(), moved * (1 - 0.1 * 0.1), rtol=1e-4, atol=1e-7)


def test_distributed_checkpoints_round_trip():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def stepped():
        torch.manual_seed(0)
        module = TTLinear(12, 20, ranks=4)
        optimizer = TTMuon(module)
        module(torch.ones(3, 12)).sum().backward()
        optimizer.step()
        return module, optimizer

    (module, optimizer), (other, fresh) = stepped(), stepped()
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(module, optimizer))
    for core, copied in zip(module.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[core].items():
            assert torch.equal(value, fresh.state[copied][key])


def test_loading_moves_step_counts_to_the_parameters():
    module = layer()
    optimizer = TTMuon(module)
    module(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    steps = [entry for entry in state["state"].values() if "step" in entry]
    for entry in steps:
        entry["step"] = entry["step"].to(torch.float64)
    assert steps
    optimizer.load_state_dict(state)
    assert {entry["step"].dtype for entry in optimizer.state.values() if "step" in entry} == {torch.float32}


def test_shared_cores_are_an_error():
    model = nn.ModuleList([TTLinear(12, 20), TTLinear(12, 20)])
    model[1].core_2 = model[0].core_2
    with pytest.raises(ValueError, match="'0' and '1' share a core"):
        TTMuon(model)


def test_a_group_added_later_has_all_settings():
    optimizer, late = TTMuon(layer(), lr=0.1), nn.Linear(3, 3)
    optimizer.add_param_group({"params": list(late.parameters())})
    before = late.weight.detach().clone()
    late(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(late.weight, before)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_group_added_later_with_a_bad_setting_is_refused(name, value):
    optimizer = TTMuon(layer(), lr=0.1)
    with pytest.raises(ValueError, match=f"{name}={value} must"):
        optimizer.add_param_group({"params": list(nn.Linear(3, 3).parameters()), name: value})
    assert all(group[name] != value for group in optimizer.param_groups)


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="Unfreeze"):
        TTMuon(layer().requires_grad_(False))


def test_the_state_of_another_optimizer_is_refused():
    model = layer()
    optimizer = TTMuon(model, lr=1e-3)
    other = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
    with pytest.raises(ValueError, match="The state is not one of TTMuon"):
        optimizer.load_state_dict(other.state_dict())
