"""Names that leave this machine: no path of its disk, and nothing cut from what is no path."""

from __future__ import annotations

import pytest

from finetune.config.paths import ASSETS
from finetune.runs.card import (
    device_name,
    long_name,
    method_name,
    recipe_name,
    short_name,
    without_paths,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data.path: /home/me/data/rows.jsonl", "data.path: …/rows.jsonl"),
        ("--out=/home/me/runs last", "--out=…/runs last"),
        ("'/home/me/a.yaml', ~/b.yaml", "'…/a.yaml', …/b.yaml"),
        (r"at C:\Users\me\rows.csv:3", "at …/rows.csv:3"),
        ("runs/tiny/20261122 at https://a.example/b/c", None),
        ("1,175 tokens/s, 8/9 or a / b", None),
        ("meta-llama/Llama-3.2-1B", None),
    ],
)
def test_absolute_paths_keep_their_last_part_and_the_rest_stays(text, shown):
    assert without_paths(text) == (text if shown is None else shown)


def test_names_of_models():
    packaged = str(ASSETS / "tiny_llama")
    assert recipe_name(packaged) == "builtin:tiny_llama"
    assert recipe_name("/home/me/model") == "/home/me/model"
    for name in (packaged, "builtin:tiny_llama"):
        assert short_name(name) == "tiny_llama"
        assert long_name(name) == "tiny_llama (packaged with fp8-finetune)"
    assert short_name("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    assert short_name("/home/me/llama") == long_name("/home/me/llama") == "llama"
    assert short_name("/home/me/runs/tiny/2026-1/model") == "tiny/2026-1/model"


def test_methods_and_devices():
    assert method_name(None) == "full fine-tuning"
    assert (method_name(8), method_name(8, "nf4")) == ("LoRA rank 8", "QLoRA rank 8")
    assert device_name({"kind": "cpu", "name": "x86_64"}) == "CPU (x86_64)"
    assert device_name({"kind": "cuda", "name": "NVIDIA H200"}) == "NVIDIA H200"
    assert device_name({}) == ""
