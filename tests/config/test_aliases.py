"""Names that people bring from other tools: each error says what to write, and that works."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import (
    load_recipe,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.cli.app import MODULES
from finetune.config import aliases
from finetune.config.methods import METHODS, arguments
from finetune.config.train_section import fields_of
from finetune.errors import (
    ConfigError,
    PlanError,
    PrecisionError,
    UnknownArgumentError,
    in_words,
)

FIRST_VALUES = {
    "fp8_format": "hybrid",
    "fp8_margin": 1,
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_recipe": "delayed",
    "mixed_precision": "fp8",
    "torch_dtype": "bfloat16",
    "attn_implementation": "sdpa",
    "model_name_or_path": "builtin:tiny_llama",
    "dataset_name": "builtin:harbour",
    "use_gradient_checkpointing": "true",
    "max_seq_length": 64,
    "max_seq_len": 64,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": "all-linear",
    "lr": 1e-4,
    **dict.fromkeys(("epochs", "num_epochs", "batch_size", "micro_batch_size"), 2),
    "seq_len": 64,
    "precision_map": '{"mlp": "bf16"}',
    "compute_dtype": "bfloat16",
    "model_name": "builtin:tiny_llama",
    "base_model": "builtin:tiny_llama",
    "dataset_config": "null",
    "dataset_train_split": "train",
    "dataset_test_split": "null",
    "lora_modules_to_save": "[lm_head]",
    **dict.fromkeys(("random_state", "max_steps_per_epoch", "num_warmup_steps", "lora_rank"), 3),
    **dict.fromkeys(("eval_batch_size", "preprocessing_num_workers", "max_samples"), 3),
    **dict.fromkeys(("sequence_len", "cutoff_len", "block_size"), 64),
    **dict.fromkeys(("max_train_tokens", "total_tokens", "token_budget"), "1B"),
    **dict.fromkeys(("max_iters", "warmup_iters", "log_freq", "log_interval"), 3),
    "grad_clip": 0.5,
    **dict.fromkeys(("warmup_ratio", "val_set_size", "val_size", "clip_grad_norm"), 0.1),
    "max_lr": 1e-4,
    "lora_attn_modules": "[q_proj]",
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "rl": "dpo",
    "stage": "kto",
}
SECTION_OF = {name: setting.partition(".")[0] for name, setting in aliases.SETTINGS.items()}


def test_the_examples() -> None:
    assert doctest.testmod(aliases).failed == 0


IN_WORDS = [name for name, setting in aliases.SETTINGS.items() if " " in setting]


@pytest.mark.parametrize("name", [name for name in aliases.SETTINGS if name not in IN_WORDS])
def test_what_the_error_says_to_write_is_accepted(name, tried) -> None:
    value = FIRST_VALUES.get(name, "true")
    recipe = "tiny_lora_bf16" if name.startswith("load_in_") else "tiny_full_fp8"
    recipe = "tiny_lora_fp8" if name.startswith("lora") or name == "load_in_fp8" else recipe
    recipe = "tiny_lora_fp8" if name.startswith("use_") and "lora" in SECTION_OF[name] else recipe
    recipe = "gpt2_124m_full_fp8" if "token" in name else recipe  # rows that are full
    for key in (name, f"{SECTION_OF[name]}.{name}"):
        with pytest.raises(ConfigError) as caught:
            load_recipe(recipe, [f"{key}={value}"])
        assert caught.value.fix.startswith("write ")
        load_recipe(recipe, shlex.split(caught.value.fix.removeprefix("write ")))
        tried(f"{key}={value}", caught.value, caught.value.fix.removeprefix("write "))


@pytest.mark.parametrize("name", IN_WORDS)
def test_what_is_said_in_words_names_settings_that_there_are(name) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny_full_fp8", [f"train.{name}=1"])
    said = caught.value.fix
    assert said == aliases.SETTINGS[name].replace("{}", "1")
    meant = set(re.findall(r"\w+", said.partition("train.method=")[2])) & {*METHODS} or {"sft"}
    for section, key in re.findall(r"\b(model|precision|lora|data|train)\.(\w+)", said):
        for method in meant:
            assert key in (arguments(METHODS[method]) if section == "train" else fields_of(section))
    assert all(verb in MODULES for verb in re.findall(r"-m finetune (\w+)", said))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tiny_full_fp8 train.group_by_length=true", "train_sampling_strategy=group_by_length"),
        ("tiny_full_fp8 train.group_by_length=false", "leave it out"),
        ("tiny_full_fp8 train_on_inputs=false", "leave it out"),
        ("tiny_full_fp8 train_on_inputs=true", "write train.assistant_only_loss=false, or"),
        ("tiny_lora_fp8 lora:r=5", "write lora.r=5"),
        ("tiny_lora_fp8 ~zzz", "sections are model, precision"),
        ("tiny_full_fp8 USE_FP8=True", "write precision.compute=fp8"),
        ("tiny_full_fp8 --use_fp8", "write precision.compute=fp8"),
        ("tiny_full_fp8 USE_4BIT_OPTIMIZER=True", "write train.optim=adamw_8bit"),
        ("tiny_full_fp8 COMPUTE_DTYPE=bfloat16", "write precision.compute=bf16"),
        ("tiny_full_fp8 FP8_FORMAT=hybrid", "write precision.format=hybrid"),
        ("tiny_full_fp8 transformer_engine=True", "write precision.backend=te"),
        ("tiny_full_fp8 --resume latest", "python -m finetune resume last"),
        ("tiny_full_fp8 resume=latest", "python -m finetune resume last"),
        ("tiny_full_fp8 --list_checkpoints", "python -m finetune checkpoints"),
        ("tiny_full_fp8 --checkpoint_dir out", "--out FOLDER"),
        ("tiny_full_fp8 --use_tensorboard", "write train.report_to=tensorboard"),
        ("tiny_full_fp8 --eval_freq 25", "train.eval_strategy=steps train.eval_steps=25"),
        ("tiny_full_fp8 --checkpoint_freq=25", "train.save_steps=25, and checkpoints.keep_last"),
        ("tiny_full_fp8 train.log_freq=5", "write train.logging_steps=5"),
        ("tiny_full_fp8 --max_lr 1e-4", "write train.learning_rate=1e-4"),
        ("tiny_full_fp8 --max_steps 30", "write train.max_steps=30"),
        ("tiny_full_fp8 model.max_steps=30", "write train.max_steps=30"),
        ("tiny_full_fp8 train.train_on_responses_only=true", "train.assistant_only_loss=true"),
    ],
)
def test_a_fix_is_for_what_was_meant(words, said, cli) -> None:
    found = cli("cat", *words.split(), "--resolved") if "~" in words else cli(*words.split())
    assert found.code == 2
    assert said in " ".join(found.err.partition("fix:")[2].split())


@pytest.mark.parametrize(
    "typed", ["early_stopping=3", "beta_1=0.1", "train.zzz_patience=3", "train.lerning_rate=3"]
)
def test_a_guess_carries_no_value(typed, cli) -> None:
    """`train.early_stopping_patience=3` was to be written as `train.learning_rate=3`."""
    found = cli("tiny_full_fp8", typed)
    value = typed.partition("=")[2]
    assert found.code == 2
    assert f"={value}" not in found.err.partition("fix:")[2]
    assert ("did you mean 'learning_rate'" in found.err) == ("lerning" in typed)


def test_messages_to_a_script_name_its_arguments(make_llama) -> None:
    made = setup_fp8_mixed_precision_training("emulated", keep=["nowhere"], cpu=True)
    model = make_llama()
    with pytest.raises(PlanError, match=r"keep pattern 'nowhere'") as caught:
        made.prepare(model)
    assert "precision." not in str(caught.value)
    with pytest.raises(ConfigError) as of_recipe:
        load_recipe("tiny_full_fp8", ["train.zzz=1"])
    assert "leave it out" in of_recipe.value.fix, "a recipe's own stay as they are"
    teardown_fp8_mixed_precision_training()
    assert in_words("precision.keep=[a]") == "precision.keep=[a]"
    with pytest.raises(PrecisionError) as refused:
        setup_fp8_mixed_precision_training(cpu=True)
    assert "backend='emulated' (exact" in refused.value.fix


@pytest.mark.parametrize("name", aliases.DROPPED)
def test_what_nothing_says_here_is_to_be_left_out(name) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny_full_fp8", [f"precision.{name}=1"])
    assert caught.value.fix.startswith("leave it out: ")
    made: Any = 1
    with pytest.raises(UnknownArgumentError, match="leave it out: "):
        setup_fp8_mixed_precision_training("emulated", cpu=True, **{name: made})


def test_a_dtype_of_torch_as_a_value() -> None:
    with pytest.raises(ConfigError, match="write bfloat16"):
        load_recipe("tiny_full_fp8", ["model.dtype=torch.bfloat16"])
    with pytest.raises(ConfigError, match="one of float32, bfloat16"):
        load_recipe("tiny_full_fp8", ["model.dtype=torch.float64"])


@pytest.mark.parametrize(
    "name", ["fp8_hybrid", "fp8_e4m3", "fp8_margin", "fp8_amax_history_len", "format", "eval"]
)
def test_in_a_script_the_argument_that_it_names_is_accepted(name) -> None:
    value: Any = {"format": "hybrid", "eval": "fp8"}.get(name) or FIRST_VALUES.get(name, True)
    with pytest.raises(UnknownArgumentError) as caught:
        setup_fp8_mixed_precision_training("emulated", scaling="delayed", cpu=True, **{name: value})
    key, _, shown = caught.value.fix.removeprefix("write ").partition("=")
    accepted: dict[str, Any] = {key: shown.strip("'") if shown.startswith("'") else int(shown)}
    setup_fp8_mixed_precision_training("emulated", scaling="delayed", cpu=True, **accepted)


def test_what_is_no_matter_of_compute_is_named_as_such() -> None:
    with pytest.raises(UnknownArgumentError, match=r"in a recipe it is model\.storage=nf4"):
        setup_fp8_mixed_precision_training("emulated", load_in_4bit=True)


# ------------------------------------------------------------------------------------- whole files

AXOLOTL = """
base_model: builtin:tiny_llama
model_type: LlamaForCausalLM
load_in_8bit: false
datasets:
  - path: rows.jsonl
    ds_type: json
    type: {field_instruction: ask, field_output: reply}
    shards: 2
