"""Compress a trained model to a wanted size, heal it on texts without labels, and report what became of it.

    python scripts/compress_pretrained.py --model sentence-transformers/all-MiniLM-L6-v2 --texts texts.txt --budget 8MB
    python scripts/compress_pretrained.py --model roberta --texts a.parquet b.csv --column text --budget 0.25

``--help`` explains every option. Ctrl-C finishes the step and writes a checkpoint. The same command goes on from
there; after a kill, from the last one.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from compress.healing import MinutesUsed, count_steps, make_trainer, steps_of
from compress.model import DECOMPOSED, decomposed, find_dense, load_dense
from compress.report import RESULTS, Judge, Report, checkpoint_bytes, course, print_report, write_report
from compress.settings import Settings, command_line, parse_settings
from compress.texts import describe_texts, load_texts
from hf_comera import HealingTrainer, size_report
from hf_comera.training.whole_checkpoint import checkpoints, newest_whole
from loop.callbacks import StoppedError, StopWhenAsked
from loop.checkpoint import SETTINGS, check_identity, fingerprint, prepare_folder, remove_checkpoints, run_identity
from loop.interrupt import Interrupt
from loop.launch import describe_devices, prepare_process, run_script, say_how_to_resume
from loop.outcome import write_whole


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
    settings, command, console = parse_settings(arguments), command_line(arguments), Console(soft_wrap=True)
    PartialState(cpu=settings.use_cpu)
    prepare_process(settings)
    disable_progress_bar()  # of Transformers, for each model that is loaded
    folder = Path(settings.output_dir)
    texts, source = load_texts(settings), find_dense(settings)
    tokenizer = source.load_tokenizer()
    console.print(
        f"Texts: {describe_texts(settings.texts)}; {len(texts.train):,} for training, {len(texts.held_out):,} held "
        f"out, of {texts.num_read:,} read"
    )
    dense = load_dense(source)
    open_run(settings, run_facts(settings, dense, texts.fingerprint))
    if (folder / RESULTS).is_file():
        console.print(f"This run is complete: see {folder / RESULTS}. {how_to_load(dense, folder)}")
        return 0

    student = decomposed(source, dense, tokenizer, texts, settings, console)
    console.print(f"Model: {type(dense).__name__}; {size_report(student)}")
    judge = Judge(dense, tokenizer, texts, settings, lambda place: source.model_class.from_pretrained(place))
    candidates = [judge.of_dense(getattr(source.config.dtype or torch.float32, "itemsize", 4))]
    candidates += [judge.of_stored_dense()] if settings.storage != "none" else []
    candidates.append(judge.of_model("decomposed", student))
    trainer, used = None, MinutesUsed(None if settings.max_steps is not None else settings.minutes)
    if settings.heals:
        checkpoint, _ = newest_whole(folder)
        steps = steps_of(checkpoint) if checkpoint else count_steps(student, dense, tokenizer, texts, settings)
        console.print(
            f"Healing: {steps:,} steps of {settings.per_device_train_batch_size} texts on {describe_devices()}"
            + (f", going on from {checkpoint}" if checkpoint else "")
        )
        trainer = make_trainer(student, dense, tokenizer, texts, settings, steps=steps, callbacks=[used])
        if not heal(trainer, checkpoint, settings):
            say_how_to_resume(trainer.state.global_step, steps, command, console)
            return 130
    source.save(student.to("cpu"), folder)
    assert settings.size.bytes is None or checkpoint_bytes(folder) <= settings.size.bytes
    if trainer is not None:
        candidates.append(judge.of_folder("healed", folder))
    model = judge.load(folder).to(dense.device)
    if settings.speed_rounds:
        answers = judge.time({candidates[0].name: dense, candidates[-1].name: model})
        for one in candidates:
            one.answers = answers.get(one.name, {})
    report = Report(
        candidates=candidates, course=course(trainer.state.log_history) if trainer else [],
        steps=trainer.state.global_step if trainer else 0, minutes=used.seconds / 60,
        num_texts=(len(texts.train), len(texts.held_out)),
    )  # fmt: skip
    print_report(report, console)
    write_report(report, model, settings, command, console)
    remove_checkpoints(folder)
    shutil.rmtree(folder / DECOMPOSED, ignore_errors=True)
    console.print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    console.print(how_to_load(dense, folder))
    return 0


def run_facts(settings: Settings, dense: PreTrainedModel, texts: str) -> dict[str, object]:
    """All that decides the numbers of a run; what was read counts, and not from where."""
    weights = [parameter.detach().cpu().contiguous().view(-1).view(torch.uint8) for parameter in dense.parameters()]
    named = {name: value for name, value in settings.as_dict().items() if name not in {"model", "speed_rounds"}}
    return run_identity(named, {"texts": texts, "model": fingerprint([np.asarray(weight) for weight in weights])})


def open_run(settings: Settings, facts: dict[str, object]) -> None:
    """Make the output folder of a new run, or find that it holds this very run.

    Raises:
        ValueError: If it holds another one.
    """
    folder = Path(settings.output_dir)
    if settings.overwrite_output_dir:
        for name in (SETTINGS, RESULTS):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / DECOMPOSED, ignore_errors=True)
        remove_checkpoints(folder)
    if (folder / SETTINGS).is_file():
        check_identity(folder, facts)
        return
    if found := checkpoints(folder):
        raise ValueError(
            f"--output_dir {folder} holds {found[-1].name} of something else. Name another folder, or delete what is "
            "there with --overwrite_output_dir."
        )
    prepare_folder(folder, overwrite=False)
    write_whole(facts, folder / SETTINGS)


def heal(trainer: HealingTrainer, checkpoint: Path | None, settings: Settings) -> bool:
    """Train to the end.

    Returns:
        True when complete; False when it was interrupted, with a checkpoint of the last finished step on disk.
    """
    set_seed(settings.seed)
    with Interrupt() as interrupt:
        trainer.add_callback(StopWhenAsked(interrupt))
        trainer.args.eval_on_start = checkpoint is None
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except StoppedError:
            return False
    return True


def how_to_load(dense: PreTrainedModel, folder: Path) -> str:
    """The lines that load the checkpoint."""
    name = type(dense).__name__
    lines = ("import hf_comera", f"from transformers import {name}", f'model = {name}.from_pretrained("{folder}")')
    return "\n  ".join(("Load it with:", *lines))


def main_or_stop() -> int:
    """:func:`main`; Ctrl-C outside the healing loses no more than the calibration, and is no error."""
    try:
        return main()
    except KeyboardInterrupt:
        Console(soft_wrap=True).print(f"\nInterrupted. Go on with:\n  {command_line(sys.argv[1:])}")
        return 130


if __name__ == "__main__":
    sys.exit(run_script(main_or_stop))
