"""hf_comera/training/trainer.py: TTMuon from the training arguments, unless another optimizer is asked for."""

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments
from transformers.utils.import_utils import enable_tf32

from hf_comera import ComeraConfig, ComeraTrainer, RankAdaptation, TTMuon, get_comera_model, size_report
from hf_comera.ops.fused_loss import fixed_shapes
from hf_comera.training import ComeraTrainerMixin
from tests.architectures import ARCHITECTURES
from tests.training.tape_capture import use_tape


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
    defaults |= {"use_cpu": True}
    return TrainingArguments(output_dir=str(folder), report_to=[], disable_tqdm=True, **{**defaults, **settings})


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


@pytest.mark.parametrize(("tf32", "expected"), [(True, "tf32"), (False, "ieee")])
def test_it_trains_where_the_arguments_set_tf32(tf32, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    enable_tf32.cache_clear()  # it sets nothing that it has set before in this process
    args = arguments(tmp_path, max_steps=2, tf32=tf32)
    assert torch.backends.fp32_precision == expected
    trainer = ComeraTrainer(model=compressed(), args=args, train_dataset=examples())
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert torch.backends.cuda.matmul.fp32_precision == expected


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


def graphed(folder, name="bert-mlm", resume=None, rank_adaptation=None, data=None, graphs=None, **settings):
    """A finished training; ``graphs`` are the settings of CUDA graphs."""
    trainer = ComeraTrainer(
        model=compressed(name), args=arguments(folder, **settings), train_dataset=data or examples(name),
        rank_adaptation=rank_adaptation, **(graphs or {}),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def ranks():
    report = size_report(compressed())
    size = int(report.parameters - 0.5 * report.compressed_parameters)
    return RankAdaptation(target_parameters=size, early=0.4, late=0.5, cut_every=0.25)


def logs(trainer):
    """All that was logged, without times, and without the operations, which Trainer counts at the present size."""
    history = trainer.state.log_history
    return [{k: v for k, v in entry.items() if k != "total_flos" and not k.startswith("train_")} for entry in history]


def same(one, other):
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(value, theirs[name]) for name, value in ours.items())
        and logs(one) == logs(other)
    )


@pytest.mark.parametrize("adaptation", [None, ranks], ids=["fixed", "ranks"])
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.0}, {"bf16": True}], ids=str)
def test_cuda_graphs_change_neither_weights_nor_logs(adaptation, settings, tmp_path, monkeypatch):
    use_tape(monkeypatch)
    settings = {"max_steps": 16, "per_device_train_batch_size": 4, **settings}
    rank_adaptation = None if adaptation is None else adaptation()
    with fixed_shapes():
        plain = graphed(tmp_path, rank_adaptation=rank_adaptation, **settings)
    by_graph = graphed(tmp_path, rank_adaptation=rank_adaptation, graphs={"cuda_graphs": True}, **settings)
    assert by_graph.graphed_step.num_replays
    assert same(plain, by_graph)
    assert by_graph.state.log_history[0]["grad_norm"] > 0


@pytest.mark.parametrize("adaptation", [None, ranks], ids=["fixed", "ranks"])
def test_with_cuda_graphs_resuming_is_bit_exact(adaptation, tmp_path, monkeypatch):
    use_tape(monkeypatch)
    settings = {"max_steps": 16, "graphs": {"cuda_graphs": True}, "save_strategy": "steps", "save_steps": 6}
    settings["rank_adaptation"] = None if adaptation is None else adaptation()
    whole = graphed(tmp_path / "whole", **settings)
    resumed = graphed(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-6"), **settings)
    assert resumed.graphed_step.num_replays
    assert same(whole, resumed)


def test_with_cuda_graphs_batches_are_padded_and_small_ones_counted(tmp_path, monkeypatch):
    use_tape(monkeypatch)
    data = [{key: value[: 4 + index % 5] for key, value in item.items()} for index, item in enumerate(examples())][:14]
    settings = {"per_device_train_batch_size": 1, "max_steps": 28, "data": data}
    trainer = graphed(tmp_path, graphs={"cuda_graphs": True, "padding_buckets": [6, 8]}, **settings)
    assert trainer.graphed_step.num_captures == 2
    assert not trainer.graphed_step.num_eager
    settings |= {"per_device_train_batch_size": 4, "max_steps": 12, "data": examples(count=14)}
    trainer = graphed(tmp_path, graphs={"cuda_graphs": True}, **settings)
    assert trainer.graphed_step.eager_steps == {"the batch has fewer rows than others": 3}


def test_cuda_graphs_without_a_gpu_train_as_usual(tmp_path, caplog):
    trainer = graphed(tmp_path, graphs={"cuda_graphs": True})
    assert trainer.graphed_step.num_eager == 4
    assert "CUDA graphs need a CUDA device" in caplog.text
    assert same(graphed(tmp_path), trainer)


def test_what_does_not_go_with_cuda_graphs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not work with gradient_accumulation_steps=2, only with 1"):
        graphed(tmp_path, graphs={"cuda_graphs": True}, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"padding_buckets=.64. is only for CUDA graphs"):
        graphed(tmp_path, graphs={"padding_buckets": [64]})


@pytest.mark.gpu
@pytest.mark.parametrize("adaptation", [None, ranks], ids=["fixed", "ranks"])
def test_on_a_gpu_the_trainer_replays(adaptation, tmp_path):
    settings = {"max_steps": 24, "use_cpu": False, "rank_adaptation": None if adaptation is None else adaptation()}
    plain = graphed(tmp_path, **settings)
    by_graph = graphed(tmp_path, graphs={"cuda_graphs": True}, **settings)
    assert by_graph.graphed_step.reason is None
    assert by_graph.graphed_step.num_replays >= 8
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (plain, by_graph)]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
