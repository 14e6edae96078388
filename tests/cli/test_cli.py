"""The command line: what it prints, what it refuses, and that a mistake is never a traceback."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import finetune
from finetune import load_recipe
from finetune.analysis.doctor import COMBINATIONS
from finetune.cli import listing
from finetune.cli.analysis import _is_override
from finetune.cli.app import VERBS, command_of
from finetune.config.paths import find_recipe, list_recipes, recipes_folder, shipped_shapes
from finetune.errors import install_hint
from finetune.logging import plain_table
from finetune.runs.checkpoints import launcher_of
from tests.asset_makers import make_recipes
from tests.conftest import CPU, H100
from tests.families import FAMILIES


def process(*words: str, **kwargs) -> subprocess.CompletedProcess:
    """Run python on words, as a user would."""
    kwargs = {"capture_output": True, "text": True, "timeout": 120} | kwargs
    return subprocess.run([sys.executable, *words], check=False, **kwargs)


# -------------------------------------------------------------------------------- without torch

IMPORTS = """
import contextlib, io, json, sys
from finetune.cli import app
heavy = {"torch", "transformers", "trl", "datasets", "peft", "accelerate"}
found = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["finetune", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app.main()
    found[" ".join(words)] = sorted(heavy & sys.modules.keys())
print(json.dumps(found))
"""


def test_looking_around_imports_no_torch(tmp_path):
    quick = [[], ["--help"], ["--version"], ["ls"], ["ls", "--models"], ["estimate", "--help"]]
    quick += [["cat", "tiny_lora_fp8"], ["cp", "tiny_lora_fp8", str(tmp_path)], ["watch"]]
    done = json.loads(process("-c", IMPORTS, json.dumps(quick)).stdout)
    assert [done[" ".join(words)] for words in quick] == [[]] * len(quick)


def test_the_help_has_the_first_line_of_each_verb():
    lines = {verb: line for verbs in VERBS.values() for verb, (_, line) in verbs.items()}
    assert lines == {verb: command_of(verb).help.splitlines()[0] for verb in lines}


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, finetune\n"
        "dir(finetune), finetune.__version__, finetune.load_recipe, finetune.RunConfig\n"
        "print('torch' in sys.modules)"
    )
    assert process("-c", code).stdout == "False\n"


def test_every_public_name_is_there_and_others_are_not():
    assert all(getattr(finetune, name) for name in finetune.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        _ = finetune.tain


def test_a_reader_that_leaves_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has seen enough
    with os.fdopen(writer, "wb") as closed:
        done = process(
            "-m", "finetune", "ls", capture_output=False, stdout=closed, stderr=subprocess.PIPE
        )
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------ look


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_an_error_and_no_traceback():
    with open("/dev/full", "w") as full:
        done = process("-m", "finetune", "ls", stdout=full, stderr=subprocess.PIPE,
                       capture_output=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: the disk that the output goes to is full")
    assert "Traceback" not in done.stderr


ANY_TEXT = """
import json
from finetune.cli import app
from finetune.logging import output
def say(**_):
    output().print("It is 3 \\N{GRINNING FACE}")
    print(json.dumps("caf\xe9 \u65e5", ensure_ascii=False))
app.app = say
app.main()
"""  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_letter_that_the_output_lacks_ends_nothing_and_spoils_no_json(encoding):
    """A sample answer with an emoji ended a run under LANG=C."""
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = process("-c", ANY_TEXT, env=env, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    line, document = done.stdout.decode(encoding).splitlines()
    assert line.startswith("It is 3 ")
    assert json.loads(document) == "caf\xe9 \u65e5"


def test_a_closed_output_is_no_error():
    """As a job is started that logs to its own files: `>&-`."""
    command = [sys.executable, "-m", "finetune", "ls"]
    code = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    done = process("-c", code, *command, capture_output=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["mine.yaml", "mine", "runs/mine"])
def test_a_folder_is_no_recipe_and_that_of_a_run_is_named(cli, name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    for words in ((name,), ("validate", name), ("cp", name, "x.yaml")):
        done = cli(*words)
        assert done.code == 2
        assert f"{name!r} is a folder, and a recipe is a file" in done.err
    shutil.copy(find_recipe("tiny_lora_fp8"), tmp_path / name / "config.yaml")
    assert f"its recipe: {name}/config.yaml" in cli(name).err  # resume it, or train it again?
    assert cli("cat", name).out == cli("cat", "tiny_lora_fp8").out
    (tmp_path / "tiny_lora_fp8").mkdir()  # of `--out .`
    assert "there is no key" in cli("tiny_lora_fp8", "model.nme=x").err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_no_argument_is_a_request_for_help(cli, words):
    done = cli(*words)
    assert (done.code, done.err) == (0, "")
    for verb in ("run", "ls", "cat", "cp", "validate", "doctor"):
        assert f"\n  {verb} " in done.out
    assert words or "Start here: python -m finetune tiny_lora_fp8" in done.out


def test_version(cli):
    assert cli("--version").out == f"finetune {finetune.__version__}\n"


def test_ls_shows_every_name_in_full_on_a_narrow_terminal(cli):
    done = cli("ls")
    assert done.code == 0
    table = done.out.partition("\n\n")[0].splitlines()[1:]
    found = {f"{x}_{c}" for x in (row.split()[0] for row in table) for c in ("fp8", "bf16")}
    assert found >= set(list_recipes())
    figures = {row.split()[0]: row.split()[-4:] for row in table}
    assert [name for name, (fp8, bf16, *_) in figures.items() if fp8 == "-" != bf16] == [
        name.removesuffix("_bf16")
        for name in list_recipes()
        if name.replace("_bf16", "_fp8") not in list_recipes()
    ]
    assert "…" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_ls_crops_no_name_however_narrow_the_terminal(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = cli("ls")
    names = {line for line in done.out.partition("\n\n")[0].splitlines() if line[0] != " "}
    assert {f"{x}_{c}" for x in names for c in ("fp8", "bf16")} >= set(list_recipes())
    assert "…" not in done.out
    assert "fp8 ≥GiB 22, bf16 ≥GiB 22" in " ".join(done.out.split())


def test_stored_rows_of_ls_are_those_of_the_recipes():
    stored = json.loads(listing.ROWS.read_text())
    fix = "python -m tests.asset_makers.make_recipes"
    assert list(stored) == list_recipes(), fix
    for name, known in stored.items():
        memory = {"preview_gib": known["row"]["preview_gib"]}
        assert known["crc32"] == listing.checksum(name), fix
        assert known["row"] == listing.row_of(name) | memory, fix
        assert memory["preview_gib"] > 0
    speeds = {name: known["tokens_per_s"] for name, known in stored.items()}
    assert {gpu for row in speeds.values() for gpu in row} == set(make_recipes.GPUS)
    for name in ("llama_8b_lora_fp8", "llama_8b_full_fp8", "llama_1b_full_bf16"):
        assert speeds[name]["H100"] > 0


@pytest.mark.slow
def test_stored_predictions_of_ls_are_what_the_estimator_says():
    name, fix = "llama_1b_lora_fp8", "python -m tests.asset_makers.make_recipes"
    stored = json.loads(listing.ROWS.read_text())[name]
    memory = stored["row"]["preview_gib"]
    assert memory == pytest.approx(make_recipes.preview_gib(name), rel=0.01), fix
    speed = {"H100": stored["tokens_per_s"]["H100"]}
    assert speed == pytest.approx(make_recipes.speeds(name, ("H100",)), rel=0.02), fix


def test_ls_makes_a_row_again_where_the_recipe_has_changed(tmp_path, monkeypatch):
    stored = json.loads(listing.ROWS.read_text())
    for name in ("tiny_full_fp8", "tiny_full_bf16"):
        stored[name]["row"] = {"method": "stale"}
    stored["tiny_full_fp8"]["crc32"] += 1
    monkeypatch.setattr(listing, "ROWS", tmp_path / "recipes.json")
    listing.ROWS.write_text(json.dumps(stored))
    found = dict(zip(list_recipes(), listing.rows(), strict=True))
    assert found["tiny_full_fp8"]["method"] == "full"
    assert found["tiny_full_bf16"]["method"] == "stale"


def test_ls_as_json_has_every_recipe(cli):
    rows = {row["recipe"]: row for row in json.loads(cli("ls", "--json").out)}
    assert list(rows) == list_recipes()
    assert rows["llama_8b_lora32_bf16"]["method"] == "LoRA r=32"
    assert 17 < rows["llama_8b_lora32_bf16"]["preview_gib"] < 26
    assert rows["tiny_full_fp8"]["precision"] == "fp8 delayed"


def test_ls_models_has_every_packaged_shape_and_every_family_that_was_trained(cli):
    rows = json.loads(cli("ls", "--models", "--json").out)
    measured = json.loads(listing.FAMILIES.read_text())
    assert {row["model"] for row in rows} - {None} == set(shipped_shapes())
    assert {row["family"] for row in rows} >= set(measured)
    assert set(measured) <= set(FAMILIES), "python -m tests.benchmarks.families --write"
    done = cli("ls", "--models")
    lines = {
        line.split()[0]: line.rstrip() for line in done.out.partition("\n\n")[0].splitlines()[1:]
    }
    assert {name.rpartition("/")[2] for name in shipped_shapes()} <= set(lines)
    assert lines["gpt-oss-20b"].endswith("trained, merged"), "no FP8 export of its experts"
    assert max(map(len, done.out.splitlines())) <= 80
    both = cli("ls", "--models", "--runs")
    assert (both.code, "one of them" in both.err) == (2, True)


def test_cat_prints_a_recipe_as_written(cli):
    assert cli("cat", "tiny_lora_fp8").out == find_recipe("tiny_lora_fp8").read_text("utf-8")


@pytest.mark.parametrize("flag", [["--resolved"], []])
def test_cat_with_an_override_prints_the_complete_recipe(cli, flag):
    done = cli("cat", "tiny_lora_fp8", "lora.r=3", *flag)
    assert done.code == 0
    Path("again.yaml").write_text(done.out, encoding="utf-8")
    assert load_recipe("again.yaml").config == load_recipe("tiny_lora_fp8", ["lora.r=3"]).config


def test_cat_as_json_is_the_same_configuration(cli):
    values = json.loads(cli("cat", "tiny_lora_fp8", "--json").out)
    assert values == load_recipe("tiny_lora_fp8").config.model_dump(mode="json")


# -------------------------------------------------------------------------------------------- cp


def test_cp_makes_a_recipe_that_runs_by_the_path_it_prints(cli):
    done = cli("cp", "tiny_full_fp8", "mine")
    assert done.code == 0
    there, here = (f.read_text("utf-8") for f in (find_recipe("tiny_full_fp8"), Path("mine.yaml")))
    differ = [b for a, b in zip(there.split("\n"), here.split("\n"), strict=True) if a != b]
    assert [Path(line.partition("$schema=")[2]).is_file() for line in differ] == [True]
    path = done.out.split("python -m finetune ")[1].strip()
    assert load_recipe(path).config == load_recipe("tiny_full_fp8").config


def test_cp_to_a_folder_keeps_the_name(cli):
    Path("folder").mkdir()
    cli("cp", "tiny_full_fp8", "folder")
    assert Path("folder/tiny_full_fp8.yaml").is_file()


def test_cp_overwrites_only_by_force(cli):
    Path("mine.yaml").write_text("precious", encoding="utf-8")
    done = cli("cp", "tiny_full_fp8", "mine.yaml")
    assert done.code == 2
    assert "mine.yaml is there already" in done.err
    assert "--force" in done.err
    assert Path("mine.yaml").read_text("utf-8") == "precious"
    assert cli("cp", "tiny_full_fp8", "mine.yaml", "--force").code == 0
    assert "tiny_llama" in Path("mine.yaml").read_text("utf-8")


def test_cp_to_a_missing_folder_names_it(cli):
    done = cli("cp", "tiny_full_fp8", "no/mine.yaml")
    assert done.code == 2
    assert "there is no folder 'no'" in done.err


# -------------------------------------------------------------------------------------- validate


@pytest.fixture
def on(monkeypatch):
    """A function that pretends a device, all of whose memory is free."""

    def pretend(device):
        for module in ("finetune.training.run.run", "finetune.hardware.device"):  # imports first
            monkeypatch.setattr(f"{module}.this_device", lambda: device)
        monkeypatch.setattr("finetune.estimator.gate.available_gib", lambda d: d.memory_gib)

    return pretend


def test_validate_shows_plan_memory_and_backend(cli, on):
    on(CPU)
    done = cli("validate", "tiny_lora_fp8")
    assert (done.code, done.err) == (0, "")
    assert "tiny_lora_fp8: valid (tiny_lora_fp8.yaml)" in done.out
    assert "adapter" in done.out
    assert "3.8 MiB without activations" in done.out
    assert "precision here: FP8 frozen/rowwise" in done.out
    assert "frozen, stored in FP8 (per-row scale)" in done.out


@pytest.mark.parametrize(
    "word",
    [
        "train.deepspeed=z3.json",
        "train.fsdp_config={version: 1}",
        "eval.tasks=builtin:harbour_choice",
    ],
)
def test_validate_refuses_what_train_refuses_of_sharding(cli, word, monkeypatch):
    monkeypatch.setattr("finetune.config.sft.refuse_sharding_on_cpu", lambda: None)
    done = cli("validate", "tiny_full_bf16", "train.fsdp=true", word)
    assert done.code == 2
    assert "valid (" not in done.out


@pytest.mark.slow
def test_validate_as_json_keeps_adapters_and_head_out_of_fp8(cli, on, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    on(H100)
    facts = json.loads(cli("validate", "llama_8b_lora_fp8", "--json").out)
    layers = facts["layers"]
    in_fp8 = [layer for layer in layers if layer["compute"] == "fp8"]
    kinds = {layer["name"].removesuffix(".base_layer").rpartition(".")[2] for layer in in_fp8}
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert kinds == attention | mlp
    assert len(in_fp8) == 7 * 32
    adapters = [layer for layer in layers if "lora_" in layer["name"]]
    assert len(adapters) == 2 * 2 * 32
    head = [layer for layer in layers if layer["name"].endswith("lm_head")]
    assert {layer["compute"] for layer in adapters + head} == {"bf16"}
    assert len(layers) == len(in_fp8) + len(adapters) + len(head)
    assert all(layer["reason"] for layer in layers)
    assert facts["trainable"] == 32 * 8 * ((4096 + 4096) + (4096 + 1024))
    assert {layer["stored"] for layer in in_fp8} == {"row"}
    # A byte for each number in FP8; embedding, head and norms in BF16, adapters in float32.
    held = sum(n * k + 4 * n for n, k in (layer["shape"] for layer in in_fp8))
    plain = 2 * (2 * 128256 * 4096 + (2 * 32 + 1) * 4096) + 4 * facts["trainable"]
    assert f"weights {(held + plain) / 2**30:.1f}" in facts["memory"]
    assert facts["here"].startswith("FP8 frozen/rowwise: frozen layers by torch._scaled_mm")
    assert facts["short"] == ""


def test_validate_says_what_this_machine_cannot_do(cli, on):
    on(CPU)
    done = cli("validate", "llama_8b_full_fp8")
    assert done.code == 0
    assert "precision here: not on this machine: " in done.out
    assert "next: python -m finetune estimate llama_8b_full_fp8 --gpu H100" in done.out
    assert "too small here: it needs at least 45.1 GiB" in done.out
    done = cli("estimate", "llama_8b_full_fp8")
    assert done.code == 2
    assert "fix:   --gpu H100, or another GPU" in done.err


def test_brackets_are_text_and_no_markup(cli, on, monkeypatch):
    """`[te]` fell out of what is to be installed, and `[qk]` out of a pattern."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    on(H100)
    done = cli(
        "validate", "tiny_full_fp8", "precision.backend=te", "precision.keep=['*.[qk]_proj']"
    )
    assert done.code == 0
    assert install_hint("te") in done.out
    assert "kept by pattern '*.[qk]_proj'" in done.out
    notebook = Console(file=io.StringIO(), width=80)  # of rich's own, which reads markup
    table = plain_table("")
    table.add_row("*.[qk]_proj")
    notebook.print(table)
    assert "*.[qk]_proj" in notebook.file.getvalue()  # pyright: ignore


# ---------------------------------------------------------------------------------------- doctor


def test_doctor_as_json_has_a_reason_for_every_backend(cli):
    done = cli("doctor", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["versions"]["torch"]
    assert found["advice"]
    assert all(verdict["reason"] for verdict in found["backends"].values())


def test_doctor_names_each_backend_however_narrow_the_terminal(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    said = cli("doctor").out
    assert all("/".join(one) in said for one in COMBINATIONS)


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny_lora_fp9"], ["'tiny_lora_fp9'", "did you mean 'tiny_lora_fp8'?"]),
        (["validte", "tiny_lora_fp8"], ["validte", "did you mean 'validate'?"]),
        (["nothing.yaml"], ["there is no recipe file 'nothing.yaml'"]),
        (["cat"], ["Missing argument 'RECIPE'", "fix:", "RECIPE: Name, or path", "cat --help"]),
        (
            ["estimate", "tiny_lora_fp8", "--fit", "batches"],
            [
                "'batches' is not one of 'batch'",
                "did you mean 'batch'?",
                "where:",
                "fix:   --fit: ",
            ],
        ),
        (["estimate", "tiny_lora_fp8", "--gpus", "x"], ["'--gpus'", "fix:   --gpus: How many"]),
        (["ls", "--rnus"], ["No such option: --rnus", "fix:   --runs; ", "ls --help"]),
        (["ls", "more"], ["unexpected extra argument", "fix:   leave it out"]),
        (["tiny_lora_fp8", "--ot", "x"], ["No such option: --ot", "--out"]),
        (["tiny_lora_fp8", "--max_steps", "3"], ["'--max_steps'", "write train.max_steps=3;"]),
        (["tiny_lora_fp8", "--output-dir", "x"], ["leave it out: the run folder", "use --out"]),
        (["data", "tiny_lora_fp8", "--max-seq-length=64"], ["write train.max_length=64;"]),
        (["ls", "--max_steps", "3"], ["No such option: --max_steps"]),
        (
            ["validate", "tiny_lora_fp8", "train.learning_rat=1"],
            [
                "'learning_rat'; did you mean 'learning_rate'?",
                "train.learning_rate=..., if that is meant",
            ],
        ),
        (["tiny_lora_fp8", "train.use_cpu=true"], ["cannot be set here", "CUDA_VISIBLE_DEVICES"]),
        (
            ["validate", "tiny_lora_fp8", "model.name=builtin:tiny_lama"],
            ["no packaged model 'builtin:tiny_lama'", "did you mean 'builtin:tiny_llama'?"],
        ),
        (["validate", "tiny_lora_fp8", "model.name=./no"], ["there is no model in './no'"]),
        (
            ["validate", "tiny_lora_fp8", "precision.keep=[no_such_layer]"],
            ["no_such_layer"],
        ),
        (
            ["tiny_lora_fp8", "train.resume_from_checkpoint=no/run"],
            ["there is no checkpoint in 'no/run'", "no such folder"],
        ),
        (
            ["tiny_lora_fp8", "train.eval_strategy=sometimes"],
            ["trl.SFTConfig refuses this combination", "sometimes"],
        ),
    ],
    ids=lambda value: "_".join(value)[:48] if isinstance(value, list) else None,
)
def test_a_mistake_exits_with_2_and_says_what_to_do(cli, words, said):
    done = cli(*words)
    assert done.code == 2
    assert done.out == ""
    for part in said:  # typer 0.26 has names of arguments in capitals
        assert part in done.err or part.upper() in done.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "content", "said"),
    [
        ("data.path=rows.jsnl", "", ["no data file 'rows.jsnl'", "did you mean 'rows.jsonl'?"]),
        ("data.path=rows.jsonl", '{"text": "a"}\n{"text"\n', ["rows.jsonl:2", "not JSON"]),
        ("data.path=rows.jsonl", '{"text": null}\n', ["row 1 of rows.jsonl", "'text' is empty"]),
        ("data.path=rows.jsonl", '{"text": "a"}\n', ["no rows to evaluate on", "eval_strategy=no"]),
        ("data.name=builtin:harbor", "", ["'builtin:harbor'", "did you mean 'builtin:harbour'?"]),
    ],
)
def test_bad_data_exits_with_2_before_a_model_is_loaded(cli, monkeypatch, override, content, said):
    monkeypatch.setattr("finetune.training.trainer.load_model", pytest.fail)
    Path("rows.jsonl").write_text(content, encoding="utf-8")
    done = cli("tiny_full_fp8", override)
    assert done.code == 2
    for part in said:
        assert part in done.err
    assert not Path("runs").exists()


