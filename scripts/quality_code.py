"""Task "code" of the quality benchmark: masked language modelling with the demo's RoBERTa on Python functions."""

import platform
from pathlib import Path

from transformers import RobertaConfig, RobertaForMaskedLM

from code_corpus import load_corpus
from code_sequences import encode_corpus, sequence_lengths
from code_tokenizer import train_tokenizer
from masked_language import IGNORED, Masking, TrainingBatches, held_out_batches, masked_loss
from model_setup import DEMO_LENGTH, DEMO_VOCABULARY, SMALL_ROBERTA, fit_to_tokenizer
from pretrain_settings import DataSettings
from quality_task import Task

BATCH_SIZE, HELD_OUT_BATCH_SIZE = 16, 32
HELD_OUT_FUNCTIONS = 512
HELD_OUT_SEED = 0  # the same hidden tokens for every seed of the training


def code_task(code_file: str | None) -> Task:
    """The task, on a file with the columns code and docstring, or on the standard library's functions.

    Raises:
        ValueError: If the file has no rows or no column that is understood.
    """
    settings = DataSettings(train_file=code_file, max_eval_samples=HELD_OUT_FUNCTIONS)
    text = load_corpus(settings)
    tokenizer = train_tokenizer(text["train"], DEMO_VOCABULARY)
    encoded = encode_corpus(text, tokenizer, DEMO_LENGTH)
    lengths = {name: sequence_lengths(rows) for name, rows in encoded.items()}

    def masking(seed: int) -> Masking:
        return Masking.for_tokenizer(tokenizer, settings.mlm_probability, seed)

    def batches(seed: int) -> TrainingBatches:
        return TrainingBatches(encoded["train"], lengths["train"], masking(seed), batch_size=BATCH_SIZE)

    def build_config(width: int) -> RobertaConfig:
        shape = SMALL_ROBERTA | {"hidden_size": width, "intermediate_size": 4 * width}
        config = RobertaConfig(max_position_embeddings=DEMO_LENGTH + 2, **shape)
        fit_to_tokenizer(config, tokenizer, pretrained=False)
        return config

    return Task(
        name="code",
        data=Path(code_file).name if code_file else f"functions of Python {platform.python_version()}",
        steps_per_epoch=batches(0).batches_per_epoch,
        model_class=RobertaForMaskedLM,
        build_config=build_config,
        target_modules=None,
        batches=batches,
        held_out=held_out_batches(
            encoded["validation"], lengths["validation"], masking(HELD_OUT_SEED), HELD_OUT_BATCH_SIZE
        ),
        loss=masked_loss,
        num_targets=lambda batch: int((batch["labels"] != IGNORED).sum()),
    )
