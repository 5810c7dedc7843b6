"""One process of a healing run: ``python -m tests.integration.heal_worker KIND FOLDER``; writes losses and weights."""

import copy
import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from hf_comera import ComeraConfig, HealingArguments, HealingTrainer, get_comera_model
from tests.architectures import ARCHITECTURES, VOCABULARY

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
BATCH, STEPS = 4, 3


def collate(features):
    """Rows of unequal lengths, padded."""
    rows = [feature["input_ids"] for feature in features]
    masks = [torch.ones_like(row) for row in rows]
    pad = nn.utils.rnn.pad_sequence
    return {"input_ids": pad(rows, batch_first=True), "attention_mask": pad(masks, batch_first=True)}


def main():
    """Heal and write."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    architecture = ARCHITECTURES[sys.argv[1]]
    teacher = architecture.new_model().double()
    for parameter in teacher.parameters():
        parameter.data.mul_(3)  # so that it has opinions
    student = get_comera_model(copy.deepcopy(teacher), ComeraConfig(rank=8))
    rows = [{"input_ids": torch.randint(2, VOCABULARY, (2 + 5 * i % 11,))} for i in range(BATCH * STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        args = HealingArguments(
            folder, per_device_train_batch_size=BATCH // WORLD, max_steps=STEPS, logging_steps=1, report_to=[],
            train_sampling_strategy="sequential", use_cpu=True, disable_tqdm=True, save_strategy="no",
            dataloader_pin_memory=False, ddp_backend="gloo" if WORLD > 1 else None, per_device_eval_batch_size=4,
        )  # fmt: skip
        run = HealingTrainer(student, teacher, args, rows, rows[:9], data_collator=collate)
        run.train()
        metrics = run.evaluate()
    total = sum(parameter.double().abs().sum().item() for parameter in student.parameters())
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    result = {"losses": [entry["loss"] for entry in logs], "sum": total, "eval": metrics["eval_loss"]}
    result["parts"] = [value for entry in logs for name, value in sorted(entry.items()) if name.endswith("_loss")]
    Path(sys.argv[2], f"{RANK}.json").write_text(json.dumps(result))  # lines that two processes print can mix
    if WORLD > 1:
        gc.collect()  # see ddp_worker.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
