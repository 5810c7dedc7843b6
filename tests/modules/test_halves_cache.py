"""hf_comera/modules/halves_cache.py: halves of all layers are built together, used while valid, and never stale."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear, TTMEmbedding, ttm_embedding
from hf_comera.modules.halves_cache import Cached, can_cache, core_copies
from hf_comera.ops.halves import Side
from tests.architectures import ARCHITECTURES
from tests.modules.cached_layers import layers, reference


class RawSGD(torch.optim.Optimizer):
    """Writes to memory behind torch's back, as optimizers with kernels of their own do."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.detach().numpy()[...] -= 0.1 * parameter.grad.numpy()


def set_data(layer, use):
    layer.core_1.data = 2 * layer.core_1.data


def slice_data(layer, use):
    """Fewer ranks at one bond, in the same memory."""
    layer.core_2.data = layer.core_2.data[..., :2]
    layer.core_3.data = layer.core_3.data[:2]


def transposed(layer, use):
    """A core that is not contiguous, then an edit that torch does not count."""
    layer.core_1 = nn.Parameter(layer.core_1.detach().transpose(0, 2).contiguous().transpose(0, 2))
    use()
    layer.core_1.data.mul_(1.5)


def add_gates(layer, use):
    layer.add_rank_gates()
    use()
    layer.rank_gate_0.data.mul_(2)


EDITS = {
    "sliced data": slice_data,
    "not contiguous": transposed,
    "in place": lambda layer, use: layer.core_1.detach().mul_(2),
    "copy_": lambda layer, use: layer.core_1.detach().copy_(2 * layer.core_1.detach()),
    "through .data": lambda layer, use: layer.core_1.data.mul_(2),
    "one entry through .data": lambda layer, use: layer.core_1.data[-1, 1].mul_(2),
    "last entry through .data": lambda layer, use: layer.core_1.data.view(-1)[-1:].add_(1),
    "other data": set_data,
    "load_state_dict": lambda layer, use: layer.load_state_dict({k: 1.5 * v for k, v in layer.state_dict().items()}),
    "load_cores": lambda layer, use: layer.load_cores([core.detach() + 0.1 for core in layer.cores()]),
    "other ranks": lambda layer, use: layer.load_cores([core.detach()[:1, ..., :1] for core in layer.cores()]),
    "load_dense": lambda layer, use: layer.load_dense(torch.randn(layer.weight_shape(), dtype=torch.float64)),
    "reset": lambda layer, use: layer.reset_parameters(),
    "rank gates": lambda layer, use: (layer.add_rank_gates(), layer.rank_gate_0.data.mul_(2)),
    "an edit of rank gates": add_gates,
    "a new parameter": lambda layer, use: setattr(layer, "core_0", nn.Parameter(layer.core_0.detach() + 1)),
}
"""What may happen to a TT layer between two uses; ``use`` runs it in between."""


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("place", [0, 2])
def test_no_edit_leaves_stale_halves(edit, grad, place):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            stack(x)
        edit(stack[place], lambda: stack(x))
        torch.testing.assert_close(stack(x), reference(stack, x))


