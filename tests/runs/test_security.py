"""No connection without a reason, no secret in a file, no foreign code without permission."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import load_recipe
from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import ModelConfig
from finetune.config.secrets import redacted
from finetune.errors import ConfigError, ModelNotFoundError
from finetune.storage.pretrained import load_tokenizer
from tests.forked import ended, start
from tests.run_folders import sign

GUARD = """
import runpy, socket, sys
def refuse(*args, **kwargs):
    print("CONNECTION", args[:2], file=sys.stderr)
    raise OSError("no network in this test")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
sys.argv = ["finetune", *sys.argv[1:]]
runpy.run_module("finetune", run_name="__main__")
"""


SECRET_VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "NEPTUNE_API_TOKEN",
    "MLFLOW_TRACKING_PASSWORD", "CLEARML_API_SECRET_KEY", "AWS_SECRET_ACCESS_KEY",
    "OPENAI_API_KEY", "SSH_PASSWORD",
)  # fmt: skip


@pytest.mark.slow
def test_a_local_recipe_makes_no_connection_and_keeps_no_secret(tmp_path) -> None:
    (tmp_path / "guard.py").write_text(GUARD)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRL_"))}
    environment |= dict.fromkeys(SECRET_VARIABLES, "s3cret-pl4nted")
    environment |= dict.fromkeys(("HTTPS_PROXY", "HF_ENDPOINT"), "http://me:s3cret-pl4nted@[::1]:9")
    done = subprocess.run(
        [sys.executable, tmp_path / "guard.py", "tiny_lora_fp8", "train.max_steps=2",
         "train.save_strategy=steps", "train.save_steps=1", "data.max_rows=24",
         "train.per_device_train_batch_size=2", "eval.max_new_tokens=8"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONNECTION" not in done.stderr
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        assert b"s3cret-pl4nted" not in file.read_bytes(), file


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.long
def test_no_code_in_a_checkpoint_is_run(tmp_path) -> None:
    """The manifest is the attacker's too; `training_args.bin` is not read."""
    words = ("tiny_full_fp8", "train.max_steps=3", "train.save_steps=1", "eval.samples=false",
             "train.eval_strategy=no", "train.save_strategy=steps", "data.max_rows=24")  # fmt: skip
    assert ended([start(tmp_path, *words)]) == [0]
    (saved,) = tmp_path.glob("runs/*/*/checkpoints/checkpoint-1")
    torch.save(Attack(tmp_path / "ran"), saved / "training_args.bin")
    names = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    for name in names:
        whole = (saved / name).read_bytes()
        torch.save(Attack(tmp_path / "ran"), saved / name)
        sign(saved)
        log = f"{name}.txt"
        assert ended([start(tmp_path, "resume", "last", "--checkpoint", "1", log=log)]) == [2]
        assert f"{name} holds more than tensors and numbers" in (tmp_path / log).read_text()
        (saved / name).write_bytes(whole)
    sign(saved)
    assert ended([start(tmp_path, "resume", "last", "--checkpoint", "1")]) == [0]
    assert not (tmp_path / "ran").exists()
    assert len(list(tmp_path.glob("runs/*/*"))) == 2, "those that were refused left no folder"


def test_secrets_are_no_settings() -> None:
    with pytest.raises(ConfigError, match=r"holds a secret[\s\S]*HF_TOKEN") as caught:
        load_recipe("tiny_lora_fp8", ["train.hub_token=hf_mine"])
    assert "hf_mine" not in str(caught.value)


PLANTED = "hf_" + "s3cretpl4nted" * 2


@pytest.mark.parametrize(
    "line",
    [
        f"train.run_name={PLANTED}",
        f"train.model_init_kwargs={{token: {PLANTED}}}",
        "train.accelerator_config={password: s3cretpl4nted}",
        "train.optim_args=api_key=sk-s3cretpl4nteds3cretpl4nted",
        f"train.report_to=[{PLANTED}]",
        "data.path=https://me:s3cretpl4nted@example.org/rows.jsonl",
        "data.path={https://me:s3cretpl4nted@example.org/rows.jsonl: 1}",
        "data.name=https://:s3cretpl4nted@example.org/rows",
        "model.name=https://me:s3cretpl4nted@example.org/model",
        f"data.prompts=[{PLANTED}]",
    ],
)
def test_secrets_in_other_places_are_refused_and_not_shown(line, tmp_path) -> None:
    with pytest.raises(ConfigError, match="holds a secret") as caught:
        load_recipe("tiny_lora_fp8", [line])
    assert "s3cretpl4nted" not in str(caught.value)
    recipe = tmp_path / "r.yaml"
    key, _, value = line.partition("=")
    section, _, name = key.partition(".")
    recipe.write_text(f"{section}:\n  {name}: {value}\n")
    with pytest.raises(ConfigError, match="holds a secret") as caught:
        load_recipe(str(recipe))
    assert "s3cretpl4nted" not in str(caught.value)


def test_a_kept_command_line_has_no_secret() -> None:
    words = ["x.py", "--hub-token", PLANTED, f"--api_key={PLANTED}", "train.eos_token=<|end|>",
             "--out", "https://me:s3cretpl4nted@example.org", "train.seed=1", PLANTED]  # fmt: skip
    kept = ["x.py", "--hub-token", "***", "--api_key=***", "train.eos_token=<|end|>", "--out",
            "***", "train.seed=1", "***"]  # fmt: skip
    assert redacted(words) == kept


@pytest.mark.parametrize(
    "verb", [("generate", "{run}", "hi"), ("export", "{run}", "out", "--to", "merged")]
)
def test_code_of_a_runs_model_needs_permission(verb, cli, tmp_path) -> None:
    run = tmp_path / "runs" / "tiny" / "20260101-000000-aaaa"
    (run / "model").mkdir(parents=True)
    config = load_recipe("tiny_lora_fp8", ["model.trust_remote_code=true"])
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "receipt.json").write_text('{"status": "proven", "precision": {}}')
    found = cli(*(word.format(run=Path("runs") / "tiny" / run.name) for word in verb))
    assert found.code == 2
    assert "brings code of its own" in found.err
    assert "--trust-remote-code" in found.err


@pytest.mark.parametrize("verb", ["data", "run"])
def test_code_of_a_model_cannot_end_a_verb_with_exit_0(verb, tmp_path, monkeypatch, cli) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "leaving"
    folder.mkdir()
    (folder / "own.py").write_text("import sys\nsys.exit(0)\n")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(own))
    asked = (f"model.name={folder}", "model.trust_remote_code=true")
    refused = cli(verb, "tiny_lora_bf16", *asked)
    assert refused.code == 2
    assert "ended the process by sys.exit(0)" in refused.err
    assert "own.py:2" in refused.err


def test_code_of_a_tokenizer_runs_where_the_recipe_permits_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # Transformers would ask
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    code = "from transformers import PreTrainedTokenizerFast\n\n\n"
    code += "class Own(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "own_tokenizer.py").write_text(code)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": [None, "own_tokenizer.Own"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = ModelConfig(name=str(folder), trust_remote_code=True)
    assert type(load_tokenizer(asked)[0]).__name__ == "Own"
    with pytest.raises(ModelNotFoundError, match="could not be loaded"):
        load_tokenizer(asked.model_copy(update={"trust_remote_code": False}))


@pytest.mark.parametrize("line", [f"train.run_name=[{PLANTED}", f"{PLANTED}=1"])
def test_an_error_does_not_show_a_secret(line, cli) -> None:
    found = cli("cat", "tiny_lora_fp8", line)
    assert (found.code, PLANTED in found.err, "***" in found.err) == (2, False, True)