def test_an_output_folder_that_is_a_file_exits_with_2(cli, monkeypatch):
    monkeypatch.setattr("finetune.training.trainer.load_model", pytest.fail)
    Path("taken").write_text("", encoding="utf-8")
    done = cli("tiny_full_bf16", "--out", "taken")
    assert done.code == 2
    assert "taken" in done.err


# ------------------------------------------------------------------------------- too big for here


class LoadedError(Exception):
    """Something was loaded."""


@pytest.fixture
def no_loading(monkeypatch):
    """Loading anything raises `LoadedError`."""

    def refuse(*args, **kwargs):
        raise LoadedError

    for name in ("trainer.load_model", "run.prepared.load_tokenizer", "run.prepared.rows_for"):
        monkeypatch.setattr(f"finetune.training.{name}", refuse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            "llama_8b_full_bf16",
            ["(8.03B parameters, full fine-tuning) does not fit here", "_lora_ sibling"],
        ),
        (
            "llama_8b_full_fp8",
            [
                "FP8 (tensorwise, hybrid) is not available on x86_64",
                "CPUs have no FP8",
                "Besides, it",
            ],
        ),
    ],
)
def test_an_8b_recipe_is_refused_before_anything_is_loaded(cli, on, no_loading, recipe, said):
    on(CPU)
    done = cli(recipe)
    assert done.code == 2
    common = ["45.1 GiB without activations", "x86_64 has 16.0 GiB free"]
    for part in [*said, *common, "tiny_lora_fp8` runs anywhere"]:
        assert part in done.err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_adapters_of_an_8b_model_need_its_weights_in_memory(cli, on, no_loading):
    on(H100.__class__("cpu", "a laptop", None, 8.0))
    done = cli("llama_8b_lora_bf16")
    assert done.code == 2
    for part in ("lora fine-tuning) does not fit here", "15.0 GiB", "a laptop has 8.0 GiB free"):
        assert part in done.err
    assert "_lora_ sibling" not in done.err
    assert "a smaller model" in done.err


