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
from pathlib import Path

from accelerate.utils import set_seed
from rich.console import Console
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from hf_comera import RankAdaptation, add_rank_gates, fold_rank_gates, size_report
from loop.callbacks import Progress, StepCosts, StoppedError, StopWhenAsked
from loop.checkpoint import check_identity, open_folder, remove_checkpoints, restore_folder, run_identity
from loop.interrupt import Interrupt
from loop.launch import (
    describe_devices,
    launch_command,
    prepare_process,
    resume_command,
    run_script,
    say_how_to_resume,
    shut_down,
)
from loop.outcome import show_ranks
from loop.settings import naming_the_option, rank_adaptation
from loop.setup import choose_computation, make_optimizer, padding_buckets
from mnli.data import describe_source
from mnli.model import build_model
from mnli.results import measure, print_results, write_results
from mnli.settings import Settings, TrainingSettings, parse_settings
from mnli.setup import MULTIPLE, Data, lay_out_steps, prepare_data, training_arguments
from mnli.trainer import BestModel, PairTrainer, figures

SCRIPT = "scripts/train_mnli.py"
STATES = ("trainer_state.json",)
"""Files of a checkpoint without which no run goes on, besides its settings."""


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
    training = settings.training
    args = training_arguments(training)
    prepare_process(training)
    disable_progress_bar()  # of Transformers, for each model that is kept: it would break up that of the steps
    console = Console(quiet=not args.should_save, soft_wrap=True)
    checkpoint = open_folder(training, partial(resume_command, SCRIPT, arguments), STATES)
    data = prepare_data(settings)
    lay_out_steps(args, training, data)

    set_seed(training.seed)
    model = build_model(settings.model, data.config).to(args.device)
    choose_computation(model, training)
    adaptation = rank_adaptation(training, model)
    if adaptation is not None:
        add_rank_gates(model)
    facts = {"total_steps": args.max_steps, "data": data.fingerprint, "processes": args.world_size}
    best = BestModel(Path(args.output_dir, "best"), first_choice=last_cut(adaptation, args.max_steps))
    trainer = PairTrainer(
        model=model,
        args=args,
        train_dataset=data.batches,
        eval_dataset=data.held_out,
        data_collator=DataCollatorWithPadding(data.tokenizer, pad_to_multiple_of=MULTIPLE),
        compute_metrics=figures,
        # where none is given ComeraTrainer makes TTMuon, which for a dense model is AdamW
        optimizers=(None if training.optimizer == "tt_muon" else make_optimizer(model, training), None),
        rank_adaptation=adaptation,
        cuda_graphs=training.cuda_graphs,
        padding_buckets=padding_buckets(training, settings.data.max_length),
        callbacks=[best, costs := StepCosts()],
        identity=run_identity(settings.as_dict(), facts),
        kept_folder=best.folder,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    describe(trainer, data, settings, console)
    if checkpoint is not None:
        check_identity(checkpoint, trainer.identity)
        restore_folder(checkpoint, best.folder)
        console.print(f"Resuming from {checkpoint}.")
    set_seed(training.seed, device_specific=True)  # from here on only dropout draws: differently in each process
    complete = train(trainer, checkpoint, training)
    if complete:
        finish(trainer, best, costs, data, settings, launch_command(SCRIPT, arguments), console)
    else:
        command = resume_command(SCRIPT, arguments, "latest")
        say_how_to_resume(trainer.state.global_step, args.max_steps, command, console)
    trainer.model_wrapped = trainer.model
    shut_down(trainer.accelerator)
    return 0 if complete else 130


def last_cut(adaptation: RankAdaptation | None, total_steps: int) -> int:
    """Steps after which no rank is cut, so that the model has its final size."""
    if adaptation is None:
        return 0
    stages = adaptation.stages(total_steps)
    return stages.early + stages.late


def describe(trainer: PairTrainer, data: Data, settings: Settings, console: Console) -> None:
    """Say what is about to be trained, before the first step."""
    parts, training, args = data.parts, settings.training, trainer.args
    tests = ", ".join(f"{len(rows):,} {name}" for name, rows in parts.tests.items()) or "none"
    console.print(
        f"Data: {describe_source(settings.data)}; pairs for training: {len(parts.train):,}, to choose the checkpoint: "
        f"{len(parts.validation):,}, to test it: {tests}"
    )
    full = int((data.batches.lengths == settings.data.max_length).sum())
    parts.notes.append(f"{full:,} of the training pairs have {settings.data.max_length} tokens; longer ones are cut.")
    for note in parts.notes:
        console.print(f"  {note}", highlight=False)
    console.print(f"Model: {data.config.num_hidden_layers} encoders; {size_report(trainer.model)}")
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    console.print(
        f"Training: {args.max_steps:,} steps of {per_step * args.world_size} pairs, "
        f"{data.steps_per_epoch(training.gradient_accumulation_steps):,.1f} steps an epoch, rate "
        f"{training.learning_rate:g}, on {describe_devices()}; precision: {args.mixed_precision}"
    )


def train(trainer: PairTrainer, checkpoint: Path | None, training: TrainingSettings) -> bool:
    """Train to the end.

    Returns:
        True when complete; False when it was interrupted, with a checkpoint of the last finished step on disk.
    """
    with Interrupt() as interrupt, naming_the_option(training):
        trainer.add_callback(StopWhenAsked(interrupt))
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except StoppedError:
            return False
    return True


def finish(
    trainer: PairTrainer,
    best: BestModel,
    costs: StepCosts,
    data: Data,
    settings: Settings,
    command: str,
    console: Console,
) -> None:
    """Load the best model the way a user would, measure it on all pairs, save and report; in every process."""
    folder, trained = best.folder.parent, trainer.model
    trainer.accelerator.wait_for_everyone()  # the main process keeps the best model
    model = AutoModelForSequenceClassification.from_pretrained(best.kept()).to(trainer.args.device)
    fold_rank_gates(model)
    outcome = measure(trainer, model, best, costs, data, settings)
    trainer.log({f"{name}_accuracy": value for name, value in outcome.accuracy.items()})
    if trainer.is_world_process_zero():
        model.save_pretrained(folder)
        data.tokenizer.save_pretrained(folder)
        write_results(outcome, trainer.args, settings, data.parts.notes, command)
        if trainer.rank_callback is not None:
            show_ranks(trained, trainer.optimizer, costs.seconds, costs.first_bytes, folder, console)
        print_results(outcome, console)
        shutil.rmtree(best.folder)
        if settings.training.checkpointing_steps is None:
            remove_checkpoints(folder)
        console.print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    sys.exit(run_script(main))
