"""Short trainings of a tiny BERT with rank adaptation in a Trainer, for the tests of callback and optimizers."""

import torch
from transformers import TrainingArguments

from hf_comera import ComeraConfig, ComeraTrainer, RankAdaptation, get_comera_model, size_report
from tests.architectures import ARCHITECTURES

ARCHITECTURE = ARCHITECTURES["bert-mlm"]


def compressed():
    torch.manual_seed(0)
    return get_comera_model(ARCHITECTURE.auto_class, ComeraConfig(rank=6), config=ARCHITECTURE.new_config())


def wanted(part=0.4):
    report = size_report(compressed())
    return int(report.parameters - (1 - part) * report.compressed_parameters)


def adaptation(**settings):
    return RankAdaptation(**{"target_parameters": wanted(), "early": 1, "late": 4, "cut_every": 1, **settings})


def examples(count=24):
    torch.manual_seed(1)
    batches = [ARCHITECTURE.training_inputs() for _ in range(count // 2)]
    return [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(2)]


def arguments(folder, **settings):
    defaults = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 2}
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "weight_decay": 0.01, "learning_rate": 1e-3}
    return TrainingArguments(output_dir=str(folder), **{**defaults, **fixed, **settings})


def trained(folder, resume=None, rank_adaptation=None, optimizer_cls_and_kwargs=None, **settings):
    trainer = ComeraTrainer(
        model=compressed(), args=arguments(folder, **settings), train_dataset=examples(),
        rank_adaptation=rank_adaptation or adaptation(), optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(one, other):
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())