def test_where_memory_suffices_only_the_missing_fp8_is_named(cli, on, no_loading):
    on(CPU)
    done = cli("llama_8b_lora_fp8")
    assert done.code == 2
    assert "is not available on x86_64" in done.err
    assert "GiB" not in done.err
    assert "precision.compute=bf16" in done.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "memory_gib"),
    [(["llama_8b_full_bf16", "--force"], 16.0), (["llama_8b_lora_bf16"], 24.0)],
)
def test_force_or_enough_memory_gets_to_loading(cli, on, no_loading, words, memory_gib):
    on(replace(CPU, memory_gib=memory_gib))
    with pytest.raises(LoadedError):
        cli(*words)


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (("tiny_lora_fp8", "--fit", "gpu", "--gpu", "H100", "--memory", "5"), "--gpu, --memory"),
        (("tiny_lora_fp8", "--fit", "gpus", "--gpu", "H100", "--gpus", "4"), "--gpus"),
        (("tiny_lora_fp8", "--fit", "batch", "--price", "2", "--tokens", "9"), "--tokens, --price"),
    ],
)
def test_options_of_an_estimate_that_would_change_nothing_are_refused(cli, words, idle) -> None:
    done = cli("estimate", *words)
    assert done.code == 2
    assert f"{idle} would change nothing" in done.err