@pytest.fixture
def tables(monkeypatch):
    """One entry for each pair of half tables that is made."""
    made = []
    half_tables = ttm_embedding.half_tables
    monkeypatch.setattr(ttm_embedding, "half_tables", lambda cores: made.append(1) or half_tables(cores))
    return made


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_no_edit_leaves_stale_half_tables(edit, tables):
    table = TTMEmbedding(30, 12, ranks=4, dtype=torch.float64).eval()
    ids, x = torch.randint(30, (2, 5)), torch.randn(2, 12, dtype=torch.float64)

    def check():
        tables.clear()
        for _ in range(2):
            rows, logits = table(ids), table(x, project=True)
        assert len(tables) == 1, "for four uses"
        dense = table.dense()
        torch.testing.assert_close(rows, functional.embedding(ids, dense))
        torch.testing.assert_close(logits, functional.linear(x, dense))

    with torch.no_grad():
        check()
        edit(table, lambda: table(ids))
        check()
    table(ids).sum().backward()
    assert table.core_0.grad is not None


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5"])
def test_two_generations_build_once(name, builds, tables):
    architecture = ARCHITECTURES[name]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    for _ in range(2):
        ids = architecture.inputs()["input_ids"]
        model.generate(input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    kinds = [type(module) for module in model.modules()]
    assert sum(builds) == 2 * kinds.count(TTLinear), "a left and a right half of each layer"
    assert len(tables) == kinds.count(TTMEmbedding) == 1


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "raw": RawSGD,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_training_equals_training_without_a_cache(make, set_to_none):
    ours = layers()
    plain = copy.deepcopy(ours)
    x = torch.randn(4, 12, dtype=torch.float64)
    results = []
    for stack, forward in ((ours, lambda: ours(x)), (plain, lambda: reference(plain, x))):
        optimizer = make(stack.parameters())
        for _ in range(3):
            for _ in range(2):  # accumulates
                forward().square().mean().backward()
            with torch.no_grad():
                forward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        results.append([parameter.detach().clone() for parameter in stack.parameters()])
    torch.testing.assert_close(*results)


def test_builds_over_the_life_of_a_training(builds):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    optimizer = torch.optim.SGD(stack.parameters(), 0.1)

    def built(run):
        builds.clear()
        run()
        return list(builds)

    def micro_step():
        stack(x).sum().backward()

    def evaluate():
        with torch.no_grad():
            stack(x)

    assert built(micro_step) == [3, 3], "left and right halves of three layers"
    assert built(evaluate) == [], "halves with a gradient serve without one"
    assert built(micro_step) == [3, 3], "a backward pass ends halves with a gradient"
    assert built(lambda: (stack(x) + stack(2 * x)).sum().backward()) == [3, 3], "before it they are shared"
    optimizer.step()
    assert built(evaluate) == [3, 3]
    stack.eval()
    assert built(evaluate) == [3, 3]
    assert built(evaluate) == []
    stack[1].core_0.detach().mul_(2)
    assert built(evaluate) == [1, 1], "only what changed"


@pytest.mark.parametrize("ranks", [(5, 5, 5), (1, 4, 12)], ids=["equal", "ragged"])
def test_gradients_accumulate(ranks):
    stack = layers(ranks)
    batches = torch.randn(3, 4, 12, dtype=torch.float64)
    for batch in batches:
        stack(batch).square().mean().backward()
    ours = [parameter.grad for parameter in stack.parameters()]
    total = sum(reference(stack, batch).square().mean() for batch in batches)
    torch.testing.assert_close(ours, list(torch.autograd.grad(total, list(stack.parameters()))))


def test_forward_passes_that_share_halves_may_have_a_backward_pass_each(builds):
    stack, batches = layers(), torch.randn(3, 4, 12, dtype=torch.float64)
    losses = [stack(batch).square().mean() for batch in batches]
    assert builds == [3, 3]
    for loss in losses:
        loss.backward()
    ours = [parameter.grad for parameter in stack.parameters()]
    total = sum(reference(stack, batch).square().mean() for batch in batches)
    torch.testing.assert_close(ours, list(torch.autograd.grad(total, list(stack.parameters()))))


def test_a_layer_that_is_not_called_gets_no_gradient():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack[1](x).sum().backward()
    assert stack[1].core_0.grad is not None
    assert stack[0].core_0.grad is None
    assert stack[2].core_3.grad is None


def test_frozen_layers_train_no_core_and_are_built_once(builds):
    stack, x = layers().requires_grad_(False), torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    stack[2].requires_grad_(True)
    for _ in range(3):
        stack(x).sum().backward()
        stack.zero_grad()
    assert all(parameter.grad is None for parameter in stack[:2].parameters())
    torch.testing.assert_close(x.grad, 3 * torch.autograd.grad(reference(stack, x).sum(), x)[0])
    assert builds == [2, 1, 2, 1] + [1, 1] * 2


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda stack: pickle.loads(pickle.dumps(stack))], ids=["copy", "pickle"]
)
def test_copies_have_caches_of_their_own(again):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    before = stack(x)
    copied = again(stack)
    assert copied[0].halves_cache is not stack[0].halves_cache
    assert copied[0].halves_cache is copied[2].halves_cache
    copied[0].core_0.detach().mul_(3)
    torch.testing.assert_close(copied(x), reference(copied, x))
    assert torch.equal(stack(x), before)


