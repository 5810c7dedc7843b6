"""One process of a Trainer's data-parallel training whose newest checkpoint is damaged, and that resumes.

Started as by ``torchrun`` from tests/integration/test_checkpoints_in_parallel.py.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from hf_comera import ComeraTrainer
from tests.integration.worker_process import run_worker


class Tiny(nn.Module):
    """With dropout, so that random numbers of each process count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(self.dropout(x)), labels)}


def train(folder, resume=None):
    """Steps to the end, from the beginning or a checkpoint; the losses of all."""
    torch.manual_seed(1)
    rows = [{"x": torch.randn(4), "labels": torch.tensor(index % 2)} for index in range(32)]
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2, save_strategy="steps",
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        ddp_backend="gloo", learning_rate=1e-2, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = ComeraTrainer(
        model=Tiny(), args=args, train_dataset=rows, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-2})
    )
    trainer.train(resume_from_checkpoint=resume)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def main():
    """Train, damage the newest checkpoint, and train from the one before it."""
    folder = Path(sys.argv[1])
    whole = train(folder)
    dist.barrier()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    dist.barrier()
    if os.environ["RANK"] == "0":
        (folder / "checkpoint-4" / "rng_state_1.pth").unlink()
    dist.barrier()
    resumed = train(folder, resume=True)
    (folder.parent / f"{os.environ['RANK']}.json").write_text(
        json.dumps({"whole": whole, "resumed": resumed, "names": names})
    )


if __name__ == "__main__":
    run_worker(main, join=False)
