"""hf_comera/training/trainer.py: TTMuon from the training arguments, unless another optimizer is asked for."""

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

from hf_comera import ComeraConfig, ComeraTrainer, TTMuon, get_comera_model
from hf_comera.training import ComeraTrainerMixin
from tests.architectures import ARCHITECTURES


def compressed(name="bert-mlm"):
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())


def examples(name="bert-mlm", count=16):
    torch.manual_seed(1)
    batches = [ARCHITECTURES[name].training_inputs() for _ in range(count // 2)]
    return [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(2)]


def arguments(folder, **settings):
    defaults = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    return TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **{**defaults, **settings}
    )


def test_the_optimizer_follows_the_arguments(tmp_path):
    settings = {"learning_rate": 3e-3, "weight_decay": 0.2, "adam_beta2": 0.98, "adam_epsilon": 1e-6}
    trainer = ComeraTrainer(model=compressed(), args=arguments(tmp_path, **settings), train_dataset=examples())
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, TTMuon)
    assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2, 0.0}
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    assert optimizer.defaults["eps"] == 1e-6
    assert trainer.create_optimizer() is optimizer


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_it_learns(settings, tmp_path):
    settings = {"learning_rate": 5e-3, "max_steps": 8, **settings}
    data = examples(count=4)
    trainer = ComeraTrainer(model=compressed(), args=arguments(tmp_path, **settings), train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_resuming_from_a_checkpoint_is_bit_exact(tmp_path):
    def train(folder, resume=None, **settings):
        trainer = ComeraTrainer(model=compressed(), args=arguments(folder, **settings), train_dataset=examples())
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = train(tmp_path / "whole", save_strategy="steps", save_steps=2)
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "adamw_torch"},
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
        {"optimizers": True},
    ],
    ids=str,
)
def test_another_optimizer_that_is_asked_for_is_used(settings, tmp_path):
    model = compressed()
    if "optimizers" in settings:
        settings = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    args = arguments(tmp_path, **{key: value for key, value in settings.items() if key == "optim"})
    rest = {key: value for key, value in settings.items() if key != "optim"}
    trainer = ComeraTrainer(model=model, args=args, train_dataset=examples(), **rest)
    assert not isinstance(trainer.create_optimizer(), TTMuon)


def test_the_mixin_goes_before_any_trainer(tmp_path):
    class Seq2Seq(ComeraTrainerMixin, Seq2SeqTrainer):
        pass

    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    assert isinstance(Seq2Seq(model=compressed(), args=args).create_optimizer(), TTMuon)


def test_the_plain_trainer_takes_the_optimizer_too(tmp_path):
    from transformers import Trainer

    model = compressed()
    trainer = Trainer(
        model=model, args=arguments(tmp_path), optimizer_cls_and_kwargs=(TTMuon, {"model": model, "lr": 1e-3})
    )
    assert isinstance(trainer.create_optimizer(), TTMuon)