val_set_size: 0.2
sequence_len: 256
sample_packing: true
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
wandb_project:
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens: {pad_token: "<|pad|>", bos_token: "<s>"}
max_grad_norm: -3
frobnicate: 7
"""
LLAMA_FACTORY = """
model_name_or_path: builtin:tiny_llama
stage: dpo
pref_beta: 0.2
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: mine
template: llama3
cutoff_len: 256
output_dir: saves/here
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""


@pytest.fixture
def theirs(tmp_path):
    """Files of both tools with their rows, in an empty folder."""
    answers = [{"ask": f"How many are {n}?", "reply": f"There are {n}."} for n in range(40)]
    pairs = [{"q": row["ask"], "chosen": row["reply"], "rejected": "No."} for row in answers]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.json").write_text(json.dumps(pairs))
    registry = {"mine": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "q"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(registry))
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    (tmp_path / "factory.yaml").write_text(LLAMA_FACTORY)


def test_a_file_of_axolotl_becomes_a_recipe_and_nothing_is_dropped_in_silence(theirs, cli) -> None:
    made = cli("cp", "--from", "axolotl.yaml", "mine.yaml")
    assert made.code == 0, made.err
    given = yaml.safe_load(AXOLOTL)
    for key in (key for key, value in given.items() if value is not None):
        assert re.search(rf"\b{key}\b", made.out), key
    for line in ("shards: 2", "bos_token: <s>", "frobnicate: 7", "max_grad_norm: -3"):
        assert re.search(rf"! not taken over: \S*{line}: .{{10}}", made.out), line
        assert re.search(rf"# .*{line}", Path("mine.yaml").read_text())
    config = load_recipe("mine.yaml").config
    assert "adapter: lora, lora_r: 16 -> lora.r=16" in made.out
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert (config.lora.r, config.lora.alpha, config.model.pad_token) == (16, 32, "<|pad|>")
    assert config.data.columns == {"instruction": "ask", "output": "reply"}
    train = config.train
    assert (train["eval_steps"], train["save_strategy"], train["warmup_steps"]) == (
        1 / 8,
        "epoch",
        0.1,
    )
    assert (train["per_device_train_batch_size"], train["lr_scheduler_type"]) == (2, "cosine")
    assert "max_grad_norm" not in train
    checked = cli("validate", "mine.yaml")
    assert checked.code == 0, checked.err
    assert "Alpaca, 32 training rows, 8 eval rows" in checked.out


