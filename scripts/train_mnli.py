"""Train BERT encoders on pairs of sentences from random weights, in tensor-train form.

By default these are the CoMERA paper's six encoders, and MNLI can be named as data. Rows kept so far are of neither:
four encoders, at most 256 wide, on a mix of other public pairs (docs/ranks.md).

    accelerate launch scripts/train_mnli.py --dataset_name nyu-mll/glue --dataset_config mnli
    accelerate launch scripts/train_mnli.py --data_file pairs.parquet --tokenizer_name google-bert/bert-base-uncased \\
        --config_overrides hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024 --rank 16
    accelerate launch scripts/train_mnli.py --dataset_name nyu-mll/glue --dataset_config mnli --dense

``--help`` explains every option. Ctrl-C finishes the step, writes a checkpoint and says how to go on.
"""

import shutil
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from hf_comera import fold_rank_gates, size_report
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
from mnli.data import describe_source
from mnli.evaluation import BestModel
from mnli.results import measure, print_results, write_results
from mnli.settings import Settings, parse_settings
from mnli.setup import Data, prepare_data, prepare_run

SCRIPT = "scripts/train_mnli.py"


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
    accelerator = make_accelerator(settings.training, "train_mnli", settings.as_dict())
    disable_progress_bar()  # of Transformers, for each model that is kept: it would break up that of the steps
    console = Console(quiet=not accelerator.is_main_process, soft_wrap=True)
    checkpoint = open_folder(accelerator, settings.training, partial(resume_command, SCRIPT, arguments))
    data = prepare_data(accelerator, settings)
    run = prepare_run(accelerator, settings, data)
    describe(run, data, settings, console)
    if checkpoint is not None:
        run.resume(checkpoint)
        console.print(f"Resuming from {checkpoint}, after step {run.step}.")
    complete = train(run)
    if complete:
        finish(run, data, settings, launch_command(SCRIPT, arguments), console)
    else:
        say_how_to_resume(run, SCRIPT, arguments, console)
    shut_down(accelerator, run)
    return 0 if complete else 130


def describe(run: Run, data: Data, settings: Settings, console: Console) -> None:
    """Say what is about to be trained, before the first step."""
    parts, training = data.parts, settings.training
    tests = ", ".join(f"{len(rows):,} {name}" for name, rows in parts.tests.items()) or "none"
    console.print(
        f"Data: {describe_source(settings.data)}; pairs for training: {len(parts.train):,}, to choose the checkpoint: "
        f"{len(parts.validation):,}, to test it: {tests}"
    )
    full = int((data.batches.lengths == settings.data.max_length).sum())
    parts.notes.append(f"{full:,} of the training pairs have {settings.data.max_length} tokens; longer ones are cut.")
    for note in parts.notes:
        console.print(f"  {note}", highlight=False)
    console.print(f"Model: {data.config.num_hidden_layers} encoders; {size_report(run.model)}")
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    console.print(
        f"Training: {run.total_steps:,} steps of {per_step * run.accelerator.num_processes} pairs, "
        f"{data.steps_per_epoch(training.gradient_accumulation_steps):,.1f} steps an epoch, rate "
        f"{training.learning_rate:g}, on {describe_devices(run.accelerator)}; "
        f"precision: {run.accelerator.mixed_precision}"
    )


def finish(run: Run, data: Data, settings: Settings, command: str, console: Console) -> None:
    """Load the best model the way a user would, measure it on all pairs, save and report; in every process."""
    accelerator, best = run.accelerator, BestModel(run.folder / "best")
    model = AutoModelForSequenceClassification.from_pretrained(best.kept()).to(accelerator.device)
    fold_rank_gates(model)
    outcome = measure(model, data, run, settings, best.step(run))
    accelerator.log({f"{name}_accuracy": value for name, value in outcome.accuracy.items()}, step=run.step)
    if accelerator.is_main_process:
        model.save_pretrained(run.folder)
        data.tokenizer.save_pretrained(run.folder)
        write_results(outcome, run, settings, data.parts.notes, command)
        show_ranks(run, console)
        print_results(outcome, console)
        shutil.rmtree(best.folder)
        if settings.training.checkpointing_steps is None:
            remove_checkpoints(run.folder)
        console.print(f"In {run.folder}: {', '.join(sorted(path.name for path in run.folder.iterdir()))}")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    sys.exit(run_script(main))
