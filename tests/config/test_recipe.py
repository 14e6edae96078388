"""Recipes: what ships, how values are read, what overrides do, and the errors of mistakes."""

from __future__ import annotations

import itertools
import shlex
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import load_recipe
from finetune.config.methods import method_of
from finetune.config.paths import find_recipe, list_recipes
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config, without_effect
from finetune.config.train_keys import TrainSection
from finetune.config.train_section import (
    check_range,
    convert_train,
    decides_checkpointing,
    with_checkpointing,
)
from finetune.config.yaml import dump_yaml, parse_yaml
from finetune.errors import ConfigError, RecipeNotFoundError
from finetune.section import check_text, is_text

RECIPES = list_recipes()
QLORA = [name for name in RECIPES if "_qlora_" in name]
PAIRS = sorted({name.rpartition("_")[0] for name in RECIPES if name not in QLORA})
BASE = """\
model:
  name: builtin:tiny_llama
precision:
  compute: bf16
data:
  name: builtin:harbour
train:
  learning_rate: 2e-5
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A function that saves a text as r.yaml in the current folder and loads it."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str, file: str = "r.yaml") -> RunConfig:
        Path(file).write_text(text, encoding="utf-8")
        return load_recipe(file, overrides).config

    return load_text


# ------------------------------------------------------------------------------------ what ships


def test_an_interval_without_its_strategy_is_said() -> None:
    lines = without_effect(load_recipe("tiny_lora_fp8", ["train.save_steps=4"]).config.train)
    assert lines == [
        "train.save_steps=4 has no effect, since train.save_strategy is no: no checkpoint is saved"
    ]
    assert without_effect(TrainSection(save_strategy="epoch", save_steps=4))[0].endswith("is epoch")
    assert not without_effect(TrainSection(save_steps=4))
    for name in RECIPES:
        assert not without_effect(load_recipe(name).config.train)


@pytest.mark.parametrize("pair", PAIRS)
def test_twins_differ_in_precision_and_nothing_else(pair):
    fp8, bf16 = (
        parse_yaml(find_recipe(f"{pair}_{precision}").read_text(encoding="utf-8"), pair)[0]
        for precision in ("fp8", "bf16")
    )
    assert fp8.pop("precision")["compute"] == "fp8"
    assert bf16.pop("precision") == {"compute": "bf16"}
    assert fp8 == bf16
    assert load_recipe(f"{pair}_fp8").config.method == ("lora" if "_lora" in pair else "full")


def test_every_recipe_is_one_of_a_pair():
    pairs = [f"{pair}_{p}" for pair in PAIRS for p in ("fp8", "bf16")]
    assert sorted(RECIPES) == sorted(pairs + QLORA)
    assert QLORA == ["llama_8b_qlora_bf16", "tiny_qlora_bf16"]


@pytest.mark.parametrize("name", QLORA)
def test_a_qlora_recipe_is_the_lora_recipe_with_another_storage(name):
    qlora, lora = (
        parse_yaml(find_recipe(recipe).read_text(encoding="utf-8"), recipe)[0]
        for recipe in (name, name.replace("_qlora_", "_lora_"))
    )
    assert qlora["model"].pop("storage") == "nf4"
    assert qlora == lora


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_an_sft_config_with_its_own_values(name, tmp_path):
    config = load_recipe(name, ["~train.fsdp", "~train.fsdp_config"]).config  # needs GPUs
    if decides_checkpointing(config):  # as preflight does
        config = with_checkpointing(config, True)
    args = sft_config(config, tmp_path, {}, on_cpu=not torch.cuda.is_available())
    length = "max_completion_length" if method_of(config.train).writes else "max_length"
    for key in ("learning_rate", length, "per_device_train_batch_size", "seed"):
        assert getattr(args, key) == config.train[key]
    assert args.bf16
    assert not args.fp16
    # A number of steps would be all of a short run.
    assert [args.get_warmup_steps(steps) <= steps / 9 for steps in (20, 200, 2000)] == [True] * 3


@pytest.mark.parametrize(("gpus", "taken"), [(0, 0), (1, 1), (8, 1)])
def test_of_several_gpus_one_process_takes_one(gpus, taken, tmp_path, monkeypatch):
    """Transformers would copy the model to all of them (`nn.DataParallel`)."""
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: gpus))
    args = sft_config(load_recipe("tiny_lora_fp8").config, tmp_path, {}, on_cpu=True)
    assert args._n_gpu == taken


@pytest.mark.parametrize(
    ("given", "multiple"),
    [
        (["~train.pad_to_multiple_of"], 128),
        (["~train.pad_to_multiple_of", "train.max_length=96"], 32),  # no longer than the rows
        (["train.pad_to_multiple_of=auto", "train.max_length=96"], 32),  # as if it were not there
        (["train.pad_to_multiple_of=16"], 16),
        (["train.pad_to_multiple_of=null"], None),
        (["train.method=grpo", "~train.pad_to_multiple_of", "~train.max_length"], None),
    ],
)
def test_lengths_are_rounded_on_a_gpu_unless_the_recipe_says_how(given, multiple, tmp_path):
    # Transformers refuses BF16 off the CPU where there is no GPU.
    config = load_recipe("tiny_dpo_bf16", [*given, "precision.compute=fp32"]).config
    args = [sft_config(config, tmp_path, {}, on_cpu=on_cpu) for on_cpu in (False, True)]
    assert args[0].pad_to_multiple_of == multiple
    written = given[0].rpartition("=")[2]
    assert args[1].pad_to_multiple_of == (multiple if written.isdigit() else None)
    assert config.train.row_multiple == (multiple if written.isdigit() else 1)


@pytest.mark.parametrize("name", RECIPES)
def test_the_resolved_recipe_is_the_same_recipe(name, tmp_path):
    recipe = load_recipe(name)
    saved = tmp_path / "resolved.yaml"
    saved.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(saved)).config == recipe.config


def test_a_resolved_recipe_keeps_overrides_and_writes_defaults_out(tmp_path):
    overrides = (
        "train.learning_rate=7e-6",
        "train.save_strategy=no",
        "train.gradient_checkpointing_kwargs.use_reentrant=false",
        "lora.target_modules=[q_proj, v_proj]",
        "precision.keep=[layers.0.*]",
        "data.path=my rows.jsonl",
        "~train.seed",
    )
    recipe = load_recipe("tiny_lora_fp8", overrides)
    saved = tmp_path / "resolved.yaml"
    saved.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe(str(saved)).config
    assert again == recipe.config
    assert again.train["learning_rate"] == 7e-6
    assert again.data.path == "my rows.jsonl"
    assert "amax_compute_algo: max" in recipe.to_yaml()


def test_the_config_of_a_run_folder_keeps_the_name_of_its_recipe(tmp_path):
    folder = tmp_path / "runs" / "tiny_full_fp8" / "20260101-000000-abcd"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(BASE, encoding="utf-8")
    assert load_recipe(str(folder / "config.yaml")).name == "config", "a file of that name"
    (folder / "receipt.json").write_text("{}", encoding="utf-8")
    assert load_recipe(str(folder / "config.yaml")).name == "tiny_full_fp8", "a run folder's"


# ------------------------------------------------------------------------------- how values read


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("weight_decay: 2e-5", 2e-5),
        ("warmup_steps: 5", 5.0),
        ("max_steps: 150", 150),
        ("save_strategy: no", "no"),
        ('save_strategy: "no"', "no"),
        ("packing: no", False),
        ("packing: yes", True),
        ("packing: true", True),
        ("fsdp: true", True),
        ("fsdp: full_shard", "full_shard"),
        ('run_name: "true"', "true"),
        ("run_name: 1e5", "1e5"),
        ('run_name: "007"', "007"),
        ("report_to: none", "none"),
        ("max_length: null", None),
        ("report_to: [tensorboard, trackio]", ["tensorboard", "trackio"]),
        (
            'fsdp_config: {version: 2, reshard: true, ratio: 1e-1, policy: "2"}',
            {"version": 2, "reshard": True, "ratio": 0.1, "policy": "2"},
        ),
        ("fsdp_config: {}", {}),
    ],
)
def test_a_train_value_has_the_type_of_its_field(load, line, expected):
    value = load(f"{BASE}  {line}\n").train[line.partition(":")[0]]
    assert value == expected
    assert type(value) is type(expected)


def test_plain_words_stay_text_in_text_fields(load):
    text = BASE.replace("builtin:tiny_llama", "no").replace(
        "data:", "data:\n  prompts: [no, 1e5, null is a word]"
    )
    config = load(text)
    assert config.model.name == "no"
    assert config.data.prompts == ("no", "1e5", "null is a word")


# ------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "expected"),
    [
        ("model.dtype=float32", "model", "dtype", "float32"),
        ("model.trust_remote_code=yes", "model", "trust_remote_code", True),
        ("model.revision=1e5", "model", "revision", "1e5"),
        ("~precision.compute", "precision", "compute", "bf16"),
        ("precision.keep=[a, b]", "precision", "keep", ("a", "b")),
        ("data.eval_fraction=2e-1", "data", "eval_fraction", 0.2),
        ("data.max_rows=null", "data", "max_rows", None),
        ("data.prompts=[]", "data", "prompts", ()),
        ("lora.r=4", "lora", "r", 4),
        ("lora.target_modules=[q_proj]", "lora", "target_modules", ("q_proj",)),
    ],
)
def test_an_override_sets_one_value(load, override, section, key, expected):
    text = BASE.replace("compute: bf16", "compute: fp8")
    changed = load(text, override)
    assert getattr(getattr(changed, section), key) == expected
    untouched = {"model", "precision", "data", "train"} - {section}
    if section == "lora":  # adapters freeze their base, which an FP8 run holds in FP8
        assert changed.precision.frozen == "fp8"
        untouched.remove("precision")
    before = load(text)
    assert all(getattr(changed, name) == getattr(before, name) for name in untouched)


def test_train_overrides_set_nest_and_unset(load):
    train = load(
        BASE,
        "train.gradient_checkpointing_kwargs.use_reentrant=false",
        "train.max_steps=3",
        "~train.learning_rate",
    ).train
    assert train == {
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_steps": 3,
    }


@pytest.mark.parametrize("override", ["~lora", "lora=null"])
def test_unsetting_the_adapters_trains_all_weights(override):
    assert load_recipe("tiny_lora_fp8", [override]).config.method == "full"


def test_a_data_path_replaces_the_name_and_what_belongs_to_it(load):
    text = BASE.replace("harbour", "harbour\n  subset: s\n  eval_split: test\n  max_rows: 9")
    data = load(text, "data.path=mine.jsonl").data
    assert (data.path, data.name, data.subset, data.eval_split) == ("mine.jsonl", None, None, None)
    assert data.max_rows == 9


def test_a_scaling_replaces_delayed_scaling_and_what_belongs_to_it() -> None:
    precision = load_recipe("tiny_full_fp8", ["precision.scaling=mxfp8"], check_train=False)
    assert precision.config.precision.amax_history_len == 1024  # the recipe's 16 is gone
    with pytest.raises(ConfigError, match="amax_history_len belongs to delayed scaling"):
        load_recipe("tiny_full_fp8", ["precision.scaling=mxfp8", "precision.amax_history_len=16"])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seed", 2**32, "a number less than 4294967296;"),
        ("num_train_epochs", 0, "a number greater than 0;"),
        ("adam_beta1", 1.0, "a number less than 1;"),
    ],
)
def test_a_number_out_of_range_has_its_range_in_full(key, value, said) -> None:
    with pytest.raises(ConfigError) as caught:
        check_range(key, value, f"train.{key}")
    assert caught.value.fix.startswith(said)


@pytest.mark.parametrize(
    ("method", "override", "said"),
    [
        ("dpo", "loss_type=zzz", "one of sigmoid, hinge, ipo,"),
        ("dpo", "loss_type=[sigmoid,zzz]", "one of sigmoid, hinge, ipo,"),
        ("dpo", "f_divergence_type=zzz", "one of reverse_kl, forward_kl,"),
        ("dpo", "label_smoothing=2", "a number less than 0.5;"),
        ("dpo", "loss_weights=[1.0,2.0]", "a number for each loss;"),
        ("kto", "loss_type=zzz", "one of kto, apo_zero_unpaired;"),
        ("sft", "truncation_mode=zzz", "one of keep_end, keep_start;"),
        ("grpo", "scale_rewards=zzz", "one of group, none, batch;"),
        ("grpo", "importance_sampling_level=zzz", "one of sequence, token;"),
        ("grpo", "top_p=2", "a number less than or equal to 1;"),
        ("grpo", "temperature=0", "a number greater than 0;"),
    ],
)
def test_what_trl_would_refuse_in_the_first_step_is_refused_in_the_recipe(
    method: str, override: str, said: str
) -> None:
    recipe = "tiny_full_bf16" if method == "sft" else f"tiny_{method}_bf16"
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [f"train.{override}"])
    assert caught.value.fix.startswith(said)


def test_epochs_replace_the_steps_of_a_recipe_and_steps_its_epochs() -> None:
    """Transformers lets steps win, so that epochs would change nothing, without a word."""
    train = load_recipe("tiny_lora_fp8", ["train.num_train_epochs=3"]).config.train
    assert (train["num_train_epochs"], train.get("max_steps")) == (3, None)
    train = load_recipe("llama_1b_lora_fp8", ["train.max_steps=5"], check_train=False).config.train
    assert (train["max_steps"], train.get("num_train_epochs")) == ("5", None)
    both = ["train.max_steps=-1", "train.num_train_epochs=3"]
    assert load_recipe("tiny_lora_fp8", both).config.train["max_steps"] == -1
    kept = load_recipe("llama_1b_lora_fp8", ["train.max_steps=-1"]).config.train
    assert kept["num_train_epochs"] == 1


@pytest.mark.parametrize("processes", [1, 8])
def test_tokens_are_steps_of_full_rows_on_all_processes(processes, load, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    gpt2, tokens = "gpt2_124m_full_fp8", 16 * 8 * 1024 * processes  # of a step
    for typed in ("10B", "10e9", "1e10", "10000M", "10000000000"):
        config = load_recipe(gpt2, [f"data.max_tokens={typed}"]).config
        assert config.train["max_steps"] == 10_000_000_000 // tokens
        assert config.data.max_tokens == 10_000_000_000
    (tmp_path / "again.yaml").write_text(dump_yaml(config.model_dump(mode="json")))
    assert load_recipe(str(tmp_path / "again.yaml")).config == config
    for other in ("train.max_steps=7", "train.num_train_epochs=2"):
        changed = load_recipe(str(tmp_path / "again.yaml"), [other]).config
        assert changed.data.max_tokens is None
    for overrides, said in (
        ([f"data.max_tokens={tokens - 1}"], "less than one step"),
        (["data.max_tokens=1B", "train.packing_strategy=bfd"], "rows of several lengths"),
        (["data.max_tokens=1B", "train.max_steps=7"], "train.max_steps=7 and"),
        (["data.max_tokens=1.5"], "valid integer"),
        (["data.max_tokens=many"], "valid integer"),
        (["train.max_tokens=1B"], "no argument 'max_tokens'"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            load_recipe(gpt2, overrides)
    assert error.value.fix == "write data.max_tokens=1B"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("max_steps=5", "write train.max_steps=5"),
        ("path=rows.jsonl", "write data.path=rows.jsonl"),
        ("name=x", "write model.name=x or data.name=x"),
    ],
)
def test_a_setting_without_its_section_is_shown_with_it(typed, said) -> None:
    with pytest.raises(ConfigError, match="there is no section") as caught:
        load_recipe("tiny_lora_fp8", [typed])
    assert caught.value.fix.startswith(said)


def test_a_value_for_a_whole_section_is_refused_in_plain_words() -> None:
    with pytest.raises(ConfigError, match="precision is a section, and has no value") as caught:
        load_recipe("tiny_lora_fp8", ["precision=bf16"])
    assert caught.value.fix == "write precision.key=value for each key of the section"


def test_an_empty_path_beside_a_name_is_one_of_both() -> None:
    with pytest.raises(ConfigError, match="both are given") as caught:
        load_recipe("tiny_lora_fp8", ["data.path=[]"], check_train=False)
    assert caught.value.fix == "~data.path, or ~data.name"
    load_recipe("tiny_lora_fp8", ["data.path=[]", "~data.path"], check_train=False)


def test_the_form_of_a_mixture_that_an_error_gives_is_one() -> None:
    with pytest.raises(ConfigError, match="needs path, and nothing else is known") as caught:
        load_recipe("tiny_lora_fp8", ["data.path=[{path: a, wait: 2}]"], check_train=False)
    typed = shlex.split(caught.value.fix)  # as a shell does
    data = load_recipe("tiny_lora_fp8", typed, check_train=False).config.data
    assert data.path == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize("given", ["kwargs={min_lr: 1e-5}", "kwargs.min_lr=1e-5"])
def test_an_override_inside_a_setting_of_the_trainer_is_converted_too(given) -> None:
    typed = [f"train.lr_scheduler_{given}"]
    found = with_overrides(load_recipe("tiny_lora_fp8").config, typed)
    assert found.train["lr_scheduler_kwargs"] == {"min_lr": 1e-5}
    assert found == load_recipe("tiny_lora_fp8", typed).config


def test_a_fix_with_braces_is_quoted_for_the_shell() -> None:
    """A shell makes two words of `data.path={"a":2,"b":1}`, and takes their quotes away."""
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny_lora_fp8", ["~data.name", "data.path=[a.jsonl,a.jsonl]"])
    (typed,) = shlex.split(caught.value.fix)
    assert load_recipe("tiny_lora_fp8", ["~data.name", typed]).config.data.sources == {
        "a": 2.0, "b": 1.0
    }  # fmt: skip


@pytest.mark.parametrize("typed", ["scaling=delayed", "frozen=bf16", "compute=bf16"])
def test_what_belongs_to_weights_stored_in_fp8_goes_with_them(typed) -> None:
    own = (
        "kernels=eager",
        "map={q_proj: bf16, mlp: fp8}",
    )
    written = [f"precision.{item}" for item in own]
    before = load_recipe("tiny_lora_fp8", written, check_train=False).config
    assert before.precision.kernels == "eager"
    again = with_overrides(before, [f"precision.{typed}"])
    assert again.precision.kernels == "auto"
    parts = {"q_proj": "bf16"} | ({} if typed == "compute=bf16" else {"mlp": "fp8"})
    assert again.precision.map == parts


def test_a_data_name_replaces_the_path_and_what_belongs_to_it(load):
    text = BASE.replace("name: builtin:harbour", "path: mine.jsonl\n  eval_path: held.jsonl")
    data = load(text, "data.name=some/set").data
    assert (data.path, data.name, data.eval_path) == (None, "some/set", None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("compute", ["'compute' is not an override", "section.key=value"]),
        ("~train.seed=3", ["'~train.seed=3' is not an override", "~section.key"]),
        ("train.=3", ["'train.=3' is not an override"]),
        ("precison.compute=fp8", ["no section 'precison'", "did you mean 'precision'?"]),
        ("data.prompts=[a", ["not valid YAML", "override 'data.prompts=[a'"]),
        ("lora.r=eight", ["lora.r", "'eight'", "where: override 'lora.r=eight'"]),
        (
            "train.max_steps=1.5",
            ["must be a whole number, not '1.5'", "override 'train.max_steps=1.5'"],
        ),
        ("train.bf16=true", ["precision.compute decides it", "override 'train.bf16=true'"]),
    ],
)
def test_a_wrong_override_is_quoted(load, override, said):
    with pytest.raises(ConfigError) as caught:
        load(BASE, override)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("~data.max_row", "max_rows"),
        ("~precision.frozn", "frozen"),
        ("~train.max_stps", "max_steps"),
        ("~lora.alpa", "alpha"),
    ],
)
def test_unsetting_a_misspelt_key_is_refused(load, override, meant):
    """The recipe's value stayed, without a word: `~data.max_row` trained on the first rows only."""
    with pytest.raises(ConfigError, match=f"no key .*; did you mean '{meant}'") as caught:
        load(BASE.replace("harbour", "harbour\n  max_rows: 9"), override)
    assert override in str(caught.value)