def test_the_command_after_an_estimate_follows_from_its_answer() -> None:
    """Training what does not fit, or on a machine that was not asked about, is no next step."""
    from finetune.cli.estimate import _next

    def after(fit: str, change: tuple[str, ...] | None, options: list[str], gpus: int = 1) -> str:
        changes = SimpleNamespace(together=change and SimpleNamespace(change=change))
        count = SimpleNamespace(count=gpus)
        found: Any = SimpleNamespace(fit=fit, changes=changes, machine=count)
        return _next(found, ["r.yaml", "train.seed=1"], options)

    run, again = "python -m finetune r.yaml train.seed=1", "python -m finetune estimate r.yaml"
    assert after("fits", None, []) == f"next: {run}"
    assert after("tight", ("a=1",), ["--gpu", "4090"]) == f"next, on such a GPU: {run}"
    assert after("does not fit", None, ["--gpu", "4090"]) == f"next: {again} train.seed=1 --fit gpu"
    change = ("--gpus 4", "lora.r=16", "train.fsdp_config={version: 2}")
    assert after("does not fit", change, ["--gpu", "RTX 4090"]) == (
        f"next: {again} train.seed=1 --gpu 'RTX 4090' --gpus 4 lora.r=16 "
        "'train.fsdp_config={version: 2}'"
    )
    eight = ["--gpu", "H100", "--gpus", "8"]  # one process would train on one of them
    said = after("fits", None, eight, 8)
    assert said == f"next, on 8 such GPUs: {run}".replace("python", launcher_of(8))
    again += " train.seed=1 --gpu H100"
    assert after("does not fit", ("lora.r=16",), eight, 8) == f"next: {again} --gpus 8 lora.r=16"
    assert after("does not fit", ("--gpus 4",), eight, 8) == f"next: {again} --gpus 4"


