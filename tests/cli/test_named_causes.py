"""Ordinary mistakes with files: the cause is named, and the fix is for that."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.config.paths import TINY_LLAMA

ROW = b'{"prompt": "Where?", "completion": "In the harbour."}\n'


def model(**config: object) -> Path:
    folder = Path(shutil.copytree(TINY_LLAMA, "m"))
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | config)
    )
    return folder


def changed(name: str, **values: object) -> None:
    file = Path("m") / name
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k not in values}
    file.write_text(json.dumps(kept | {k: v for k, v in values.items() if v is not None}))


def cut_off() -> str:
    whole = gzip.compress(b"prompt,completion\n" + os.urandom(3000).hex().encode())
    Path("r.csv.gz").write_bytes(whole[:-400])
    return "data.path=r.csv.gz"


def blank_line() -> str:
    Path("r.csv").write_bytes(b"\nprompt,completion\na,b\n")
    return "data.path=r.csv"


def binary(content: bytes) -> str:
    Path("r.csv").write_bytes(content)
    return "data.path=r.csv"


def pipe() -> str:
    os.mkfifo("rows.jsonl")
    return "data.path=rows.jsonl"


def state_dict() -> str:
    torch.save({"w": torch.zeros(2)}, "latest.pt")
    return "model.name=latest.pt"


def other_shape() -> str:
    model(intermediate_size=96)
    return "model.name=m"


def not_a_number() -> str:
    weights = load_file(model() / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, "m/model.safetensors", metadata={"format": "pt"})
    return "model.name=m"


def no_padding() -> str:
    model()
    changed("tokenizer_config.json", pad_token=None, eos_token=None)
    return "model.name=m"


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (cut_off, "r.csv.gz is cut off or damaged", "gzip -t"),
        (blank_line, "the first line of r.csv is blank", "remove the lines before"),
        (lambda: binary(b"\0" * 900), "r.csv is no text", "another kind"),
        (lambda: binary(bytes(range(256)) * 9), "r.csv is no text", "another kind"),
        (pipe, "'rows.jsonl' is no regular file", "cat rows.jsonl > saved.jsonl"),
        (lambda: "data.path=/dev/null", "'/dev/null' is no regular file", "cat /dev/null"),
        (state_dict, "'latest.pt' is a file, and a model is a folder", "import latest.pt --as"),
        (other_shape, "has another shape than config.json says", ", 96] by config.json"),
        (not_a_number, "a weight of the model is not finite", "model.layers.1.mlp.up_proj.weight"),
        (no_padding, "the tokenizer has no padding token", "model.pad_token="),
    ],
)  # fmt: skip
def test_the_cause_is_named(make, what, fix, cli) -> None:
    """What else it names stands in any part of the error."""
    setting = make()
    found = cli("tiny_full_bf16", setting, "train.max_steps=2", "eval.samples=false")
    said = " ".join(found.err.split())
    assert found.code == 2
    assert what in said
    assert fix in said


def test_a_padding_token_that_the_error_names_is_taken(cli) -> None:
    found = cli("data", "tiny_full_bf16", no_padding())
    fix = found.err.partition("fix:")[2].split(",")[0].strip()
    assert cli("data", "tiny_full_bf16", "model.name=m", fix.replace("'", "")).code == 0


def test_a_recipe_in_utf_16(cli) -> None:
    for encoding in ("utf-16", "utf-16-le"):
        Path("r.yaml").write_text("model:\n  name: builtin:tiny_llama\n", encoding=encoding)
        found = cli("cat", "r.yaml")
        assert found.code == 2
        assert "most likely UTF-16" in found.err
        assert "iconv -f UTF-16" in found.err


def test_a_run_that_died_before_its_first_checkpoint_is_started_again(cli, tmp_path) -> None:
    run = tmp_path / "runs" / "tiny_full_bf16" / "20260101-000000-aaaa-bf16"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(cli("cat", "tiny_full_bf16", "--resolved").out)
    (run / "run.json").write_text("{}")
    found = cli("resume", run)
    assert found.code == 2
    said = " ".join(found.err.split())
    assert "there is no checkpoint in" in said
    assert "or start again with train.save_strategy=steps" in said
