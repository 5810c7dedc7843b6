"""Trainer, Accelerate and gradient checkpointing train compressed models as they train any other."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_comera import ComeraConfig, TTMuon, comera_param_groups, get_comera_model, is_comera_model
from tests.architectures import ARCHITECTURES, every_architecture

# the older name is deprecated in Transformers 5.23, and the only one in 5.17
CHECKPOINTING = next(
    n for n in ("activation", "gradient") if f"{n}_checkpointing" in TrainingArguments.__dataclass_fields__
)


def compressed(architecture):
    torch.manual_seed(0)
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())


def examples(architecture, count=16):
    torch.manual_seed(1)
    batches = [architecture.training_inputs() for _ in range(count // 2)]
    return [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(2)]


def arguments(folder, **settings):
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy=settings.pop("save_strategy", "no"),
        logging_steps=1,
        **settings,
    )


@every_architecture
@pytest.mark.parametrize(
    "settings", [{}, {f"{CHECKPOINTING}_checkpointing": True}, {"bf16": True}], ids=["plain", "checkpointing", "bf16"]
)
def test_trainer_moves_every_parameter(architecture, settings, tmp_path):
    model = compressed(architecture)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model=model, args=arguments(tmp_path, **settings), train_dataset=examples(architecture))
    trainer.train()
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    # keys have no bias gradient in a softmax: RoBERTa and BERT move these by rounding or not at all
    assert not [name for name in still if "core_" in name]
    assert len(still) <= 0.1 * len(before)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(torch.tensor(losses).isfinite())


@pytest.mark.parametrize("name", ["bert-mlm", "gpt2"])
def test_trainer_checkpoints_are_compressed_and_resume_exactly(name, tmp_path):
    architecture = ARCHITECTURES[name]

    def train(folder, resume=None, **settings):
        trainer = Trainer(
            model=compressed(architecture), args=arguments(folder, **settings), train_dataset=examples(architecture)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = train(tmp_path / "whole", save_strategy="steps", save_steps=1)
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    loaded = architecture.auto_class.from_pretrained(tmp_path / "whole" / "checkpoint-3")
    assert is_comera_model(loaded)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), loaded.parameters(), strict=True))


def test_trainer_takes_our_parameter_groups(tmp_path):
    architecture = ARCHITECTURES["bert-mlm"]
    model = compressed(architecture)
    groups = comera_param_groups(model, lr=1e-3)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=examples(architecture),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": groups, "lr": 1e-3}),
    )
    trainer.train()
    assert {group["group_name"] for group in trainer.optimizer.param_groups} == {
        "cores",
        "weights",
        "biases and norms",
    }


def test_gradient_checkpointing_gives_the_same_gradients():
    architecture = ARCHITECTURES["llama-tied"]
    model, batch = compressed(architecture), architecture.training_inputs()
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    getattr(model, f"{CHECKPOINTING}_checkpointing_enable")()
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize(
    "new_optimizer",
    [lambda model: torch.optim.AdamW(comera_param_groups(model, lr=1e-2)), lambda model: TTMuon(model, lr=1e-2)],
    ids=["adamw", "tt_muon"],
)
def test_accelerate_prepares_trains_saves_and_resumes(new_optimizer, tmp_path):
    architecture = ARCHITECTURES["gpt2"]

    def start():
        accelerator = Accelerator(cpu=True)
        model = compressed(architecture).eval()
        return accelerator, *accelerator.prepare(
            model, new_optimizer(model), DataLoader(examples(architecture), batch_size=4)
        )

    def steps(accelerator, model, optimizer, loader):
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    accelerator, *parts = start()
    first = steps(accelerator, *parts)
    accelerator.save_state(tmp_path)
    expected = steps(accelerator, *parts)
    assert expected[-1] < first[0]
    accelerator, *parts = start()
    accelerator.load_state(tmp_path)
    assert steps(accelerator, *parts) == expected
