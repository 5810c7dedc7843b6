"""Pre-train a masked language model on code in tensor-train form; without options, a demo of a few minutes.

    accelerate launch scripts/pretrain_codebert.py
    accelerate launch scripts/pretrain_codebert.py --config_name microsoft/codebert-base \\
        --dataset_name code-search-net/code_search_net --dataset_config_name python --max_seq_length 512 \\
        --mixed_precision bf16 --output_dir codebert-comera --push_to_hub

``--help`` explains every option. Ctrl-C finishes the step, writes a checkpoint and says how to go on.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import HfApi
from rich.console import Console

from codebert.corpus import describe_source
from codebert.model import load_config, longest_sequence
from codebert.report import card_fields, draw_losses, measure, print_outcome, publish, write_metrics
from codebert.settings import Settings, parse_settings
from codebert.setup import Data, prepare_data, prepare_run
from codebert.tokens import check_length
from hf_comera import is_comera_model, size_report, write_model_card
from loop.checkpoint import open_folder, remove_checkpoints
from loop.launch import (
    describe_devices,
    launch_command,
    make_accelerator,
    resume_command,
    run_script,
    say_how_to_resume,
    shut_down,
)
from loop.outcome import show_ranks
from loop.train import Run, train

SCRIPT = "scripts/pretrain_codebert.py"


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
    checkpoint = open_folder(accelerator, settings.training, partial(resume_command, SCRIPT, arguments))
    config = load_config(settings.model, settings.data.max_seq_length)
    max_seq_length = check_length(settings.data.max_seq_length, longest_sequence(config))
    console.print(f"Data: {describe_source(settings.data)}")
    data = prepare_data(accelerator, settings, max_seq_length)
    run = prepare_run(accelerator, settings, config, data)
    describe(run, data, settings, console)
    if checkpoint is not None:
        run.resume(checkpoint)
        console.print(f"Resuming from {checkpoint}, after step {run.step}.")
    complete = train(run)
    if complete and accelerator.is_main_process:
        finish(run, data, settings, arguments, console)
    if not complete:
        say_how_to_resume(run, SCRIPT, arguments, console)
    shut_down(accelerator, run)
    return 0 if complete else 130


def start(settings: Settings) -> Accelerator:
    """Make the accelerator, and refuse early what would fail only after the training."""
    accelerator = make_accelerator(settings.training, "pretrain_codebert", settings.as_dict())
    if settings.training.push_to_hub and accelerator.is_main_process:
        private = settings.training.hub_private_repo or None
        HfApi().create_repo(hub_id(settings), private=private, exist_ok=True)
    return accelerator


def describe(run: Run, data: Data, settings: Settings, console: Console) -> None:
    """Say what is about to be trained, before the first step."""
    rows = {name: f"{len(split):,}" for name, split in data.text.items()}
    console.print(
        f"Rows: {rows['train']} for training, {rows['validation']} held out; vocabulary: {len(data.tokenizer):,}"
    )
    console.print(f"Model: {run.accelerator.unwrap_model(run.model).config.model_type}; {size_report(run.model)}")
    per_step = settings.training.per_device_train_batch_size * settings.training.gradient_accumulation_steps
    console.print(
        f"Training: {run.total_steps:,} steps of {per_step * run.accelerator.num_processes} sequences, at most "
        f"{data.max_seq_length} tokens each, on {describe_devices(run.accelerator)}; "
        f"precision: {run.accelerator.mixed_precision}"
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
    show_ranks(run, console)
    print_outcome(outcome, console)
    write_metrics(outcome, folder, settings.as_dict())
    if not draw_losses(outcome, folder / "loss.png"):
        console.print('No picture of the losses: matplotlib is not installed. pip install "hf_comera[plots]"')
    fields = card_fields(outcome, settings, launch_command(SCRIPT, arguments))
    if is_comera_model(model):
        write_model_card(model, folder, **fields)
    if settings.training.checkpointing_steps is None:
        remove_checkpoints(folder)
    console.print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if settings.training.push_to_hub:
        publish(model, data.tokenizer, hub_id(settings), private=settings.training.hub_private_repo, fields=fields)


def hub_id(settings: Settings) -> str:
    """The repository to publish to."""
    return settings.training.hub_model_id or Path(settings.training.output_dir).resolve().name


if __name__ == "__main__":
    sys.exit(run_script(main))
