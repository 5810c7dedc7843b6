"""hf_comera/hub/cards.py: a plain Trainer's card says how to load a compressed model."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, BertConfig, Trainer, TrainingArguments

from hf_comera import ComeraConfig, ComeraTrainer, get_comera_model, write_model_card
from hf_comera.hub.cards import extend_trainer_cards
from hf_comera.hub.model import TAGS

CONFIG = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=120)


def finished_run(trainer_class, model, folder):
    """The folder of a trainer as the example scripts of Transformers leave it."""
    args = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, max_steps=1, save_strategy="no")
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    trainer = trainer_class(model=model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(tags=["mine"], language="en")
    return trainer


@pytest.mark.parametrize("trainer_class", [Trainer, ComeraTrainer])
def test_the_card_says_how_to_load_and_what_is_compressed(trainer_class, tmp_path):
    model = get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=CONFIG)
    trainer = finished_run(trainer_class, model, tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "## Training procedure" in card.text, "the trainer's own text"
    assert "import hf_comera" in card.text
    assert f"carry the id `{model.config.quantization_config.save_id}`" in card.text
    assert {"mine", "generated_from_trainer", *TAGS} <= set(card.data.tags)
    assert card.data.language == ["en"]

    trainer.create_model_card()
    text = write_model_card(model, tmp_path, license="mit").read_text()
    assert len(re.findall("<!-- hf_comera:begin", text)) == 1
    assert "## Training procedure" in text


def test_the_card_of_a_dense_model_is_the_trainers_own(tmp_path):
    finished_run(Trainer, AutoModelForMaskedLM.from_config(CONFIG), tmp_path)
    assert "comera" not in (tmp_path / "README.md").read_text()


def test_a_second_call_changes_nothing(tmp_path):
    extend_trainer_cards()
    model = get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=CONFIG)
    finished_run(Trainer, model, tmp_path)
    assert (tmp_path / "README.md").read_text().count("<!-- hf_comera:begin") == 1
