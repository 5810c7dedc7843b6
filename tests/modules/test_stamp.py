"""hf_comera/modules/stamp.py: things made from cores are kept while the cores are what they were, and no longer."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_comera.modules import TTMEmbedding, ttm_embedding
from hf_comera.modules.stamp import Kept, Stamp, can_keep


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_stamp_fits_until_something_changes(dtype):
    tensors = [nn.Parameter(torch.randn(3, 4).to(dtype)), nn.Parameter(torch.randn(1).to(dtype))]
    stamp = Stamp.of(tensors)
    assert stamp.fits(tensors)
    assert not stamp.fits(tensors[:1])
    assert not stamp.fits([tensors[0], nn.Parameter(tensors[1].detach().clone())])
    tensors[1].data.add_(1)
    assert not stamp.fits(tensors)


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)], ids=["contiguous", "permuted"])
def test_a_change_of_any_single_entry_ends_it(axes):
    tensors = [nn.Parameter(torch.randn(2, 3, 5).permute(axes)), nn.Parameter(torch.randn(3))]
    for tensor in tensors:
        for place in range(tensor.numel()):
            stamp = Stamp.of(tensors)
            tensor.data[torch.unravel_index(torch.tensor(place), tensor.shape)].neg_()
            assert not stamp.fits(tensors)
            assert Stamp.of(tensors).fits(tensors)


def test_a_tensor_without_entries_has_no_bytes():
    tensors = [nn.Parameter(torch.empty(1, 3, 0))]
    assert Stamp.of(tensors).fits(tensors)


def test_not_a_number_is_no_change():
    tensors = [nn.Parameter(torch.full((3,), torch.nan))]
    assert Stamp.of(tensors).fits(tensors)


def test_a_step_of_any_optimizer_ends_it():
    tensors = [nn.Parameter(torch.randn(3))]
    stamp = Stamp.of(tensors)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1).step()
    assert not stamp.fits(tensors)


def test_what_cannot_be_kept():
    plain = nn.Parameter(torch.randn(3))
    assert can_keep([plain])
    assert not can_keep([plain, plain * 1])
    assert not can_keep([nn.Parameter(torch.empty(0))])
    assert not can_keep([nn.Parameter(torch.empty(3, device="meta"))])
    assert not can_keep([nn.Buffer(torch.zeros(2))]) or type(nn.Buffer(torch.zeros(2))) is torch.Tensor


def test_copies_of_a_kept_thing_start_with_nothing():
    tensors, made = [nn.Parameter(torch.randn(3))], []
    kept = Kept()
    for _ in range(2):
        kept.get(tensors, lambda: made.append(1))
    assert made == [1]
    for again in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        again.get(tensors, lambda: made.append(2))
    assert made == [1, 2, 2]
    kept.drop()
    kept.get(tensors, lambda: made.append(3))
    assert made[-1] == 3


EDITS = {
    "in place": lambda table: table.core_1.detach().mul_(2),
    "through .data": lambda table: table.core_1.data.mul_(2),
    "one entry through .data": lambda table: table.core_1.data[-1, 1].mul_(2),
    "load_state_dict": lambda table: table.load_state_dict({k: 2 * v for k, v in table.state_dict().items()}),
    "load_cores": lambda table: table.load_cores([core.detach() + 0.1 for core in table.cores()]),
    "rank gates": lambda table: (table.add_rank_gates(), table.rank_gate_0.data.mul_(2)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_half_tables_are_kept_in_inference_and_never_stale(edit, monkeypatch):
    built = []
    half_tables = ttm_embedding.half_tables
    monkeypatch.setattr(ttm_embedding, "half_tables", lambda cores: built.append(1) or half_tables(cores))
    table = TTMEmbedding(30, 12, ranks=4, dtype=torch.float64).eval()
    ids, x = torch.randint(30, (2, 5)), torch.randn(2, 12, dtype=torch.float64)

    def check():
        for _ in range(2):
            rows, logits = table(ids), table(x, project=True)
        dense = table.dense()
        torch.testing.assert_close(rows, functional.embedding(ids, dense))
        torch.testing.assert_close(logits, functional.linear(x, dense))

    with torch.no_grad():
        check()
        assert len(built) == 1 + 1, "one for four uses, one for the reference"
        edit(table)
        check()
    assert len(built) == 2 * (1 + 1)
    rows = table(ids)
    rows.sum().backward()
    assert table.core_0.grad is not None


def test_inference_checks_ids_and_autocasts_as_training_does():
    table = TTMEmbedding(30, 12, ranks=4)
    x = torch.randn(2, 12)
    with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
        table(torch.tensor([30]))
    with torch.autocast("cpu", torch.bfloat16):
        trained = table(x, project=True)
        with torch.no_grad():
            kept = table(x, project=True)
    assert kept.dtype == trained.dtype == torch.bfloat16
    assert torch.equal(kept, trained)
