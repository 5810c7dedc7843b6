"""Pre-train a masked language model on code in tensor-train form; without options, a demo of a few minutes.

    accelerate launch scripts/pretrain_codebert.py
    accelerate launch scripts/pretrain_codebert.py --config_name microsoft/codebert-base \\
        --dataset_name code-search-net/code_search_net --dataset_config_name python --max_seq_length 512 \\
        --mixed_precision bf16 --output_dir codebert-comera --push_to_hub

``--help`` explains every option. Ctrl-C finishes the step, writes a checkpoint and says how to go on.
"""

import gc
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi
from rich.console import Console

from code_corpus import describe_source
from code_sequences import check_length
from finished_model import card_fields, measure, publish
from freed_memory import keep_freed_memory
from hf_comera import is_comera_model, size_report, write_model_card
from loss_picture import draw_losses
from model_setup import load_config, longest_sequence
from pretrain_report import print_outcome
from pretrain_settings import Settings, parse_settings
from run_checkpoint import read_history, remove_checkpoints
from run_metrics import write_metrics
from run_setup import Data, open_folder, prepare_data, prepare_run
from train_loop import History, Run, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole job.

    Args:
        argv: Command line without the name of the program. None: that of this process.

    Returns:
        0 when the run is complete, 130 when it was interrupted and can be resumed.

    Raises:
        ValueError: If a setting, a file or a checkpoint cannot be used; the message says what can.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    settings = parse_settings(arguments)
    accelerator = start(settings)
    console = Console(quiet=not accelerator.is_main_process, soft_wrap=True)
    checkpoint = open_folder(accelerator, settings)
    config = load_config(settings.model, settings.data.max_seq_length)
    max_seq_length = check_length(settings.data.max_seq_length, longest_sequence(config))
    console.print(f"Data: {describe_source(settings.data)}")
    data = prepare_data(accelerator, settings, max_seq_length)
    run = prepare_run(accelerator, settings, config, data)
    describe(run, data, settings, console)
    if checkpoint is not None:
        history = read_history(checkpoint, run.identity)
        accelerator.load_state(str(checkpoint))
        run.history = History(**history)
        console.print(f"Resuming from {checkpoint}, after step {run.step}.")
    complete = train(run)
    if complete and accelerator.is_main_process:
        finish(run, data, settings, arguments, console)
    if not complete:
        resume = command([*without_resume(arguments), "--resume_from_checkpoint", "latest"])
        console.print(
            f"\nInterrupted after step {run.step} of {run.total_steps}; everything is saved. Go on with:\n  {resume}"
        )
    shut_down(accelerator, run)
    return 0 if complete else 130


def start(settings: Settings) -> Accelerator:
    """Make the accelerator, and refuse early what would fail only after the training."""
    training = settings.training
    accelerator = Accelerator(
        mixed_precision=training.mixed_precision,
        cpu=training.use_cpu,
        log_with=training.report_to if training.with_tracking else None,
        project_dir=training.output_dir,
    )
    if accelerator.device.type == "cpu":
        # accelerate launch leaves one thread to a script it starts on the CPU without being told a number
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        keep_freed_memory()
        torch.set_num_threads(training.num_threads or max(1, cores // accelerator.num_processes))
    if training.with_tracking:
        known = {name: value for name, value in settings.as_dict().items() if value is not None}
        accelerator.init_trackers("pretrain_codebert", config=known)
    if training.push_to_hub and accelerator.is_main_process:
        HfApi().create_repo(hub_id(settings), private=training.hub_private_repo or None, exist_ok=True)
    return accelerator


def describe(run: Run, data: Data, settings: Settings, console: Console) -> None:
    """Say what is about to be trained, before the first step."""
    rows = {name: f"{len(split):,}" for name, split in data.text.items()}
    console.print(
        f"Rows: {rows['train']} for training, {rows['validation']} held out; vocabulary: {len(data.tokenizer):,}"
    )
    console.print(f"Model: {run.accelerator.unwrap_model(run.model).config.model_type}; {size_report(run.model)}")
    devices = f"{run.accelerator.num_processes} x {run.accelerator.device.type}"
    if run.accelerator.device.type == "cpu":
        devices += f", {torch.get_num_threads()} threads each"
    per_step = settings.training.per_device_train_batch_size * settings.training.gradient_accumulation_steps
    console.print(
        f"Training: {run.total_steps:,} steps of {per_step * run.accelerator.num_processes} sequences, at most "
        f"{data.max_seq_length} tokens each, on {devices}; precision: {run.accelerator.mixed_precision}"
    )
    console.print(f"Held-out loss of a unigram model: {data.unigram_loss:.3f}, the mark to beat")


def finish(run: Run, data: Data, settings: Settings, arguments: list[str], console: Console) -> None:
    """Save, reload, measure, report, and publish if that is wanted."""
    folder = run.folder
    facts = {
        "unigram_loss": data.unigram_loss,
        "training_data": describe_source(settings.data),
        "max_seq_length": data.max_seq_length,
    }
    model, outcome = measure(run, settings, data.tokenizer, data.text["validation"], facts)
    print_outcome(outcome, console)
    write_metrics(outcome, folder, settings.as_dict())
    if not draw_losses(outcome, folder / "loss.png"):
        console.print('No picture of the losses: matplotlib is not installed. pip install "hf_comera[plots]"')
    fields = card_fields(outcome, settings, command(arguments))
    if is_comera_model(model):
        write_model_card(model, folder, **fields)
    if settings.training.checkpointing_steps is None:
        remove_checkpoints(folder)
    console.print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if settings.training.push_to_hub:
        publish(model, data.tokenizer, hub_id(settings), private=settings.training.hub_private_repo, fields=fields)


def shut_down(accelerator: Accelerator, run: Run) -> None:
    """Finish trackers and processes.

    With gloo, a DDP object that outlives its process group deadlocks now and then (torch 2.13): its destructor joins a
    thread that waits for the interpreter's lock. So it goes first.
    """
    run.model = accelerator.unwrap_model(run.model)
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def hub_id(settings: Settings) -> str:
    """The repository to publish to."""
    return settings.training.hub_model_id or Path(settings.training.output_dir).resolve().name


def command(arguments: Sequence[str]) -> str:
    """The shell command that runs this script with ``arguments``."""
    return shlex.join(["accelerate", "launch", "scripts/pretrain_codebert.py", *arguments])


def without_resume(arguments: Sequence[str]) -> list[str]:
    """``arguments`` without the settings that say how to begin."""
    kept, skip = [], False
    for argument in arguments:
        name = argument.partition("=")[0].replace("-", "_").lstrip("_")
        begins = argument.startswith("--") and name in {"resume_from_checkpoint", "overwrite_output_dir"}
        if not skip and not begins:
            kept.append(argument)
        skip = begins and name == "resume_from_checkpoint" and "=" not in argument
    return kept


if __name__ == "__main__":
    sys.exit(main())