def test_a_file_of_llama_factory_is_read_with_its_registry_and_its_defaults(theirs, cli) -> None:
    made = cli("cp", "--from", "factory.yaml", "mine.yaml")
    assert made.code == 0, made.err
    assert "! not taken over: template: llama3: rows are put into the model's own" in made.out
    config = load_recipe("mine.yaml").config
    assert (config.train["method"], config.train["beta"]) == ("dpo", 0.2)
    assert (config.lora.r, config.lora.alpha) == (4, 8), "twice the rank, as it is there"
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert config.data.columns == {"instruction": "q"}
    checked = cli("validate", "mine.yaml")
    assert checked.code == 0, checked.err
    assert "32 training rows, 8 eval rows" in checked.out
    full = LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    Path("factory.yaml").write_text(full.replace("val_size: 0.1", "").replace("bf16", "fp16"))
    made = cli("cp", "--from", "factory.yaml", "full.yaml")
    assert "! not taken over: lora_...: no adapter is asked for" in made.out
    config = load_recipe("full.yaml").config
    assert (config.lora, config.model.dtype, config.precision.compute) == (None, "float32", "fp16")
    assert (config.data.eval_fraction, config.train["eval_strategy"]) == (0, "no")


def test_early_stopping_of_axolotl_is_early_stopping_here(theirs, cli) -> None:
    Path("axolotl.yaml").write_text(f"{AXOLOTL}early_stopping_patience: 3\n")
    made = cli("cp", "--from", "axolotl.yaml", "mine.yaml")
    assert "saves_per_epoch: 1: early stopping saves at each evaluation" in made.out
    train = load_recipe("mine.yaml").config.train
    assert (train["early_stopping_patience"], train["load_best_model_at_end"]) == (3, True)
    assert train["save_steps"] == train["eval_steps"] == 1 / 8
    assert cli("validate", "mine.yaml").code == 0


