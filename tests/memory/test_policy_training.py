"""hf_comera/memory: optimizers, accumulation, LoRA and the trainers of others give what they give without it."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_comera.memory import activation_policy, set_activation_policy
from tests.architectures import ARCHITECTURES
from tests.memory.policy_runs import EXACT, assert_same, model_of, run

BERT = ARCHITECTURES["bert-mlm"]


def losses_and_weights(model, policy, train):
    model = copy.deepcopy(model)
    set_activation_policy(model, policy)
    torch.manual_seed(2)
    losses = train(model)
    return losses, [parameter.detach() for parameter in model.parameters()]


def plain_steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**BERT.training_inputs()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulated(model):
    """Two forwards before one backward; then one with a backward of its own; then the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        both = [model(**BERT.training_inputs()).loss for _ in range(2)]
        (both[0] + 2 * both[1]).backward()
        third = model(**BERT.training_inputs()).loss
        third.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in (*both, third)]
    return losses


def several_backwards(model):
    """Forwards first, backwards in another order, and one of them in two parts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        outputs = [model(**BERT.training_inputs()) for _ in range(3)]
        outputs[2].loss.backward()
        outputs[0].logits[:, 0].sum().backward(retain_graph=True)
        outputs[1].loss.backward()
        outputs[0].logits[:, 1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [output.loss.item() for output in outputs]
    return losses


def autocast_in_parts(model):
    """Autocast around the model, and backward outside; on, off and on."""
    losses = []
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**BERT.training_inputs()).loss
        loss.backward()
        losses.append(loss.item())
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    return losses


LOOPS = {loop.__name__: loop for loop in (plain_steps, accumulated, several_backwards, autocast_in_parts)}


@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_loops(loop, is_compressed, policy):
    model = model_of(BERT, is_compressed, 0.1)
    expected, found = (losses_and_weights(model, each, loop) for each in (None, policy))
    assert found[0] == expected[0]
    assert all(torch.equal(left, right) for left, right in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("of_base", [False, True], ids=["on-the-peft-model", "on-its-base"])
def test_lora(policy, of_base):
    model = model_of(BERT, False, 0.1)
    settings = LoraConfig(r=4, lora_dropout=0.1, target_modules=["query", "value", "dense"])
    adapted = get_peft_model(model, settings).train()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = BERT.training_inputs()
    plain = run(adapted, inputs, None)
    if of_base:
        found = run(adapted, inputs, policy, set_policy=lambda _, policy: set_activation_policy(model, policy))
    else:
        found = run(adapted, inputs, policy)
    assert_same(found, plain)
    assert found.saved_bytes < 0.8 * plain.saved_bytes


def test_trainer(tmp_path):
    def train(model):
        rows = [{name: value[0] for name, value in BERT.training_inputs().items()} for _ in range(8)]
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = model_of(BERT, True, 0.1)
    expected, found = (losses_and_weights(model, each, train) for each in (None, "rank"))
    assert len(found[0]) == 3
    assert found[0] == expected[0]
    assert all(torch.equal(left, right) for left, right in zip(found[1], expected[1], strict=True))


def test_accelerate():
    def train(model):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert activation_policy(accelerator.unwrap_model(prepared)) == activation_policy(model)
        losses = []
        for _ in range(4):
            with accelerator.accumulate(prepared):
                loss = prepared(**BERT.training_inputs()).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = model_of(BERT, True, 0.1)
    expected, found = (losses_and_weights(model, each, train) for each in (None, "rank"))
    assert found[0] == expected[0]
    assert all(torch.equal(left, right) for left, right in zip(found[1], expected[1], strict=True))
