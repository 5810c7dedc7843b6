"""Rank adaptation in the Trainer of Transformers: the size, logs, clear errors."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_comera import (
    ComeraCallback,
    ComeraTrainer,
    TTMuon,
    add_rank_gates,
    size_report,
)
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


def plain_trainer(folder, callbacks=None, model=None, **settings):
    """The Trainer of Transformers with our callback."""
    model = compressed() if model is None else model
    callbacks = [ComeraCallback(adaptation())] if callbacks is None else callbacks
    add_rank_gates(model)
    return Trainer(
        model=model, args=arguments(folder, **settings), train_dataset=examples(), callbacks=callbacks,
        optimizer_cls_and_kwargs=(TTMuon, {"model": model, "lr": 1e-3}),
    )  # fmt: skip


def plainly_trained(folder, *arguments, **settings):
    trainer = plain_trainer(folder, *arguments, **settings)
    trainer.train()
    return trainer


def test_the_trainer_meets_the_size_and_logs_what_happens(tmp_path):
    trainer = trained(tmp_path)
    assert size_report(trainer.model).parameters <= wanted()
    assert not any("rank_gate" in key for key in trainer.model.state_dict())
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["rank_stage"] for log in logs] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert logs[0]["parameters"] > logs[-1]["parameters"]
    assert all({"live_ranks", "relaxed_size", "smoothed_loss"} <= log.keys() for log in logs)


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}])
def test_a_plain_trainer_with_the_callback_does_the_same(settings, tmp_path):
    ours = trained(tmp_path / "ours", **settings)
    assert same(ours.model, plainly_trained(tmp_path / "plain", **settings).model)


def test_with_a_plain_trainer_logs_have_the_ranks_and_trackers_behind_it_too(tmp_path):
    seen = {"before": [], "behind": []}

    class Tracker(TrainerCallback):
        def __init__(self, place):
            self.place = place

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen[self.place].append("live_ranks" in logs)

    class Behind(Tracker):
        pass

    callbacks = [Tracker("before"), ComeraCallback(adaptation()), Behind("behind")]
    trainer = plainly_trained(tmp_path, callbacks)
    assert all("live_ranks" in log for log in trainer.state.log_history if "loss" in log)
    assert not any(seen["before"])
    assert sum(seen["behind"]) == trainer.state.max_steps
    trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(ComeraCallback))
    assert isinstance(trainer.callback_handler.callbacks[0], ComeraCallback)


def test_a_training_that_an_error_ended_leaves_no_second_hook(tmp_path):
    hooks = []

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            hooks.append(len(model._forward_hooks))
            if len(hooks) == 1:
                raise RuntimeError("out of luck")

    trainer = plain_trainer(tmp_path, [ComeraCallback(adaptation()), Breaks()])
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    trainer.train()
    assert set(hooks) == {1}
    assert not trainer.model._forward_hooks


def test_a_saved_callback_is_rebuilt_from_its_state():
    callback = ComeraCallback(adaptation(min_rank=2))
    rebuilt = ComeraCallback.from_state(callback.state())
    assert rebuilt.settings == callback.settings


def test_a_model_that_is_not_compressed_is_refused(tmp_path):
    dense = ARCHITECTURE.new_model()
    with pytest.raises(ValueError, match=r"needs a compressed model, but .* has no layer in tensor-train form"):
        ComeraTrainer(model=dense, args=arguments(tmp_path), rank_adaptation=adaptation())


def test_a_second_callback_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Two would train the ranks: rank_adaptation and a ComeraCallback"):
        ComeraTrainer(
            model=compressed(), args=arguments(tmp_path), rank_adaptation=adaptation(),
            callbacks=[ComeraCallback(adaptation())],
        )  # fmt: skip


def test_settings_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"rank_adaptation=0.02 is needed as a RankAdaptation"):
        ComeraCallback(0.02)


def test_an_optimizer_without_the_gates_is_refused(tmp_path):
    model = compressed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ComeraTrainer(
        model=model, args=arguments(tmp_path), train_dataset=examples(), rank_adaptation=adaptation(),
        optimizers=(optimizer, None),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"does not hold .*rank_gate_0\. Make it after the gates"):
        trainer.train()


def test_stages_longer_than_the_training_are_refused(tmp_path):
    with pytest.raises(ValueError, match="early=5 and late=4 are 5 and 4 steps, together longer than the training"):
        trained(tmp_path, rank_adaptation=adaptation(early=5))


def test_the_best_model_may_not_be_brought_back(tmp_path):
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 500}
    trainer = ComeraTrainer(
        model=compressed(), args=arguments(tmp_path, **settings), train_dataset=examples(), eval_dataset=examples(2),
        rank_adaptation=adaptation(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="load_best_model_at_end=True may bring back a checkpoint"):
        trainer.train()


def test_a_checkpoint_without_rank_adaptation_cannot_be_resumed_with_it(tmp_path):
    model = compressed()
    add_rank_gates(model)
    args = arguments(tmp_path, save_strategy="steps", save_steps=1)
    ComeraTrainer(model=model, args=args, train_dataset=examples()).train()
    with pytest.raises(ValueError, match="of step 2 was written without rank adaptation"):
        trained(tmp_path / "resumed", str(tmp_path / "checkpoint-2"))


def test_a_second_training_needs_a_new_trainer(tmp_path):
    trainer = trained(tmp_path)
    with pytest.raises(ValueError, match=r"has trained the ranks of its model already.*make a new Trainer"):
        trainer.train()


def test_several_processes_need_our_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=r"With several processes use ComeraTrainer\(rank_adaptation=...\)"):
        plainly_trained(tmp_path)


class OwnLoss(Trainer):
    """Keeps the labels from the model."""

    def compute_loss(self, model, inputs, **kwargs):
        labels = inputs.pop("labels")
        return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())


def test_a_model_that_returns_no_loss_needs_our_trainer(tmp_path):
    model = compressed()
    add_rank_gates(model)
    trainer = OwnLoss(
        model=model, args=arguments(tmp_path), train_dataset=examples(), callbacks=[ComeraCallback(adaptation())],
        optimizer_cls_and_kwargs=(TTMuon, {"model": model, "lr": 1e-3}),
    )  # fmt: skip
    with pytest.raises(ValueError, match="found no loss in the outputs of the model"):
        trainer.train()
