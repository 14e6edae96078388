"""Tiny random models of many families: configurations of the published shapes, made small."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from finetune.config.paths import TINY_LLAMA

_TEXT: dict[str, Any] = {
    "vocab_size": 1536,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = _TEXT | {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
}
_MAMBA: dict[str, Any] = {
    "vocab_size": 1536,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "state_size": 16,
    "time_step_rank": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE: dict[str, Any] = {
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 6, 6]}
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _TEXT,
    "mistral": _TEXT,
    "qwen2": _TEXT,
    "qwen3": _TEXT,
    "gemma": _TEXT,
    "gemma2": _TEXT,
    # As published ones: llama.cpp scales attention so, whatever the configuration says; and the
    # choice of experts of Qwen 3.
    "gemma3_text": _TEXT | {"query_pre_attn_scalar": 32},
    "phi3": _TEXT,
    "olmo2": _TEXT,
    "granite": _TEXT,
    "glm4": _TEXT,
    "smollm3": _TEXT,
    "stablelm": _TEXT,
    "starcoder2": _TEXT,
    "cohere": _TEXT,
    "gpt2": {
        "vocab_size": 1536, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": _TEXT,
    "opt": {
        "vocab_size": 1536, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512, "word_embed_proj_dim": 128,
    },
    "falcon": {
        "vocab_size": 1536, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bias": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": _MAMBA | {"num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    "mixtral": _TEXT | {"num_local_experts": 4},
    "qwen2_moe": _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 256},
    "qwen3_moe": _EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "olmoe": _TEXT | {"intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _EXPERTS | {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 16,
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt_oss": _TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "llama4": {
        "text_config": _TEXT | {
            "intermediate_size_mlp": 256, "num_local_experts": 4, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 256,
        },
        "vision_config": _VISION | {
            "vision_output_dim": 128, "projector_input_dim": 128, "projector_output_dim": 128,
        },
    },
    "gemma3": {"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": 1},
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16},
    },
    "smolvlm": {
        "text_config": _TEXT | {"model_type": "llama"}, "vision_config": _VISION, "scale_factor": 2,
    },
    "llava_next": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
        "image_grid_pinpoints": [[28, 28], [28, 56]],
    },
    "qwen2_5_vl": {"text_config": _TEXT | _ROPE, "vision_config": _QWEN_VISION},
    "qwen3_vl": {"text_config": _TEXT | _ROPE, "vision_config": _QWEN_VISION},
}  # fmt: skip
"""Model type -> what its configuration has besides the defaults."""

_HEADS: dict[str, Any] = {"vocab_size": 1536, "n_layer": 2, "n_head": 4}
_SCANS: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS | {"num_experts": 4, "num_dense_layers": 1, "moe_intermediate_size": 64},
    "bamba": _TEXT | _SCANS | {"attn_layer_indices": [1]},
    "bloom": _HEADS | {"hidden_size": 128},
    "codegen": _HEADS | {"n_embd": 128, "rotary_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    "cwm": _TEXT | {
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "falcon_h1": _TEXT | _SCANS | {"mamba_d_ssm": 256},
    "gpt_neo": {
        "vocab_size": 1536, "hidden_size": 128, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2,
    },
    "gptj": _HEADS | {"n_embd": 128, "rotary_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    "jamba": _TEXT | {
        "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16,
        "mamba_dt_rank": 16,
    },
    "lfm2": _TEXT | {"layer_types": ["conv", "full_attention"]},
    "minimax": _TEXT | {"num_local_experts": 4, "block_size": 16},
    "mpt": {"vocab_size": 1536, "d_model": 128, "n_layers": 2, "n_heads": 4},
    "olmo": _TEXT,
    "phi": _TEXT,
    "qwen3_next": _EXPERTS | {
        "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    },
    "recurrent_gemma": _TEXT | {
        "num_hidden_layers": 3, "lru_width": 128, "attention_window_size": 64,
    },
    "rwkv": {"vocab_size": 1536, "hidden_size": 128, "num_hidden_layers": 2},
    "xlstm": {"vocab_size": 1536, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4},
}  # fmt: skip
"""Families of which only packed rows are looked at (`tests.benchmarks.isolation`)."""


def config_of(family: str) -> Any:
    """The configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **(FAMILIES | OTHERS)[family])


def folder_of(family: str, folder: Path) -> Path:
    """A folder with `config.json` and the packaged tokenizer, for `model.weights: random`."""
    home = folder / family
    config_of(family).save_pretrained(home)
    for file in TINY_LLAMA.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, home)
    return home
