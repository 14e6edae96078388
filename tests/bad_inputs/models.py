"""Model folders whose parts are well formed, and do not belong together."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.bad_inputs.case import Case, Content, Gone, Link, Pipe
from tests.bad_inputs.folders import WEIGHTS

CONFIG: list[dict[str, Any]] = [
    {"num_attention_heads": 3}, {"num_attention_heads": 5}, {"num_key_value_heads": 3},
    {"num_key_value_heads": 0}, {"num_key_value_heads": -1}, {"head_dim": -1}, {"head_dim": 0},
    {"head_dim": 3}, {"head_dim": "x"}, {"hidden_size": 100}, {"hidden_size": 2**40},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": -3}, {"vocab_size": 3},
    {"vocab_size": 10**12}, {"intermediate_size": -5}, {"hidden_act": "nothing"},
    {"hidden_act": 3}, {"max_position_embeddings": "x"}, {"rms_norm_eps": "x"},
    {"rope_parameters": {"rope_type": "nothing"}}, {"rope_parameters": 3},
    {"rope_scaling": {"type": "nothing", "factor": 2}}, {"rope_scaling": {"rope_type": "yarn"}},
    {"model_type": "bert"}, {"model_type": "nothing"},
    {"auto_map": 3}, {"quantization_config": {}}, {"quantization_config": {"quant_method": "x"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization_config": 3},
    {"quantization_config": {"quant_method": "fp8"}}, {"pad_token_id": 10**9},
    {"tie_word_embeddings": "x"}, {"attention_dropout": "x"}, {"layer_types": ["nothing"]},
    {"text_config": 3}, {"text_config": {}},
]  # fmt: skip
"""Changes of a configuration."""
TOKENIZER: list[dict[str, Content]] = [
    {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'},
    {"tokenizer.json": b'{"version": "1.0", "model": {"type": "Nothing"}}'},
    {"tokenizer.json": b'{"added_tokens": 3, "model": null}'},
    {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": ["x"]}}'},
    {"tokenizer.json": Gone()}, {"tokenizer.json": Pipe()}, {"tokenizer_config.json": Pipe()},
    {"tokenizer_config.json": b'{"tokenizer_class": "Nothing"}', "tokenizer.json": Gone()},
    {"tokenizer_config.json": b'{"tokenizer_class": 3}'},
    {"tokenizer_config.json": b'{"added_tokens_decoder": {"x": 3}}'},
    {"tokenizer_config.json": b'{"eos_token": 3}'}, {"special_tokens_map.json": b"[1"},
    {"tokenizer_config.json": b'{"model_max_length": "x"}'}, {"added_tokens.json": b'{"x": "y"}'},
    {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["gone.T", null]}}'},
]  # fmt: skip
TEMPLATES: list[bytes] = [
    b"{% for", b"{{ 1 / 0 }}", b"{{ raise_exception('no') }}", b"{{ gone.deep }}", b"\xff\xfe",
    b"{% for i in range(10 ** 12) %}{% endfor %}", b"{{ ''.__class__.__mro__[1] }}",
    b"{% include 'config.json' %}", b"{% set x = namespace() %}{{ x() }}", b"{% extends 'x' %}",
    b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    b"{% generation %}{{ messages }}", b"{{ messages[9].content }}", b"{{ messages | nothing }}",
]  # fmt: skip


@functools.cache
def _weights(model: Path) -> list[bytes]:
    """Safetensors that other programs wrote, of other tensors."""
    from safetensors.torch import load_file, save

    whole = load_file(model / WEIGHTS)
    matrix = next(name for name, x in whole.items() if x.dim() == 2 and "layers" in name)
    sound = save(whole)
    return [
        save({}), save({"other": whole[matrix]}), save(whole | {matrix: whole[matrix][:3]}),
        save(whole | {matrix: whole[matrix].flatten()}), save({**whole, matrix: whole[matrix][:0]}),
        save({name: x for name, x in whole.items() if name != matrix}),
        save({f"x.{name}": x for name, x in whole.items()}),
        save(whole | {matrix: whole[matrix].bool()}),
        sound[: len(sound) // 2], sound[:-1], sound + b"x" * 9, sound[:9], b"x" + sound,
    ]  # fmt: skip


MORE: list[dict[str, Content]] = [
    {WEIGHTS: Gone(), "pytorch_model.bin": b"cos\nsystem\n(S'true'\ntR."},
    {WEIGHTS: Gone(), "pytorch_model.bin": b""}, {WEIGHTS: Gone(), "model.gguf": b"GGUF"},
    {WEIGHTS: Link("/dev/zero")}, {"config.json": Link("/dev/zero")}, {"config.json": Pipe()},
    {WEIGHTS: Pipe()}, {"adapter_config.json": b"{}"}, {"adapter_config.json": b"{"},
    {"config.json": Gone()}, {"config.json": b'{"model_type": "llama", "model_type": 3}'},
]  # fmt: skip


@st.composite
def mismatched(draw: st.DrawFn, model: Path) -> Case:
    """A verb over a model folder of which a part does not fit the others."""
    kind = draw(st.sampled_from(["config", "config", "config", "tokenizer", "template", "weights",
                                 "more"]))  # fmt: skip
    verb = draw(st.sampled_from(["run", "run", "validate", "data"]))
    files: dict[str, Content]
    if kind == "config":
        config = json.loads((model / "config.json").read_text()) | draw(st.sampled_from(CONFIG))
        files = {"config.json": json.dumps(config).encode()}
    elif kind == "tokenizer":
        files = draw(st.sampled_from(TOKENIZER))
    elif kind == "template":
        files = {"chat_template.jinja": draw(st.sampled_from(TEMPLATES))}
    elif kind == "weights":
        files, verb = {WEIGHTS: draw(st.sampled_from(_weights(model)))}, "run"
    else:
        files = draw(st.sampled_from(MORE))
    return Case(
        "model folder: parts",
        (verb, draw(st.sampled_from(["tiny_full_bf16", "tiny_lora_fp8"])), "model.name=./m",
         "train.max_steps=1", "train.warmup_steps=0"),
        {f"m/{name}": content for name, content in files.items()},
        {"m": "model"},
        tolerant=kind != "template" and verb != "run",
    )  # fmt: skip
