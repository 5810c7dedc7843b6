"""Trainings of tiny models, by graphs or by a plain loop, and the comparison of all their state."""

import copy

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_flatten_with_path

from hf_comera import (
    CoatAdamW,
    ComeraConfig,
    GraphedStep,
    RankAdaptation,
    RankAdapter,
    TTMuon,
    add_rank_gates,
    comera_param_groups,
    get_comera_model,
    size_report,
)
from hf_comera.ops.fused_loss import fixed_shapes
from tests.architectures import ARCHITECTURES

OPTIMIZERS = {
    "tt_muon": lambda model: TTMuon(model, 1e-3),
    "coat adamw": lambda model: CoatAdamW(comera_param_groups(model, 1e-3)),
    "fused adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, 1e-3), fused=True),
}
STEPS = 9


class Run:
    """A training of a tiny model, by graphs or by a plain loop."""

    def __init__(self, name="bert-mlm", optimizer="tt_muon", part=None, device="cpu", total_steps=STEPS, **settings):
        torch.manual_seed(0)
        architecture = ARCHITECTURES[name]
        self.model = get_comera_model(
            architecture.auto_class, ComeraConfig(rank=6), config=architecture.new_config()
        ).to(device)
        if part is not None:
            add_rank_gates(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model) if isinstance(optimizer, str) else optimizer(self.model)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.adapter = None if part is None else self._adapter(part, total_steps)
        self.step = GraphedStep(self.model, self.optimizer, self.adapter, max_grad_norm=1.0, **settings)
        self.model.train()
        torch.manual_seed(1)
        self.losses = []

    def _adapter(self, part, total_steps):
        report = size_report(self.model)
        size = int(report.parameters - (1 - part) * report.compressed_parameters)
        settings = RankAdaptation(target_parameters=size, early=0.3, late=0.5, cut_every=0.2, beta=0.1)
        return RankAdapter(self.model, self.optimizer, settings, total_steps=total_steps)

    def by_graph(self, batches):
        for batch in batches:
            self.losses.append(self.step(batch).item())
            self.scheduler.step()
        return self

    def plainly(self, batches):
        for batch in batches:
            with fixed_shapes():
                loss = self.model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if self.adapter is not None:
                self.adapter.before_step(loss)
            self.optimizer.step()
            if self.adapter is not None:
                self.adapter.after_step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def state(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        state |= {"scheduler": self.scheduler.state_dict(), "random": torch.get_rng_state()}
        return copy.deepcopy(state | ({"adapter": self.adapter.state_dict()} if self.adapter else {}))

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.adapter is not None:
            self.adapter.load_state_dict(state["adapter"])
        torch.set_rng_state(state["random"])
        self.losses = list(state["losses"])
        return self


def batches_of(name="bert-mlm", count=STEPS):
    torch.manual_seed(2)
    return [ARCHITECTURES[name].training_inputs() for _ in range(count)]


def assert_same(one, other):
    assert_equal_states(one.state(), other.state())


def assert_equal_states(one, other):
    (ones, structure), (others, other_structure) = tree_flatten_with_path(one), tree_flatten_with_path(other)
    assert structure == other_structure
    for (path, a), (_, b) in zip(ones, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b), (path, a, b)


class Without(Run):
    """The rest of a run, after its rank adaptation has ended."""

    def __init__(self, run):
        self.__dict__.update(run.__dict__)
        self.adapter = None
        self.step = GraphedStep(self.model, self.optimizer, max_grad_norm=1.0)
        torch.manual_seed(4)


def sentences(lengths, rows=2):
    torch.manual_seed(3)
    batches = []
    for length in lengths:
        ids = torch.randint(5, 241, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches
