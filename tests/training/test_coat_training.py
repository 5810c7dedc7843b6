"""CoatAdamW in the Trainer: it learns, ranks are cut under it, and resuming across the cuts is exact."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_comera import (
    CoatAdamW,
    ComeraConfig,
    ComeraTrainer,
    RankAdaptation,
    comera_param_groups,
    get_comera_model,
    size_report,
)
from tests.architectures import ARCHITECTURES

ARCHITECTURE = ARCHITECTURES["bert-mlm"]


def compressed():
    torch.manual_seed(0)
    return get_comera_model(ARCHITECTURE.auto_class, ComeraConfig(rank=6), config=ARCHITECTURE.new_config())


def examples(count=24):
    torch.manual_seed(1)
    batches = [ARCHITECTURE.training_inputs() for _ in range(count // 2)]
    return [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(2)]


def arguments(folder, **settings):
    defaults = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 2}
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder), **{**defaults, **fixed, **settings})


def wanted():
    report = size_report(compressed())
    return int(report.parameters - 0.6 * report.compressed_parameters)


def trained(folder, resume=None):
    trainer = ComeraTrainer(
        model=compressed(),
        args=arguments(folder, save_strategy="steps", save_steps=1),
        train_dataset=examples(),
        rank_adaptation=RankAdaptation(target_parameters=wanted(), early=1, late=4, cut_every=1),
        optimizer_cls_and_kwargs=(CoatAdamW, {"lr": 1e-3}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(one, other):
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())


def test_resuming_across_cuts_is_exact(tmp_path):
    whole = trained(tmp_path / "whole")
    assert isinstance(whole.optimizer.optimizer, CoatAdamW)
    assert size_report(whole.model).parameters <= wanted()
    for step in (2, 4):
        resumed = trained(tmp_path / f"resumed-{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
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
