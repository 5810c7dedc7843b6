"""From settings to data that is ready to train on: text, tokenizer, batches, held-out sample."""

from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from codebert.corpus import load_corpus
from codebert.masking import HeldOut, Masking, TrainingBatches, count_tokens, held_out_batches
from codebert.model import DEMO_VOCABULARY
from codebert.settings import Settings
from codebert.tokens import encode_corpus, load_tokenizer, sequence_lengths, train_tokenizer
from loop.checkpoint import fingerprint


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run: as text, as tokens, and what follows from them."""

    text: DatasetDict
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    batches: TrainingBatches
    held_out: HeldOut
    unigram_loss: float
    fingerprint: str


def prepare_data(settings: Settings, max_seq_length: int) -> Data:
    """Gather text, train or load the tokenizer, and turn the text into batches."""
    state = PartialState()
    with state.main_process_first():  # the others find what it downloaded and converted in the cache
        text = load_corpus(settings.data)
    tokenizer = prepare_tokenizer(settings, text)
    with state.main_process_first():
        encoded = encode_corpus(
            text, tokenizer, max_seq_length, line_by_line=settings.data.line_by_line,
            num_workers=settings.data.preprocessing_num_workers,
        )  # fmt: skip
    masking = Masking.for_tokenizer(tokenizer, settings.data.mlm_probability, settings.training.seed)
    lengths = {name: sequence_lengths(rows) for name, rows in encoded.items()}
    process = state.process_index, state.num_processes
    batches = TrainingBatches(
        encoded["train"], lengths["train"], masking,
        batch_size=settings.training.per_device_train_batch_size, process=process,
    )  # fmt: skip
    held_out = HeldOut(
        held_out_batches(
            encoded["validation"], lengths["validation"], masking, settings.training.per_device_eval_batch_size
        )
    )
    token_counts = count_tokens(encoded["train"], len(tokenizer), masking.special_ids)
    first_batch = batches[0]["input_ids"].numpy() if state.num_processes == 1 else lengths["train"][:1]
    return Data(
        text=text, tokenizer=tokenizer, max_seq_length=max_seq_length, batches=batches, held_out=held_out,
        unigram_loss=held_out.unigram_loss(token_counts),
        fingerprint=fingerprint([token_counts, lengths["train"], lengths["validation"], first_batch]),
    )  # fmt: skip


def prepare_tokenizer(settings: Settings, text: DatasetDict) -> PreTrainedTokenizerBase:
    """Load the tokenizer by name, or train one: once, in the main process, for all processes and later resumptions."""
    model = settings.model
    name = model.tokenizer_name or (None if model.vocab_size else model.model_name_or_path or model.config_name)
    if name is not None:
        return load_tokenizer(name)
    folder = Path(settings.training.output_dir) / "tokenizer"
    if PartialState().is_main_process and not (settings.training.resume_from_checkpoint and folder.is_dir()):
        train_tokenizer(text["train"], model.vocab_size or DEMO_VOCABULARY).save_pretrained(folder)
    PartialState().wait_for_everyone()
    return load_tokenizer(folder)
