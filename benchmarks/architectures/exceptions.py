"""Data for ``configs.py``: settings that its rules on names do not find out, by model type."""

from typing import Any

__all__ = ["EXCEPTIONS", "INPUT_SIZES", "NEEDED", "NEEDED_INPUTS"]

_SHORT_SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1}
_SERIES_INPUTS = ("past_time_features", "past_observed_mask", "future_values", "future_time_features")
NEEDED: dict[str, dict[str, Any]] = {
    # without these the default config is refused, or no model is built from it; they are full-size settings
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "hunyuan_vl_text": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": _SHORT_SERIES,
    "informer": _SHORT_SERIES,
    "time_series_transformer": _SHORT_SERIES,
    "chameleon": {"vocabulary_map": {"<image>": 250}},
    "mamba2": {"num_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (4, 8), "attn_layers": ["local", "lsh"]},
    "lw_detr": {"backbone_config": {"image_size": 64}},
    "lw_detr_vit": {"image_size": 64},
    "glm5_next_text": {"index_topk": 16},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "seggpt": {"merge_index": 0},
    "bit": {"num_groups": 8},
    "swin": {"image_size": 128, "window_size": 4},
    "donut-swin": {"image_size": 128, "window_size": 4},
    "lilt": {"hidden_size": 96, "channel_shrink_ratio": 4},
    "mobilebert": {"intra_bottleneck_size": 64},
    "align": {"vision_config": {"hidden_dim": 2560}, "projection_dim": 640},
    "efficientnet": {"hidden_dim": 2560},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "input_size": 32},
    "blip-2": {"image_token_index": 250},
    "instructblip": {"image_token_index": 250},
    "instructblipvideo": {"video_token_index": 250},
    "longcat_flash": {"head_dim": 8},
    "paddleocr_vl": {"text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}},
    "audio-spectrogram-transformer": {"max_length": 64},
    "cvt": {"depth": [1, 2, 10]},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 192}},
    "levit": {"patch_size": 16},
    "clap": {"audio_config": {"patch_embeds_hidden_size": 8}},
    "muse_spark": {"audio_config": {"hidden_sizes": [16, 32, 64, 128]}},
    "muse_spark_audio": {"hidden_sizes": [16, 32, 64, 128]},
    "sam": {"vision_config": {"num_pos_feats": 32}},
    "sam_hq": {"vision_config": {"num_pos_feats": 32}},
    "sam2": {
        "vision_config": {
            "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
            "backbone_config": {"global_attention_blocks": [2, 4, 6]},
        },
        "prompt_encoder_config": {"patch_size": 16},
    },
    "sam2_vision_model": {"backbone_config": {"global_attention_blocks": [2, 4, 6]}},
    "sam2_hiera_det_model": {"global_attention_blocks": [2, 4, 6]},
    "blt": {"encoder_hash_byte_group_vocab": 256},
    "kosmos-2": {"latent_query_num": 4},
    "vibevoice": {"audio_config": {"num_filters": 2}, "semantic_model_config": {"num_filters": 2}},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 2},
        "semantic_tokenizer_encoder_config": {"num_filters": 2},
    },
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0, "chunk_size": 4, "mode": "train"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "mamba"] * 2,
    },
}
INPUT_SIZES: dict[str, dict[str, int]] = {
    "gemma3n_audio": {"num_mel_bins": 128},
    "gemma4_audio": {"num_mel_bins": 128},
}
"""Sizes of inputs under the names that ``inputs.py`` asks for."""
NEEDED_INPUTS: dict[str, tuple[str, ...]] = {
    "autoformer": _SERIES_INPUTS,
    "informer": _SERIES_INPUTS,
    "time_series_transformer": _SERIES_INPUTS,
    "audioflamingo3_encoder": ("input_features_mask",),
    "blip_2_qformer": ("encoder_hidden_states",),
    "decision_transformer": ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask"),
    "lxmert": ("visual_feats", "visual_pos"),
    "blt": ("use_cache",),
    "idefics": ("image_attention_mask",),
    "kosmos-2": ("image_embeds_position_mask",),
    "molmo2": ("mm_token_type_ids",),
    "rwkv": ("use_cache",),
    "minicpm_ocr_vision": ("target_sizes",),
    "minicpmv4_7_vision": ("target_sizes",),
}
"""Inputs that ``forward`` may be without by its signature, but not in fact."""