def test_what_axolotl_saves_and_evaluates_never_is_so_here(theirs, cli) -> None:
    """It was dropped without a line, and each epoch saved and evaluated."""
    never = AXOLOTL.replace("evals_per_epoch: 4", "evals_per_epoch: 0")
    Path("axolotl.yaml").write_text(never.replace("saves_per_epoch: 1", "saves_per_epoch: 0"))
    made = cli("cp", "--from", "axolotl.yaml", "mine.yaml")
    assert "evals_per_epoch: 0 -> train.eval_strategy=no" in made.out
    train = load_recipe("mine.yaml").config.train
    assert (train["eval_strategy"], train["save_strategy"]) == ("no", "no")


def test_a_preset_changes_what_another_tools_file_became(theirs, cli) -> None:
    """It was refused: the preset read the file itself as a recipe."""
    made = cli("cp", "--from", "axolotl.yaml", "mine.yaml", "--preset", "smoke")
    assert made.code == 0, made.err
    assert "mine.yaml: from Axolotl's axolotl.yaml, smoke" in made.out
    assert "! not taken over: frobnicate: 7" in made.out
    config = load_recipe("mine.yaml").config
    assert (config.lora.r, config.train["max_steps"]) == (16, 10)


def test_a_file_of_neither_tool_is_refused(cli) -> None:
    Path("own.yaml").write_text("model: {name: builtin:tiny_llama}\n")
    Path("odd.yaml").write_text(
        f"{AXOLOTL}\nevals_per_epoch: [4]\n".replace("evals_per_epoch: 4", "")
    )
    for words in (
        ("--from", "odd.yaml", "mine.yaml"),
        ("--from", "own.yaml", "mine.yaml"),
        ("--from", "gone.yaml", "mine.yaml"),
        (),
    ):
        assert cli("cp", *words).code == 2
    assert not Path("mine.yaml").exists()


@pytest.mark.parametrize("name", aliases.FOREIGN["files"])
def test_a_rule_of_a_file_names_keys_that_there_are(name) -> None:
    rule = aliases.FOREIGN["files"][name]
    for setting in () if rule.startswith("-") or rule == "rows" else rule.split():
        section, _, key = setting.partition("=")[0].partition(".")
        known = {key for method in METHODS.values() for key in arguments(method)}
        assert key in (known if section == "train" else fields_of(section))
    assert all(verb in MODULES for verb in re.findall(r"-m finetune (\w+)", rule))