ENDS = """
import atexit, sys, threading, time
import finetune.cli.app
from finetune.__main__ import run
atexit.register(print, "registered before")
def late():
    time.sleep(0.1)
    print("a thread's end")
def main():
    atexit.register(print, "registered after")
    threading.Thread(target=late).start()
    {end}
finetune.cli.app.main = main
run()
"""


@pytest.mark.parametrize(
    ("end", "code", "err"),
    [
        ("pass", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_the_process_ends_with_its_code_threads_and_exit_functions(end, code, err):
    done = process("-c", ENDS.format(end=end))
    assert (done.returncode, done.stderr) == (code, err)
    assert done.stdout == "a thread's end\nregistered after\nregistered before\n"


def test_a_path_is_no_setting(tmp_path):
    recipe = tmp_path / "lr=1.yaml"
    assert _is_override(str(recipe))
    recipe.write_text("")
    assert not _is_override(str(recipe))


# ----------------------------------------------------------------------------- editors and shells


def test_the_schema_of_recipes_is_the_shipped_one(cli):
    shipped = recipes_folder() / "recipe.schema.json"
    assert json.loads(cli("schema").out) == json.loads(shipped.read_text("utf-8"))
    line = "\n# yaml-language-server: $schema=recipe.schema.json\n"
    assert all(line in find_recipe(name).read_text("utf-8") for name in list_recipes())


def test_help_groups_the_verbs_and_cuts_no_line(cli):
    out = cli("--help").out
    for heading in ("Train:", "Plan:", "Understand:", "Share:"):
        assert f"\n{heading}\n" in out
    assert "..." not in out.partition("Train:")[2]
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_to_be_copied_is_neither_wrapped_nor_cropped(cli, monkeypatch, tmp_path):
    """The folder of a run and the next command, at 80 columns."""
    from finetune.runs.receipt import Receipt, RunReport

    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / ("a recipe with a long name" * 3) / "20261122-120000-aaaa"
    for interrupted in (False, True):
        receipt = Receipt("proven", {"ran": "bf16"})
        report = RunReport(folder, receipt, 2.0, 1.0, None, None, 3.0, 0.1, interrupted=interrupted)
        monkeypatch.setattr("finetune.api.train", lambda *_, report=report, **__: report)
        lines = cli("tiny_lora_bf16").out.splitlines()
        assert any(str(folder) in line for line in lines), lines
        if not interrupted:
            assert any(f"generate '{folder}' " in line for line in lines)


def test_data_counts_and_shows_what_is_trained_on(cli) -> None:
    found = cli("data", "tiny_lora_fp8", "--show", 1, "--html", "rows.html", "data.max_rows=40")
    assert found.code == 0
    assert "32 training rows" in found.out
    assert "of them trained (the assistant's turns), longest row" in found.out
    assert "row 1, " in found.out
    assert "<|im_start|>assistant\n[[Ahoy!" in found.out, "a pipe has no colors"
    assert "[[Ahoy!" not in Path("rows.html").read_text("utf-8")
    assert "Ahoy!" in Path("rows.html").read_text("utf-8")
    counted = json.loads(cli("data", "tiny_lora_fp8", "data.max_rows=40", "--json").out)
    assert counted["train"]["rows"] == 32
    row = counted["rows"][0]
    assert any(label < 0 for label in row["labels"])
    assert any(label == i for label, i in zip(row["labels"], row["input_ids"], strict=True))
    page = cli("data", "tiny_lora_fp8", "data.max_rows=40", "--html", "no/folder/rows.html")
    assert page.code == 2
    assert "--html" in page.err


@pytest.mark.parametrize("words", [("export", "last", "out"), ("evaluate", "last"), ("report",)])
def test_a_verb_that_writes_is_refused_as_several_processes(words, cli, monkeypatch, tmp_path):
    """Two exports deleted each other's files, and two evaluations were two rows."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = cli(*words)
    assert done.code == 2
    assert f"{words[0]} was started as 2 processes" in done.err
    assert f"python -m finetune {words[0]} ..., without torchrun" in done.err
    assert not list(tmp_path.iterdir())


def test_a_line_to_copy_stays_one_where_it_is_printed_by_itself(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = cli("validate", "tiny_lora_bf16", "data.max_rows=40", "train.learning_rate=1e-4")
    command = "next: python -m finetune estimate tiny_lora_bf16 data.max_rows=40"
    assert f"{command} train.learning_rate=1e-4" in done.out.splitlines()


CHATTY = """
import atexit, subprocess, sys
from types import SimpleNamespace
import finetune.api
from finetune.__main__ import run
def train(*_, **__):
    print("a tracker begins")
    other = subprocess.Popen(["sh", "-c", "read x; echo its process ends"], stdin=subprocess.PIPE)
    atexit.register(other.communicate)
    atexit.register(lambda: print("a tracker ends"))
    return SimpleNamespace(to_json=lambda: "{}", interrupted=False)
finetune.api.train = train
sys.argv = ["finetune", "tiny_lora_bf16", "--json"]
run()
"""


def test_json_of_a_run_is_printed_by_its_first_process_alone(cli, monkeypatch):
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    report = SimpleNamespace(to_json=lambda: "{}", interrupted=False)
    monkeypatch.setattr("finetune.api.train", lambda *_, **__: report)
    for number, document in (("1", ""), ("0", "{}\n")):
        for key, value in (launched | {"RANK": number, "LOCAL_RANK": number}).items():
            monkeypatch.setenv(key, value)
        assert cli("tiny_lora_bf16", "--json").out == document


@pytest.mark.slow
def test_json_of_a_run_is_alone_on_the_output():
    """wandb and trackio print."""
    done = process("-c", CHATTY)
    assert done.stdout == "{}\n"
    assert "a tracker begins\n" in done.stderr
    assert done.stderr.endswith("a tracker ends\nits process ends\n")