def test_what_is_at_its_default_or_unknown_to_us_can_be_unset(load):
    unset = ("~train.fsdp", "~data.max_rows", "~lora", "~train.fsdp_config.version")
    assert load(BASE, *unset) == load(BASE)
    assert load(BASE, "~lora.alpha").method == "full", "no adapters: nothing was set"
    assert load(BASE.replace("harbour", "harbour\n  max_row: 9"), "~data.max_row") == load(BASE)


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        pytest.param(
            BASE.replace("precision:", "precison:"),
            "r.yaml:3",
            ["no section 'precison'", "did you mean 'precision'?", "known: model,"],
            id="section",
        ),
        pytest.param(
            BASE.replace("compute:", "comput:"),
            "r.yaml:4",
            ["no key 'comput' in section 'precision'", "did you mean 'compute'?"],
            id="key",
        ),
        pytest.param(
            BASE + "lora:\n  rr: 8\n",
            "r.yaml:10",
            ["no key 'rr' in section 'lora'", "known: r, alpha"],
            id="key-of-optional-section",
        ),
        pytest.param(
            BASE.replace("compute: bf16", "compute: fp9"),
            "r.yaml:4",
            ["precision.compute cannot be 'fp9'", "did you mean 'fp8'?", "one of fp8, bf16"],
            id="value",
        ),
        pytest.param(
            BASE + "lora:\n  r: eight\n",
            "r.yaml:10",
            ["lora.r: Input should be a valid integer", "(given: 'eight')"],
            id="type",
        ),
        pytest.param(
            BASE.replace("compute: bf16", "compute: fp8\n  margin: 2"),
            "r.yaml:3",
            ["margin belongs to delayed scaling", "'tensorwise'"],
            id="settings-that-exclude-each-other",
        ),
        pytest.param(
            BASE.replace("  name: builtin:harbour", "  name: a\n  path: b"),
            "r.yaml:5",
            ["exactly one of data.path and data.name", "both are given"],
            id="two-data-sources",
        ),
        pytest.param(
            BASE.replace("  name: builtin:harbour", "  split: train"),
            "r.yaml:5",
            ["exactly one of data.path and data.name", "neither is given"],
            id="no-data-source",
        ),
        pytest.param(
            BASE.replace("data:\n  name: builtin:harbour\n", ""),
            "r.yaml",
            ["data is missing", "add data"],
            id="section-missing",
        ),
        pytest.param("- a\n", "r.yaml", ["a recipe is a mapping of sections"], id="list"),
        pytest.param(
            BASE.replace("train:\n  learning_rate: 2e-5", "train: 3"),
            "r.yaml:7",
            ["train: ", "'3'"],
            id="train-not-a-mapping",
        ),
        pytest.param(
            BASE + "  learning_rat: 1\n",
            "r.yaml:9",
            ["SFTConfig has no argument 'learning_rat'", "did you mean 'learning_rate'?"],
            id="train-key",
        ),
        pytest.param(
            BASE + "  bf16: true\n",
            "r.yaml:9",
            ["train.bf16 cannot be set here", "precision.compute decides it", "~train.bf16"],
            id="train-bf16-reserved",
        ),
        pytest.param(
            BASE + "  max_steps: lots\n",
            "r.yaml:9",
            ["train.max_steps must be a whole number, not 'lots'"],
            id="train-type",
        ),
        pytest.param(
            BASE + '  weight_decay: "2e-5"\n',
            "r.yaml:9",
            ["train.weight_decay must be a number, not '2e-5'"],
            id="train-quoted-number",
        ),
        pytest.param(
            BASE.replace("  name: builtin:tiny", "\tname: builtin:tiny"),
            "r.yaml:2",
            ["this is not valid YAML", "check indentation"],
            id="tab",
        ),
        pytest.param(BASE + "---\n" + BASE, "r.yaml:9", ["not valid YAML"], id="two-documents"),
        pytest.param(
            BASE + "  max_steps: 1\n  learning_rate: 3e-5\n",
            "r.yaml:10",
            ["train.learning_rate is given twice", "only one of the two"],
            id="twice",
        ),
        pytest.param(
            BASE.replace("compute: bf16", "map: {mlp:fp8}"),
            "r.yaml:4",
            ["'mlp:fp8' is a key without a value", "fix:   write mlp: fp8"],
            id="no-space",
        ),
    ],
)
def test_a_mistake_names_file_line_and_the_nearest_name(load, text, where, said):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.where == where
    for part in said:
        assert part in str(caught.value)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeNotFoundError, match="did you mean 'llama_8b_lora_fp8'") as caught:
        load_recipe("llama_8b_lorra_fp8")
    assert "python -m finetune ls" in caught.value.fix
    assert isinstance(caught.value, FileNotFoundError)


