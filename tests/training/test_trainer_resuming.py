"""Resuming in the Trainer and in Accelerate, across cuts and removed layers, goes on exactly."""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from hf_comera import ComeraCallback, ComeraTrainer, RankAdapter, TTMuon, add_rank_gates, comera_param_groups
from tests.training.trainer_runs import (
    ARCHITECTURE,
    adaptation,
    arguments,
    compressed,
    examples,
    same,
    trained,
    wanted,
)


@pytest.mark.parametrize("step", [2, 4, 5])
@pytest.mark.parametrize("restore", [False, True])
def test_resuming_across_cuts_is_exact(step, restore, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path / "whole", **settings)
    checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
    resumed = trained(
        tmp_path / "resumed", str(checkpoint), restore_callback_states_from_checkpoint=restore, **settings
    )
    assert same(whole.model, resumed.model)
    assert whole.model.rank_report() == resumed.model.rank_report()
    loaded = ARCHITECTURE.auto_class.from_pretrained(checkpoint)
    assert sum("rank_gate" in name for name, _ in loaded.named_parameters()) > 0


def groups(model):
    return comera_param_groups(model, 1e-3)


OPTIMIZERS = {
    "default": lambda model: {},
    "tt_muon, given": lambda model: {"optimizers": (TTMuon(model, 1e-3), None)},
    "adamw, given": lambda model: {"optimizers": (torch.optim.AdamW(groups(model)), None)},
    "adamw, by class": lambda model: {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"params": groups(model)})},
}


RUNS = [(ComeraTrainer, name) for name in OPTIMIZERS] + [(Trainer, name) for name in OPTIMIZERS if "given" in name]


@pytest.mark.parametrize(("trainer_class", "optimizer"), RUNS)
def test_resuming_behind_the_removal_of_layers_is_exact(trainer_class, optimizer, tmp_path):
    settings = adaptation(min_rank=0, target_parameters=wanted(0.1))

    def train(folder, resume=None):
        model = compressed()
        add_rank_gates(model)
        args = arguments(folder, save_strategy="steps", save_steps=1)
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=examples(),
            callbacks=[ComeraCallback(settings)],
            **OPTIMIZERS[optimizer](model),
        )
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = train(tmp_path / "whole")
    assert sum(getattr(module, "is_removed", False) for module in whole.modules()) > 1
    for step in (2, 3, 5):
        assert same(whole, train(tmp_path / "resumed", str(tmp_path / "whole" / f"checkpoint-{step}")))


ACCELERATED = {
    "tt_muon": lambda model: TTMuon(model, 1e-3),
    "fused adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, 1e-3), fused=True),
}


@pytest.mark.parametrize(("optimizer", "saved_after"), [("tt_muon", 3), ("fused adamw", 1), ("fused adamw", 4)])
def test_accelerate_resumes_exactly_across_a_cut(optimizer, saved_after, tmp_path):
    def start():
        accelerator = Accelerator(cpu=True)
        model = compressed()
        add_rank_gates(model)
        model, optimizer_ = accelerator.prepare(model, ACCELERATED[optimizer](model))
        adapter = RankAdapter(model, optimizer_, adaptation(min_rank=0), total_steps=6)
        accelerator.register_for_checkpointing(adapter)
        return accelerator, model.eval(), optimizer_, adapter

    def train(accelerator, model, optimizer, adapter, steps):
        for _ in range(steps):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            adapter.before_step(loss)
            optimizer.step()
            adapter.after_step()
            optimizer.zero_grad()

    torch.manual_seed(1)
    inputs = ARCHITECTURE.training_inputs()
    whole = start()
    train(*whole, saved_after)
    whole[0].save_state(str(tmp_path))
    ranks = whole[1].rank_report().after
    train(*whole, 6 - saved_after)
    assert ranks != whole[1].rank_report().after
    resumed = start()
    resumed[0].load_state(str(tmp_path))
    train(*resumed, 6 - saved_after)
    assert same(whole[1], resumed[1])
    assert whole[3].state_dict() == resumed[3].state_dict()


RESUMED_BY_THE_OTHER = [
    (ComeraTrainer, Trainer, "has the state of TTMuon, the optimizer of ComeraTrainer.* Resume with ComeraTrainer"),
    (Trainer, ComeraTrainer, "The state is not one of TTMuon"),
]


@pytest.mark.parametrize(("writer", "reader", "message"), RESUMED_BY_THE_OTHER)
def test_plain_trainer_and_ours_refuse_checkpoints_of_each_other(writer, reader, message, tmp_path):
    def make(trainer_class, folder):
        args = arguments(folder, save_strategy="steps", save_steps=1, max_steps=2)
        return trainer_class(model=compressed(), args=args, train_dataset=examples())

    make(writer, tmp_path / "first").train()
    with pytest.raises(ValueError, match=message):
        make(reader, tmp_path / "second").train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
