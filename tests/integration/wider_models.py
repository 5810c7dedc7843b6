"""Tiny models beyond the table of default targets, one row for each family of code in Transformers, with inputs."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, BertConfig, EncoderDecoderConfig

WORDS = {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
IMAGE = {"image_size": 32, "patch_size": 8}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART = {"d_model": 48, **LAYERS, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 1}
PROPHETNET = {
    **{"hidden_size": 48, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 4},
    **{"num_decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
}
T5 = {"d_model": 48, "d_ff": 96, "d_kv": 12, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
DEEPSEEK = {
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1},
}
SPEECH = {
    **{"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 32},
}
TEXT_AND_IMAGE = {
    "text_config": {**SIZES, **WORDS, "max_position_embeddings": 16},
    "vision_config": {**SIZES, **IMAGE},
}
BLIP = {
    **TEXT_AND_IMAGE,
    "text_config": {**TEXT_AND_IMAGE["text_config"], "encoder_hidden_size": 48, "projection_dim": 16},
}


@dataclass(frozen=True)
class WiderModel:
    """One row: a class of Transformers, the settings of its config, and what it reads.

    ``dtype`` is float32 where some of Transformers' own code works in it, whatever the model's is.
    """

    class_name: str
    settings: dict[str, Any]
    reads: str = "text"
    dtype: torch.dtype = torch.float64

    @property
    def model_class(self):
        """The class itself."""
        return getattr(transformers, self.class_name)

    def config(self):
        """A new config, since models change theirs."""
        model_type = self.model_class.config_class.model_type
        if model_type == "encoder-decoder":
            return EncoderDecoderConfig.from_encoder_decoder_configs(*(BertConfig(**SIZES, **WORDS) for _ in range(2)))
        return AutoConfig.for_model(model_type, **self.settings)

    def new_dense(self):
        """A dense model with random weights."""
        return self.model_class(self.config()).to(self.dtype).eval()

    def inputs(self):
        """The same batch of two at each call."""
        draws = torch.Generator().manual_seed(0)
        ids = torch.randint(5, 120, (2, 8), generator=draws)
        picture = torch.randn(2, 3, 32, 32, generator=draws, dtype=self.dtype)
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        return {
            "text": {"input_ids": ids, "attention_mask": mask},
            "ids": {"input_ids": ids},
            "two texts": {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
            "picture": {"pixel_values": picture},
            "text and picture": {"input_ids": ids, "pixel_values": picture},
            "sound": {"input_values": torch.randn(2, 400, generator=draws, dtype=self.dtype)},
        }[self.reads]


def row(class_name, reads="text", dtype=torch.float64, **settings):
    """A row whose settings are written as arguments."""
    return WiderModel(class_name, settings, reads, dtype)


MODELS = {
    "albert": row("AlbertForMaskedLM", **SIZES, **WORDS, embedding_size=32),
    "bert as decoder": row("BertLMHeadModel", **SIZES, **WORDS, is_decoder=True),
    "big_bird": row("BigBirdForMaskedLM", **SIZES, **WORDS, attention_type="original_full"),
    "beit": row("BeitForImageClassification", "picture", **SIZES, **IMAGE),
    "blip": row("BlipForConditionalGeneration", "text and picture", **BLIP),
    "bloom": row("BloomForCausalLM", hidden_size=48, n_layer=2, n_head=4, **WORDS),
    "codegen": row("CodeGenForCausalLM", **GPT, **WORDS, rotary_dim=4),
    "cohere": row("CohereForCausalLM", **GROUPED, **WORDS),
    "deberta": row(
        "DebertaForMaskedLM",
        dtype=torch.float32,
        **SIZES,
        **WORDS,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "deepseek_v3": row("DeepseekV3ForCausalLM", dtype=torch.float32, **SIZES, **WORDS, **EXPERTS, **DEEPSEEK),
    "dinov2": row("Dinov2ForImageClassification", "picture", **SIZES, **IMAGE),
    "electra, narrow words": row("ElectraForPreTraining", **SIZES, **WORDS, embedding_size=32),
    "encoder-decoder": row("EncoderDecoderModel", "two texts"),
    "falcon": row("FalconForCausalLM", **SIZES, **WORDS),
    "falcon, grouped": row("FalconForCausalLM", **SIZES, **WORDS, num_kv_heads=2, new_decoder_architecture=True),
    "fnet": row("FNetForMaskedLM", "ids", hidden_size=48, num_hidden_layers=2, intermediate_size=96, **WORDS),
    "funnel": row("FunnelForMaskedLM", d_model=48, n_head=4, d_head=12, d_inner=96, block_sizes=[1, 1], **WORDS),
    "gemma": row("GemmaForCausalLM", dtype=torch.float32, **GROUPED, **WORDS, head_dim=12),
    "gemma2": row("Gemma2ForCausalLM", dtype=torch.float32, **GROUPED, **WORDS, head_dim=12, sliding_window=4),
    "gemma3": row("Gemma3ForCausalLM", dtype=torch.float32, **GROUPED, **WORDS, head_dim=12, sliding_window=4),
    "gpt_bigcode": row("GPTBigCodeForCausalLM", **GPT, **WORDS),
    "gpt_neo": row(
        "GPTNeoForCausalLM",
        **{"hidden_size": 48, "num_layers": 2, "num_heads": 4, "window_size": 4, **WORDS},
        attention_types=[[["global", "local"], 1]],
    ),
    "gpt_oss": row("GptOssForCausalLM", dtype=torch.float32, **GROUPED, **WORDS, head_dim=12, num_local_experts=4),
    "gptj": row("GPTJForCausalLM", **GPT, **WORDS, rotary_dim=4),
    "layoutlm": row("LayoutLMForMaskedLM", **SIZES, **WORDS),
    "led": row("LEDForConditionalGeneration", "two texts", **BART, **WORDS, attention_window=4),
    "longformer": row("LongformerForMaskedLM", "ids", **SIZES, **WORDS, attention_window=4),
    "mamba": row("MambaForCausalLM", hidden_size=48, num_hidden_layers=2, state_size=4, **WORDS),
    "marian": row("MarianMTModel", "two texts", **BART, **WORDS),
    "mbart": row("MBartForConditionalGeneration", "two texts", **BART, **WORDS),
    "mixtral": row("MixtralForCausalLM", dtype=torch.float32, **GROUPED, **WORDS, num_local_experts=4),
    "olmo2": row("Olmo2ForCausalLM", **GROUPED, **WORDS),
    "pegasus": row("PegasusForConditionalGeneration", "two texts", **BART, **WORDS),
    "phi": row("PhiForCausalLM", **SIZES, **WORDS),
    "prophetnet": row("ProphetNetForConditionalGeneration", "two texts", **PROPHETNET, **WORDS),
    "qwen2_moe": row(
        "Qwen2MoeForCausalLM",
        dtype=torch.float32,
        **GROUPED,
        **WORDS,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "roberta of XLM, tokens": row("XLMRobertaForTokenClassification", **SIZES, **WORDS),
    "roformer": row("RoFormerForMaskedLM", **SIZES, **WORDS, embedding_size=48),
    "segformer": row(
        "SegformerForImageClassification",
        "picture",
        **{"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
    ),
    "siglip": row("SiglipModel", "text and picture", **TEXT_AND_IMAGE),
    "squeezebert": row("SqueezeBertForMaskedLM", **SIZES, **WORDS, embedding_size=48),
    "stablelm": row("StableLmForCausalLM", **GROUPED, **WORDS, partial_rotary_factor=0.5),
    "swin": row(
        "SwinForImageClassification",
        "picture",
        **{
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
        },
    ),
    "t5, gated": row("T5ForConditionalGeneration", "two texts", **T5, **WORDS, feed_forward_proj="gated-gelu"),
    "wav2vec2": row("Wav2Vec2ForCTC", "sound", **SIZES, **SPEECH),
    "xglm": row(
        "XGLMForCausalLM", dtype=torch.float32, d_model=48, ffn_dim=96, num_layers=2, attention_heads=4, **WORDS
    ),
    "xlnet": row("XLNetLMHeadModel", "ids", torch.float32, d_model=48, n_layer=2, n_head=4, d_inner=96, **WORDS),
}