def test_each_layer_keeps_its_own_dtype_under_mixed_autocast(builds):
    stack, x = layers(dtype=torch.float32), torch.randn(4, 12)

    def mixed():
        with torch.autocast("cpu", torch.bfloat16):
            y = stack[1](stack[0](x))
        return stack[2](y.float())

    mixed().sum().backward()
    stack.zero_grad()
    builds.clear()
    mixed().sum().backward()
    assert sorted(builds) == [1, 1, 2, 2]
    assert {parameter.grad.dtype for parameter in stack.parameters()} == {torch.float32}


def test_cores_that_are_thawed_get_gradients_and_frozen_ones_none():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack[0].core_1.requires_grad_(False)
    stack(x)
    stack.requires_grad_(True)
    stack(x).sum().backward()
    assert stack[0].core_1.grad is not None
    stack.requires_grad_(False)
    assert not stack(x).requires_grad


def test_training_by_hand_through_data():
    stacks = [layers() for _ in range(2)]
    stacks[1].load_state_dict(stacks[0].state_dict())
    x = torch.randn(4, 12, dtype=torch.float64)
    for stack, forward in zip(stacks, (lambda: stacks[0](x), lambda: reference(stacks[1], x)), strict=True):
        for _ in range(3):
            forward().square().mean().backward()
            for parameter in stack.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad.zero_()
    torch.testing.assert_close(list(stacks[0].parameters()), list(stacks[1].parameters()))


@pytest.mark.parametrize("ranks", [(5, 5, 5), (5, 2, 9)], ids=["equal", "ragged"])
def test_how_much_copies_of_cores_take_is_known_beforehand(ranks, monkeypatch):
    stack, copies, stacked = layers(ranks), [], Side.stacked
    monkeypatch.setattr(Side, "stacked", lambda side: copies.append(stacked(side)[0]) or stacked(side))
    stack(torch.randn(2, 12, dtype=torch.float64))
    assert core_copies(stack) == sum(core.nbytes for cores in copies for core in cores) > 0


def is_valid(cached, tensors):
    """Whether what was made from ``tensors`` is used again; if not, it is made."""
    made = []
    cached.get(tensors, lambda: made.append(1))
    return not made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cached_thing_is_valid_until_something_changes(dtype):
    tensors, cached = [nn.Parameter(torch.randn(3, 4).to(dtype)), nn.Parameter(torch.randn(1).to(dtype))], Cached()
    assert not is_valid(cached, tensors)
    assert is_valid(cached, tensors)
    assert not is_valid(cached, tensors[:1])
    assert not is_valid(cached, [tensors[0], nn.Parameter(tensors[1].detach().clone())])
    assert not is_valid(cached, tensors)
    tensors[1].data.add_(1)
    assert not is_valid(cached, tensors)
    cached.drop()
    assert not is_valid(cached, tensors)


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)], ids=["contiguous", "permuted"])
def test_a_change_of_any_single_entry_ends_it(axes):
    tensors, cached = [nn.Parameter(torch.randn(2, 3, 5).permute(axes)), nn.Parameter(torch.randn(3))], Cached()
    is_valid(cached, tensors)
    for tensor in tensors:
        for place in range(tensor.numel()):
            tensor.data[torch.unravel_index(torch.tensor(place), tensor.shape)].neg_()
            assert not is_valid(cached, tensors)
            assert is_valid(cached, tensors)


def test_not_a_number_is_no_change():
    tensors, cached = [nn.Parameter(torch.full((3,), torch.nan))], Cached()
    is_valid(cached, tensors)
    assert is_valid(cached, tensors)


def test_a_step_of_any_optimizer_ends_it():
    tensors, cached = [nn.Parameter(torch.randn(3))], Cached()
    is_valid(cached, tensors)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1).step()
    assert not is_valid(cached, tensors)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda cached: pickle.loads(pickle.dumps(cached))], ids=["copy", "pickle"]
)
def test_copies_of_a_cached_thing_start_with_nothing(again):
    tensors, cached = [nn.Parameter(torch.randn(3))], Cached()
    is_valid(cached, tensors)
    assert not is_valid(again(cached), tensors)
    assert is_valid(cached, tensors)


def test_what_cannot_be_cached():
    plain = nn.Parameter(torch.randn(3))
    assert can_cache([plain])
    assert not can_cache([plain, plain * 1])
    assert not can_cache([nn.Parameter(torch.empty(0))])
    assert not can_cache([nn.Parameter(torch.empty(3, device="meta"))])
    assert not can_cache([torch.zeros(2)])
