"""hf_comera/optim/tt_muon.py: layers of any ranks are stepped together, each as it would be alone."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_comera import TTMuon
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.pruning import cut_ranks
from hf_comera.tt.cores import core_shapes

LR = 1e-2
VIEWS = {"view", "_unsafe_view", "detach", "transpose", "t", "expand", "unsqueeze", "slice", "select", "diagonal"}
VIEWS |= {"split", "split_with_sizes", "unbind", "alias", "as_strided", "permute", "squeeze"}


def linear(*ranks):
    """A layer of just these ranks, also where its factors could not fill them."""
    layer = TTLinear(24, 30, in_factors=[4, 3, 2], out_factors=[2, 5, 3], ranks=1, dtype=torch.float64)
    shapes = core_shapes((*layer.in_factors, *layer.out_factors), ranks)
    layer.load_cores([torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes])
    return layer


def embedding(*ranks):
    return TTMEmbedding(60, 12, in_factors=[5, 4, 3], out_factors=[2, 3, 2], ranks=list(ranks), dtype=torch.float64)


# Trains of equal factors: decisions that fall differently, padding on any bond.
CASES = {
    "equal": [(3, 4, 5, 4, 2)] * 3,
    "a little different": [(3, 4, 5, 4, 2), (2, 4, 4, 4, 3), (3, 3, 5, 3, 2)],
    "very different": [(3, 12, 30, 12, 2), (1, 2, 1, 2, 1), (3, 9, 18, 9, 3)],
    "rank one": [(1, 1, 1, 1, 1), (4, 12, 24, 12, 3), (1, 1, 1, 1, 1)],
    "full rank, both sides of the middle larger": [(4, 12, 24, 15, 3), (4, 12, 24, 6, 3), (2, 3, 24, 15, 3)],
    "outer cores that only mix ranks, or not": [(4, 12, 5, 6, 3), (3, 4, 5, 15, 3), (4, 4, 4, 4, 2)],
    "ranks too large for their factors": [(9, 4, 30, 4, 9), (2, 9, 2, 9, 2)],
}


def stepped(layers, gradients, together, kept=None, steps=4):
    """The layers after some steps with one optimizer, or with one each; ranks may be cut half way."""
    layers = copy.deepcopy(layers)
    optimizers = [TTMuon(layers, LR)] if together else [TTMuon(layer, LR) for layer in layers]
    for step in range(steps):
        for layer, of_layer in zip(layers, gradients, strict=True):
            for core, gradient in zip(layer.cores(), of_layer, strict=True):
                if core.numel() and gradient is not None:
                    changed = gradient * (1 + step) + step * gradient.roll(1, -1)
                    core.grad = changed[: core.shape[0], ..., : core.shape[-1]]
        if step == steps // 2 and kept is not None:
            for index, ranks in kept.items():
                indices = [torch.arange(rank) for rank in ranks]
                cut_ranks({"": layers[index]}, {"": indices}, optimizers[0 if together else index])
        for optimizer in optimizers:
            optimizer.step()
    return layers, optimizers


def assert_together_is_alone(layers, gradients, num_families=1, kept=None):
    together, (optimizer,) = stepped(layers, gradients, True, kept)
    alone, _ = stepped(layers, gradients, False, kept)
    assert sum(map(len, optimizer._shape_groups.values())) == num_families
    for (name, ours), theirs in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    return together


def drawn(layers):
    return [[torch.randn_like(core) for core in layer.cores()] for layer in layers]


@pytest.mark.parametrize("ranks", CASES.values(), ids=CASES)
def test_trains_of_any_ranks_are_stepped_as_they_would_be_alone(ranks):
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(*of_layer) for of_layer in ranks])
    assert_together_is_alone(layers, drawn(layers))


def test_small_trains_are_stepped_apart_where_padding_would_cost_more(monkeypatch):
    ranks = [(1, 1, 1, 1, 1), (4, 9, 9, 9, 3), (2, 1, 1, 1, 2), (4, 8, 9, 8, 3), (1, 2, 1, 2, 1), (3, 9, 8, 9, 2)]
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(*of_layer) for of_layer in ranks])
    assert_together_is_alone(layers, drawn(layers), num_families=1)
    monkeypatch.setattr("hf_comera.optim.tt_muon.WORTH_A_FAMILY", 1000)
    assert_together_is_alone(layers, drawn(layers), num_families=2)


def test_embeddings_with_cores_of_four_axes():
    torch.manual_seed(0)
    layers = nn.ModuleList([embedding(7, 5), embedding(10, 6), embedding(1, 2)])
    assert_together_is_alone(layers, drawn(layers))


def test_a_train_whose_gradient_is_zero_stays():
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(4, 9, 5, 6, 3), linear(2, 4, 4, 4, 3), linear(3, 3, 5, 3, 2)])
    gradients = drawn(layers)
    gradients[1] = [torch.zeros_like(gradient) for gradient in gradients[1]]
    assert_together_is_alone(layers, gradients)
    (_, still, _), _ = stepped(layers, gradients, True, steps=1)
    for before, after in zip(layers[1].cores(), still.cores(), strict=True):
        torch.testing.assert_close(after, before, rtol=0.01, atol=0)  # decay only


@pytest.mark.parametrize("places", [(0,), (2,), (3,), (0, 1), (2, 3), (0, 2, 5), (1, 2, 3, 4)], ids=str)
def test_only_some_cores_have_gradients(places):
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(4, 12, 5, 6, 3), linear(2, 4, 4, 12, 3), linear(3, 3, 5, 3, 2)])
    gradients = [
        [gradient if place in places else None for place, gradient in enumerate(of_layer)]
        for of_layer in drawn(layers)
    ]
    assert_together_is_alone(layers, gradients)


def test_a_core_that_is_zero_and_a_gradient_that_is_not_a_number_do_not_reach_other_trains():
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(4, 9, 5, 6, 3), linear(2, 4, 4, 4, 3), linear(4, 3, 5, 3, 2)])
    gradients = drawn(layers)
    clean, _ = stepped(layers, gradients, True)
    gradients[1][2].fill_(float("nan"))
    layers[1].core_4.data.zero_()
    dirty, _ = stepped(layers, gradients, True)
    for index in (0, 2):
        for ours, theirs in zip(dirty[index].parameters(), clean[index].parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gates", [False, True])
def test_ranks_are_cut_and_layers_removed_on_the_way(gates):
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(4, 8, 6, 6, 3) for _ in range(4)])
    gradients = drawn(layers)
    if gates:
        for layer in layers:
            layer.add_rank_gates()
    kept = {1: [2, 5, 6, 3, 1], 2: [0, 0, 0, 0, 0], 3: [4, 8, 1, 1, 3]}
    assert assert_together_is_alone(layers, gradients, kept=kept)[2].is_removed


class Operations(TorchDispatchMode):
    """Names of all operations but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def operations(*ranks):
    """Those of the second step, once indices are made."""
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(*of_layer) for of_layer in ranks])
    optimizer = TTMuon(layers, LR)
    for core in (core for layer in layers for core in layer.cores()):
        core.grad = torch.randn_like(core)
    optimizer.step()
    with Operations() as counted:
        optimizer.step()
    return counted.names


def test_a_step_takes_hardly_more_operations_for_twelve_layers_of_other_ranks_than_for_three():
    ranks = CASES["a little different"]
    others = [tuple(rank + index // 3 for rank in of_layer) for index, of_layer in enumerate(3 * ranks)]
    three, twelve = operations(*ranks), operations(*ranks, *others)
    assert len(twelve) < 1.1 * len(three)
    assert len(twelve) < 2 * len(operations(ranks[0]))


def test_nothing_is_read_from_the_device():
    reads = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
    assert not reads & set(operations(*CASES["very different"]))


def test_copied_optimizers_step_on():
    torch.manual_seed(0)
    layers = nn.ModuleList([linear(3, 4, 5, 4, 2), linear(2, 4, 4, 4, 3)])
    optimizer = TTMuon(layers, LR)
    for core in (core for layer in layers for core in layer.cores()):
        core.grad = torch.randn_like(core)
    optimizer.step()
    both = copy.deepcopy({"layers": layers, "optimizer": optimizer})
    for ours, theirs in zip(layers.parameters(), both["layers"].parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    optimizer.step()
    both["optimizer"].step()
    for ours, theirs in zip(layers.parameters(), both["layers"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
