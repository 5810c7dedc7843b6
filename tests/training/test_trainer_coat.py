"""CoatAdamW in the Trainer: it learns, ranks are cut under it, and resuming across the cuts is exact."""

import pytest
from transformers import Trainer

from hf_comera import CoatAdamW, comera_param_groups, size_report
from tests.training.trainer_runs import arguments, compressed, examples, same, trained, wanted


def test_resuming_across_cuts_is_exact(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.0}  # gates are never decayed
    settings["optimizer_cls_and_kwargs"] = (CoatAdamW, {"lr": 1e-3})
    whole = trained(tmp_path / "whole", **settings)
    assert isinstance(whole.optimizer.optimizer, CoatAdamW)
    assert size_report(whole.model).parameters <= wanted()
    for step in (2, 4):
        resumed = trained(tmp_path / f"resumed-{step}", str(tmp_path / "whole" / f"checkpoint-{step}"), **settings)
        assert same(whole.model, resumed.model)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_the_trainer_takes_it_with_groups_of_ours(settings, tmp_path):
    model = compressed()
    groups = comera_param_groups(model, lr=5e-3)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, **{"max_steps": 12, **settings}),
        train_dataset=examples(4),
        optimizer_cls_and_kwargs=(CoatAdamW, {"params": groups, "lr": 5e-3}),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert {group["group_name"] for group in trainer.optimizer.param_groups} >= {"cores", "weights"}
