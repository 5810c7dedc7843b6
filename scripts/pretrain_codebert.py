"""Pre-train a masked language model on code in tensor-train form; without options, a demo of a few minutes.

    accelerate launch scripts/pretrain_codebert.py
    accelerate launch scripts/pretrain_codebert.py --config_name microsoft/codebert-base \\
        --dataset_name code-search-net/code_search_net --dataset_config_name python --max_seq_length 512 \\
        --mixed_precision bf16 --output_dir codebert-comera --push_to_hub

``--help`` explains every option. Ctrl-C finishes the step, writes a checkpoint and says how to go on.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub import HfApi
from rich.console import Console
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, get_scheduler

from codebert.corpus import describe_source
from codebert.model import build_model, fit_to_tokenizer, load_config, longest_sequence
from codebert.report import card_fields, draw_losses, measure, print_outcome, publish, write_metrics
from codebert.run import Run
from codebert.settings import DEMO_STEPS, Settings, parse_settings
from codebert.setup import Data, prepare_data
from codebert.tokens import check_length
from hf_comera import GraphedStep, RankAdapter, add_rank_gates, is_comera_model, size_report, write_model_card
from loop.checkpoint import open_folder, remove_checkpoints, run_identity
from loop.interrupt import Interrupt
from loop.launch import (
    describe_devices,
    launch_command,
    make_accelerator,
    resume_command,
    run_script,
    say_how_to_resume,
    shut_down,
)
from loop.outcome import show_ranks, training_bytes
from loop.progress import beside_bar
from loop.settings import naming_the_option, rank_adaptation
from loop.setup import choose_computation, count_steps, count_warmup, make_optimizer, padding_buckets

SCRIPT = "scripts/pretrain_codebert.py"
BETAS = (0.9, 0.98)  # RoBERTa's: the gradients of a masked loss change their size too fast for 0.999


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
    checkpoint = open_folder(settings.training, partial(resume_command, SCRIPT, arguments))
    config = load_config(settings.model, settings.data.max_seq_length)
    max_seq_length = check_length(settings.data.max_seq_length, longest_sequence(config))
    console.print(f"Data: {describe_source(settings.data)}")
    data = prepare_data(settings, max_seq_length)
    run = prepare_run(accelerator, settings, config, data)
    describe(run, data, settings, console)
    if checkpoint is not None:
        run.resume(checkpoint)
        console.print(f"Resuming from {checkpoint}, after step {run.step}.")
    complete = train(run)
    if complete and accelerator.is_main_process:
        finish(run, data, settings, arguments, console)
    if not complete:
        say_how_to_resume(run.step, run.total_steps, resume_command(SCRIPT, arguments, "latest"), console)
    run.model = accelerator.unwrap_model(run.model)
    shut_down(accelerator)
    return 0 if complete else 130


def prepare_run(accelerator: Accelerator, settings: Settings, config: PreTrainedConfig, data: Data) -> Run:
    """Build model, optimizer, schedule and, if ranks are trained, what trains them; hand them to Accelerate."""
    training = settings.training
    fit_to_tokenizer(config, data.tokenizer, pretrained=settings.model.model_name_or_path is not None)
    set_seed(training.seed)
    model = build_model(settings.model, config).to(accelerator.device)
    choose_computation(model, training)
    adaptation = rank_adaptation(training, model)
    if adaptation is not None:
        add_rank_gates(model)
    set_seed(training.seed, device_specific=True)  # from here on only dropout draws: differently in each process
    model, optimizer = accelerator.prepare(model, make_optimizer(model, training, BETAS))

    total_steps = count_steps(training, data.batches.batches_per_epoch, default=DEMO_STEPS)
    # The schedule is not prepared: Accelerate would advance it once per process and step. It is of the optimizer in
    # Accelerate's wrapper, which CUDA graphs step without the wrapper.
    num_warmup = count_warmup(training, total_steps)
    scheduler = get_scheduler(training.lr_scheduler_type, optimizer.optimizer, num_warmup, total_steps)
    adapter = graphed = None
    if adaptation is not None:
        with naming_the_option(training):
            adapter = RankAdapter(model, optimizer, adaptation, total_steps=total_steps)
    if training.cuda_graphs:
        buckets = padding_buckets(training, data.max_seq_length)
        graphed = GraphedStep(model, optimizer, adapter, buckets=buckets, max_grad_norm=training.max_grad_norm)
    facts = {"total_steps": total_steps, "data": data.fingerprint, "processes": accelerator.num_processes}
    return Run(
        accelerator=accelerator, model=model, optimizer=optimizer, scheduler=scheduler, batches=data.batches,
        held_out=data.held_out, settings=training, total_steps=total_steps, adapter=adapter, graphed=graphed,
        identity=run_identity(settings.as_dict(), facts),
    )  # fmt: skip


def train(run: Run) -> bool:
    """Train from where ``run`` stands to its last step.

    Returns:
        True when complete; False when it was interrupted, with a checkpoint of the last finished step on disk.
    """
    settings, accelerator = run.settings, run.accelerator
    bar = tqdm(
        total=run.total_steps, initial=run.step, disable=not accelerator.is_local_main_process, desc="training",
        dynamic_ncols=True, mininterval=1.0,
    )  # fmt: skip
    run.model.train()
    batches = stream(run)
    with Interrupt() as interrupt, bar:
        if not run.step:
            run.measure()
        bar.set_postfix(beside_bar(run.figures()), refresh=False)
        while run.step < run.total_steps:
            optimizer_step(run, batches)
            bar.update()
            last = run.step == run.total_steps
            if last and run.adapter:
                run.adapter.finish()
            measured = last or run.step % settings.eval_steps == 0
            if measured:
                run.measure()
            if measured or run.step % settings.logging_steps == 0:
                run.read()
                bar.set_postfix(beside_bar(run.figures()), refresh=False)
                accelerator.log(run.figures(), step=run.step)
            stop = interrupt.agreed() and not last
            due = settings.checkpointing_steps and run.step % settings.checkpointing_steps == 0
            if stop or (due and not (last and run.adapter)):  # without its gates a run could not go on
                run.save()
            if stop:
                return False
    return True


def stream(run: Run) -> Iterator[dict[str, Tensor]]:
    """The batches from the present step on. Which ones these are depends on nothing but their numbers."""
    parts = run.settings.gradient_accumulation_steps
    loader = torch.utils.data.DataLoader(
        run.batches,
        batch_size=None,
        sampler=range(run.step * parts, run.total_steps * parts),
        num_workers=run.settings.dataloader_num_workers,
        pin_memory=run.accelerator.device.type == "cuda",
        generator=torch.Generator(),  # a loader without its own draws from the generator that dropout uses
    )
    return iter(loader)


def optimizer_step(run: Run, batches: Iterator[dict[str, Tensor]]) -> None:
    """One step; its loss stays on the device until :meth:`Run.read`."""
    start = time.perf_counter()
    sums = plain_step(run, batches) if run.graphed is None else graphed_step(run.graphed, next(batches))
    run.scheduler.step()
    if not run.step:
        run.history.first_bytes = training_bytes(run.model, run.optimizer)
    run.unread.append(sums)
    run.history.step_seconds.append(time.perf_counter() - start)
    run.history.seconds += run.history.step_seconds[-1]


def plain_step(run: Run, batches: Iterator[dict[str, Tensor]]) -> Tensor:
    """A step over all its accumulated batches; its loss and tokens, over all processes.

    Nothing here waits for the device. The model does, for the number of hidden tokens and for a mask of padding, and
    so does a cut of ranks.
    """
    accelerator, parts = run.accelerator, run.settings.gradient_accumulation_steps
    sums = torch.zeros(2, device=accelerator.device)
    for part in range(parts):
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in next(batches).items()}
        with accelerator.no_sync(run.model) if part < parts - 1 else contextlib.nullcontext():
            loss = run.model(**batch).loss / parts
            accelerator.backward(loss)
        sums += torch.stack([loss.detach().float(), batch["attention_mask"].sum().float()])
    sums = accelerator.reduce(sums, reduction="sum")
    accelerator.clip_grad_norm_(run.model.parameters(), run.settings.max_grad_norm)
    if run.adapter:
        run.adapter.before_step(sums[0] / accelerator.num_processes)
    run.optimizer.step()
    if run.adapter:
        run.adapter.after_step()
    run.optimizer.zero_grad()
    return sums


def graphed_step(step: GraphedStep, batch: dict[str, Tensor]) -> Tensor:
    """A step as a CUDA graph, where it can be one; its loss and tokens."""
    num_tokens = batch["attention_mask"].sum().float()
    return torch.stack([step(batch).float(), num_tokens.to(step.device)])


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
        f"{data.max_seq_length} tokens each, on {describe_devices()}; "
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
    if run.adapter is not None:
        show_ranks(model, run.optimizer, run.history.step_seconds, run.history.first_bytes, folder, console)
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