def test_arguments_of_another_kind_are_errors_with_what_to_write(tmp_path):
    """As a first-time user of Python types them; each was a traceback of ours, or nonsense."""
    import finetune

    with pytest.raises(ConfigError, match="train takes a Recipe, not str") as caught:
        finetune.train("tiny_lora_fp8")
    assert caught.value.fix == "finetune.train(finetune.load_recipe('tiny_lora_fp8'))"
    with pytest.raises(ConfigError, match="by its name or path here, not by Recipe"):
        load_recipe(load_recipe("tiny_lora_fp8", check_train=False))
    with pytest.raises(ConfigError, match="overrides are a list") as caught:
        load_recipe("tiny_lora_fp8", "train.max_steps=3")
    assert caught.value.fix == "['train.max_steps=3']"
    copied = tmp_path / "mine.yaml"
    copied.write_text(find_recipe("tiny_lora_fp8").read_text("utf-8"), encoding="utf-8")
    assert load_recipe(copied, check_train=False).name == "mine"


def bomb() -> str:
    """A YAML of eight lines that is 9**8 values."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise("abcdefgh")]
    return "\n".join([*lines, "model: *h", ""])


@pytest.mark.parametrize(
    "text",
    [bomb(), "model: &a {name: *a}\n", f"model: {'[' * 500}{']' * 500}\n", "[" * 50_000],
    ids=["aliases", "itself", "brackets", "more-brackets"],
)
@pytest.mark.parametrize("verb", ["validate", "generate"])
def test_yaml_without_end_is_refused_at_once(text, verb, cli) -> None:
    """Recipes, and `config.yaml` of run folders: they took 5 GB and 40 s, or a traceback."""
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text)
    asked = ("validate", "run/config.yaml") if verb == "validate" else ("generate", "run", "hi")
    began = time.perf_counter()
    refused = cli(*asked)
    assert refused.code == 2
    assert "config.yaml:" in refused.err
    assert time.perf_counter() - began < 20  # imports of a first verb among it


@pytest.mark.parametrize("name", ["mine.yaml", "folder/mine", "./mine.yml"])
def test_a_recipe_file_that_is_not_there_is_shown_in_full(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeNotFoundError, match="there is no recipe file") as caught:
        load_recipe(name)
    assert caught.value.where == str((tmp_path / name).resolve())


# ------------------------------------------------------------------------- writing and re-reading

TRICKY = [
    "no",
    "2e-5",
    "1e5",
    "null",
    "~",
    "true",
    "",
    " ",
    "09",
    "nan",
    "inf",
    ".inf",
    "0x1f",
    "é",
]
TEXT = st.sampled_from(TRICKY) | st.text(max_size=12)


@pytest.mark.parametrize("bad", ["a\0b", "\0", "a\udcff", "\ud800b"])
def test_text_with_a_nul_or_half_of_a_surrogate_is_refused_wherever_it_stands(bad) -> None:
    for value in (bad, ["a", bad], {"a": bad}, {bad: 1}):
        with pytest.raises(ValueError, match="no text"):
            check_text(value)
    check_text({"a": ["b\n", "\ud7ff\U0001f680\ue000"]})


NAME = TEXT.filter(lambda text: text.strip() and is_text(text))
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
AMOUNT = st.floats(0, 1e15)
TYPED_TRAIN = st.fixed_dictionaries(
    {},
    optional={
        "run_name": st.none() | NAME,
        "save_strategy": NAME,
        "learning_rate": AMOUNT,
        "eval_steps": st.none() | AMOUNT,
        "max_steps": st.integers(-1, 2**53),
        "max_length": st.none() | st.integers(1, 2**40),
        "packing": st.booleans(),
        "fsdp": NAME | st.booleans(),
    },
)
CONFIG = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"name": NAME},
            optional={"revision": st.none() | NAME, "trust_remote_code": st.booleans()},
        ),
        "data": st.fixed_dictionaries(
            {"name": NAME},
            optional={
                "prompts": st.lists(NAME, max_size=3),
                "eval_fraction": st.floats(0, 0.99),
                "max_rows": st.none() | st.integers(1, 10**9),
            },
        ),
        "train": TYPED_TRAIN,
    }
)
FREE_FORM = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def read_back(config: RunConfig) -> RunConfig:
    data, _ = parse_yaml(dump_yaml(config.model_dump(mode="json")), "r.yaml")
    again = RunConfig.model_validate(data)
    return again.model_copy(update={"train": convert_train(again.train)})


@pytest.mark.slow
@given(CONFIG)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_typed_value_survives_writing_and_reading(data):
    config = RunConfig.model_validate(data)
    assert read_back(config) == config


@given(st.dictionaries(TEXT, FREE_FORM, max_size=4))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_free_form_value_survives_writing_and_reading(values):
    config = RunConfig.model_validate(
        {"model": {"name": "m"}, "data": {"name": "d"}, "train": {"fsdp_config": values}}
    )
    assert repr(read_back(config).train) == repr(config.train)


def test_infinity_survives_writing_and_reading(load):
    config = load(BASE, "train.max_grad_norm=inf")
    assert config.train["max_grad_norm"] == float("inf")
    assert read_back(config) == config


def test_all_that_is_wrong_in_a_file_is_said_at_once(cli) -> None:
    lines = """model: {nmae: builtin:tiny_llama, dtype: float16}
precision: {compute: fp9}
lroa: {r: 8}
data: {name: builtin:harbour, eval_fraction: 2}
train: {lerning_rate: 1e-3, max_steps: many, optim: adamm, max_seq_length: 12}"""
    Path("bad.yaml").write_text(
        lines.replace(": {", ":\n  ").replace(", ", "\n  ").replace("}", "")
    )
    found = cli("validate", "bad.yaml")
    said = " ".join(found.err.split())
    assert found.code == 2
    for guess in ("name", "lora", "bfloat16", "fp8", "learning_rate"):
        assert f"did you mean {guess!r}?" in said
    for word in ("eval_fraction", "max_steps", "adamm", "write train.max_length=12"):
        assert word in said
    assert "is missing" not in said, "of a key whose name was misspelt"
    assert said.count("error: ") == said.count("where: bad.yaml:") == 9
