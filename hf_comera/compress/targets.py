"""Default layer names per architecture: data only.

A row lists last parts of module names: attention and FFN projections and the word embedding. Rows may name layers of
several Transformers releases; names that a model does not have are ignored here (in a user's own list they raise).
"""

__all__ = ["ALL_LINEAR", "ALL_LINEAR_EXCLUDED", "DEFAULT_TARGETS"]

ALL_LINEAR = "all-linear"
"""The shorthand for every linear layer except output heads, as in PEFT."""

_BERT = ("query", "key", "value", "intermediate.dense", "output.dense", "word_embeddings")
_DEBERTA_V2 = ("query_proj", "key_proj", "value_proj", "intermediate.dense", "output.dense", "word_embeddings")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
_T5 = ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo", "shared")
_BART = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_VIT = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", *_BERT[:5])
_NEOX = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in")

DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "mpnet": ("q", "k", "v", "o", "intermediate.dense", "output.dense", "word_embeddings"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2", "word_embeddings"),
    "deberta-v2": _DEBERTA_V2,
    "modernbert": ("Wqkv", "Wo", "Wi", "tok_embeddings"),
    "gpt2": ("c_attn", "c_proj", "c_fc", "wte"),
    "gpt_neox": _NEOX,
    "opt": (*_BART, "embed_tokens"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens"),
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "whisper": (*_BART, "embed_tokens"),
    "vit": _VIT,
    "deit": _VIT,
    "clip": (*_BART, "token_embedding"),
}

ALL_LINEAR_EXCLUDED = (
    # heads: small, and the last thing that should lose precision
    "classifier",
    "score",
    "qa_outputs",
    "lm_head",
    "lm_head.dense",
    "predictions.transform.dense",
    "vocab_transform",
    "pooler.dense",
    # routers: a handful of columns
    "router",
    "gate",
    # Gemma 3n clamps these few coefficients in place at each step of training
    "prediction_coefs",
    # state-space mixers hand these weights to fused kernels, which need real memory
    "x_proj",
    "dt_proj",
    "mixer.out_proj",
)
"""Last parts of names that ``"all-linear"`` leaves dense."""
