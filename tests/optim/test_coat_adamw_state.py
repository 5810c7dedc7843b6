"""hf_comera/optim/coat_adamw.py: what it keeps, how many bytes that is, and that it is saved and loaded to the bit."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.optim import coat_adamw
from hf_comera.optim.coat_adamw import CoatAdamW
from tests.optim.test_coat_adamw import network, train

BYTES = {
    "matrix": ((64, 768), 2.13),
    "matrix-of-uneven-rows": ((64, 1000), 2.13),
    "core": ((32, 8, 32), 2.13),
    "last-core": ((32, 12, 1), 2.13),
    "rows-a-little-longer-than-a-group": ((64, 136), 2.13),
    "many-short-rows": ((2**15, 12), 3.34),
    "vector": ((768,), 2.13),
    "uneven-vector": ((200,), 2.17),
    "few-entries": ((7,), 8.0),
}


@pytest.mark.parametrize(("shape", "most"), BYTES.values(), ids=BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_state(shape, most, dtype):
    parameter = nn.Parameter(torch.randn(shape, dtype=dtype))
    optimizer = CoatAdamW([parameter])
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert sum(value.nbytes for value in optimizer.state[parameter].values() if value.ndim) <= most * parameter.numel()


def test_bytes_of_a_whole_small_compressed_model():
    """Biases and norms, which are a tenth of it, and counters of steps included."""
    config = GPT2Config(vocab_size=256, n_positions=96, n_embd=128, n_layer=3, n_head=4)
    model = get_comera_model(GPT2LMHeadModel, ComeraConfig(rank=8), config=config)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert vectors > 0.09 * num_parameters
    optimizer = CoatAdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    num_bytes = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert num_bytes <= 2.2 * num_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_resuming_is_bit_exact(dtype, tmp_path):
    """Half precision too, although torch casts what it loads to the dtype of the parameter."""
    model = network(dtype)
    optimizer = CoatAdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 3)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "half.pt")
    train(model, optimizer, 3, start=3)
    resumed = network(dtype)
    again = CoatAdamW(resumed.parameters(), lr=1e-3)
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for loaded, kept in zip(again.state_dict()["state"].values(), saved[1]["state"].values(), strict=True):
        assert loaded.keys() == kept.keys()
        assert all(value.dtype == kept[key].dtype and torch.equal(value, kept[key]) for key, value in loaded.items())
    train(resumed, again, 3, start=3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def test_loading_copies():
    model = network()
    optimizer = CoatAdamW(model.parameters())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other = network()
    again = CoatAdamW(other.parameters())
    again.load_state_dict(saved)
    train(other, again, 1)
    for kept, expected in zip(saved["state"].values(), before["state"].values(), strict=True):
        assert all(torch.equal(kept[key], value) for key, value in expected.items())


def test_states_of_adamw_load():
    model = network()
    theirs = AdamW(model.parameters())
    train(model, theirs, 5)
    ours = CoatAdamW(model.parameters())
    ours.load_state_dict(theirs.state_dict())
    for parameter in model.parameters():
        plain = ours.plain_state(parameter)
        assert plain["step"] == 5
        for key in coat_adamw.MOMENTS:
            expected = theirs.state[parameter][key]
            assert (plain[key] - expected).norm() <= 0.05 * expected.norm()
    train(model, ours, 1)


def test_other_states_are_refused():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, sgd, 1)
    with pytest.raises(ValueError, match=r"lacks \['exp_avg', 'exp_avg_sq', 'step'\]; it has \['momentum_buffer'\]"):
        CoatAdamW(model.parameters()).load_state_dict(sgd.state_dict())
    for setting in ("maximize", "amsgrad"):
        theirs = AdamW(model.parameters(), **{setting: True})
        train(model, theirs, 1)
        with pytest.raises(ValueError, match=f"of an optimizer with {setting}=True, which CoatAdamW has not"):
            CoatAdamW(model.parameters()).load_state_dict(theirs.state_dict())


def test_distributed_checkpoints_round_trip():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, other = network(), network()
    optimizer, fresh = CoatAdamW(model.parameters()), CoatAdamW(other.parameters())
    train(model, optimizer, 2)
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, optimizer))
    for parameter, copied in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, fresh.state[copied][key])


def test_state_keeps_its_memory():
    """So that a captured step finds it."""
    model = network()
    optimizer = CoatAdamW(model.parameters())
    train(model, optimizer, 1)
    before = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    train(model, optimizer, 2)
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == before


def test_state_that_is_set_keeps_the_memory_of_what_was_there():
    model = network()
    optimizer = CoatAdamW(model.parameters())
    train(model, optimizer, 1)
    for parameter in model.parameters():
        before = {key: value.data_ptr() for key, value in optimizer.state[parameter].items()}
        plain = optimizer.plain_state(parameter)
        plain["exp_avg"] = plain["exp_avg"] * 2
        optimizer.set_plain_state(parameter, plain)
        torch.testing.assert_close(optimizer.plain_state(parameter)["exp_avg"], plain["exp_avg"], rtol=0.1, atol=0)
        assert {key: value.data_ptr() for key, value in optimizer.state[parameter].items()} == before
