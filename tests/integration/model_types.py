"""For every row of the table of default targets a tiny compressed model, of one block, and a batch to train it on."""

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    CLIPModel,
)

from hf_comera import ComeraConfig, get_comera_model
from tests.architectures import ARCHITECTURES

FEATURES = ("pixel_values", "input_features")
VOCABULARY = 97
WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 1}
PICTURE = {"image_size": 16, "patch_size": 8}
T5 = {"d_model": 48, "d_ff": 96, "d_kv": 12, "num_heads": 4, "num_layers": 1, "decoder_start_token_id": 0}
BART = {
    **{"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 9, "max_target_positions": 16}
CLIP = {"text_config": {**SIZES, **WORDS}, "vision_config": {**SIZES, **PICTURE}, "projection_dim": 24}

IN_ARCHITECTURES = {
    **{"bert": "bert-mlm", "llama": "llama-tied"},
    **{name: name for name in ("roberta", "distilbert", "gpt2", "mistral", "qwen2", "vit")},
}
ROWS = {  # (class, settings of the config)
    **{name: (AutoModelForMaskedLM, {**SIZES, **WORDS}) for name in ("xlm-roberta", "camembert", "electra", "mpnet")},
    "deberta-v2": (AutoModelForMaskedLM, {**SIZES, **WORDS}),
    "modernbert": (AutoModelForMaskedLM, {**SIZES, **WORDS, "cls_token_id": 1, "sep_token_id": 2}),
    "gpt_neox": (AutoModelForCausalLM, {**SIZES, **WORDS}),
    "opt": (AutoModelForCausalLM, {**SIZES, **WORDS, "ffn_dim": 96, "word_embed_proj_dim": 48}),
    "qwen3": (AutoModelForCausalLM, {**SIZES, **WORDS, "num_key_value_heads": 2, "head_dim": 12}),
    "phi3": (AutoModelForCausalLM, {**SIZES, **WORDS, "num_key_value_heads": 2}),
    "t5": (AutoModelForSeq2SeqLM, {**T5, **WORDS}),
    "mt5": (AutoModelForSeq2SeqLM, {**T5, **WORDS}),
    "bart": (AutoModelForSeq2SeqLM, {**BART, **WORDS}),
    "whisper": (AutoModelForSpeechSeq2Seq, {**BART, **WORDS, **SPEECH}),
    "deit": (AutoModel, {**SIZES, **PICTURE}),
    "clip": (CLIPModel, CLIP),
}


def model_and_batch(model_type):
    """The model and its arguments, in float64."""
    if model_type in IN_ARCHITECTURES:
        architecture = ARCHITECTURES[IN_ARCHITECTURES[model_type]]
        model_class, config, batch = architecture.auto_class, architecture.new_config(), architecture.training_inputs()
        config.num_hidden_layers = 1
        config.problem_type = "single_label_classification"  # else a dense ViT too writes it at the first call
    else:
        model_class, settings = ROWS[model_type]
        config, batch = AutoConfig.for_model(model_type, **settings), batch_for(model_type)
    if model_type == "gpt2":
        del batch["labels"]  # its config names no loss, so that torch.compile refuses a dense one with labels too
    batch = {name: value.double() if name in FEATURES else value for name, value in batch.items()}
    if model_type == "clip":  # leaves a parameter without a start, so it cannot be built compressed
        return get_comera_model(model_class(config).double(), ComeraConfig(rank=4)), batch
    return get_comera_model(model_class, ComeraConfig(rank=4), config=config).double(), batch


def batch_for(model_type):
    """Two rows for a model of ``ROWS``."""
    ids, picture = torch.randint(3, VOCABULARY, (2, 7)), torch.randn(2, 3, 16, 16)
    if model_type == "deit":
        return {"pixel_values": picture}
    if model_type == "clip":
        return {"input_ids": ids, "pixel_values": picture, "return_loss": True}
    if model_type == "whisper":
        return {"input_features": torch.randn(2, 8, 18), "labels": ids}
    return {"input_ids": ids, "labels": ids}
