"""Which layers work together, by names: those that read one input, feed an activation, or meet in core attention."""

from torch import nn

__all__ = [
    "ATTENTIONS",
    "CACHED",
    "FEED_FORWARD",
    "FUSED",
    "SIBLINGS",
    "attends_to_codes",
    "feeds_forward",
    "sibling_names",
]

SIBLINGS = (
    ("query", "key", "value"),  # BERT, RoBERTa, ViT
    ("q_proj", "k_proj", "v_proj"),  # Llama, OPT, BART, CLIP
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("q", "k", "v"),  # T5, MPNet
    ("gate_proj", "up_proj"),  # Llama
    ("wi_0", "wi_1"),  # T5 v1.1
    ("w1", "w3"),  # Mixtral's experts
)
"""Children of one module, in the order in which its ``forward`` calls them.

DeBERTa v2 is not here: it projects positions through query and key once more, each alone.
"""

FEED_FORWARD = (
    *("intermediate.dense", "lin1", "fc1", "c_fc", "dense_h_to_4h"),  # BERT, DistilBERT, OPT and BART, GPT-2, NeoX
    *("gate_proj", "up_proj", "w1", "w3", "wi", "wi_0", "wi_1"),  # Llama, Mixtral, T5
)
"""Last parts of the names of layers whose output goes through an activation, or gates one, to the next layer."""

ATTENTIONS = (
    *("BertSelfAttention", "RobertaSelfAttention", "XLMRobertaSelfAttention", "CamembertSelfAttention"),
    *("ElectraSelfAttention", "ErnieSelfAttention", "DistilBertSelfAttention", "LayoutLMSelfAttention"),
    *("ViTAttention", "DeiTAttention", "Dinov2Attention", "SiglipAttention", "CLIPAttention"),
    *("GPT2Attention", "OPTAttention"),
)
"""Classes that hand query, key and value to core attention as the layers give them, without rotary positions."""

CACHED = ("GPT2Attention", "OPTAttention")
"""Those of them whose keys and values wait in a cache for the tokens that follow."""

FUSED = {"GPT2Attention": "c_attn"}
"""Those of them whose query, key and value come side by side from one layer, and its name."""

_CROSS_ATTENTION = ("crossattention", "cross_attn", "encoder_attn", "EncDecAttention")


def sibling_names(module_name: str) -> list[tuple[str, ...]]:
    """Names of children of ``module_name`` that may be joined.

    In cross-attention the query reads the decoder, the others read the encoder.

    >>> sibling_names("decoder.layers.0.encoder_attn")[1]
    ('k_proj', 'v_proj')
    """
    crosses = any(part in _CROSS_ATTENTION for part in module_name.split("."))
    return [names[1:] if crosses and len(names) == 3 else names for names in SIBLINGS]


def feeds_forward(name: str) -> bool:
    """Whether the layer is the first of a feed-forward block.

    >>> feeds_forward("bert.encoder.layer.0.intermediate.dense")
    True
    """
    return name.endswith(tuple(f".{ending}" for ending in FEED_FORWARD))


def attends_to_codes(module: nn.Module) -> bool:
    """Whether what the projections of ``module`` give is used in core attention only, and as it is."""
    config, kind = getattr(module, "config", None), type(module)
    is_known = kind.__name__ in ATTENTIONS and kind.__module__.startswith("transformers.models.")
    crosses = getattr(config, "is_decoder", False) or getattr(module, "is_cross_attention", False)
    return is_known and hasattr(config, "num_attention_heads") and not crosses
