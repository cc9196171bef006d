"""Small models of transformers of many families, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel

#: Sizes, and all the names that configs have for them.
NAMES: dict[Any, str] = {
    1: "n_group topk_group first_k_dense_replace mamba_n_groups n_groups",
    2: """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers max_window_layers
        num_key_value_heads num_experts_per_tok expand num_feedforward_networks""",
    4: """num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads mamba_n_heads num_experts
        num_local_experts n_routed_experts mamba_dt_rank time_step_rank""",
    8: "state_size mamba_d_state num_buckets qk_rope_head_dim qk_nope_head_dim attention_window patch_size",
    16: "head_dim d_kv v_head_dim max_bucket_distance num_mel_bins num_conv_pos_embeddings",
    32: "q_lora_rank kv_lora_rank image_size mamba_d_head",
    64: """hidden_size d_model n_embd dim embedding_size attention_hidden_size lru_width max_position_embeddings n_positions
        max_source_positions max_target_positions n_ctx moe_intermediate_size intra_bottleneck_size true_hidden_size""",
    128: "intermediate_size hidden_dim encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff vocab_size",
    (32, 32): "conv_dim",
    (5, 2): "conv_stride",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()} | {"num_conv_pos_embedding_groups": 2}
_AUDIO = {"conv_kernel": (10, 3)}
#: What a family needs beside. Hybrid models have one layer of attention, which their caches ask for.
BESIDE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"head_dim": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "esm": {"pad_token_id": 0},
    "whisper": {"pad_token_id": 0},
    "wav2vec2": _AUDIO,
    "wavlm": _AUDIO,
    "hubert": _AUDIO,
    "convnext": {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2},
}
DECODERS = ("llama", "gpt2", "gpt_neox", "opt", "bloom", "phi", "gemma3_text", "mpt", "xglm")
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "olmoe")
RECURRENT = ("jamba", "bamba", "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma")
ENCODERS = ("bert", "roberta", "deberta-v2", "electra", "albert", "mobilebert", "longformer", "esm")
PAIRS = ("t5", "bart", "whisper")
AUDIO = ("wav2vec2", "wavlm", "hubert")
IMAGES = ("vit", "beit", "dinov2", "convnext")
_KINDS = (DECODERS, EXPERTS, RECURRENT, ENCODERS, PAIRS, AUDIO, IMAGES)
FAMILIES = tuple(family for kind in _KINDS for family in kind)
#: One of each kind.
FIRST = {kind[0] for kind in _KINDS}


def made(family: str) -> Any:
    """A model of the family in evaluation mode."""
    known = AutoConfig.for_model(family)
    fields = {name: size for name, size in SIZES.items() if hasattr(known, name)}
    torch.manual_seed(0)
    return AutoModel.from_config(type(known)(**fields | BESIDE.get(family, {}))).eval()


def inputs(family: str) -> dict[str, torch.Tensor]:
    """What its `forward` takes."""
    ids = torch.arange(3, 19)[None]
    if family in IMAGES:
        return {"pixel_values": torch.randn(1, 3, 32, 32)}
    if family in AUDIO:
        return {"input_values": torch.randn(1, 2000)}
    if family == "whisper":
        return {"input_features": torch.randn(1, 16, 128), "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if family in ("t5", "bart") else {})
