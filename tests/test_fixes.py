"""Every error says what to do, and doing it works: settings and commands are taken from its text.

Refusals by device are in `hardware/test_fixes_by_device.py`, names of other tools in
`config/test_aliases.py`, errors of a script in `test_fixes_in_scripts.py`.
"""

from __future__ import annotations

import ast
import doctest
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import site_reference

import finetune
from finetune import load_recipe, setup_fp8_mixed_precision_training
from finetune.config import sections as section
from finetune.config.schema import DataConfig
from finetune.errors import ConfigError, FinetuneError, PrecisionError
from finetune.hardware.device import Device
from finetune.training.run.preflight import preflight
from tests.conftest import CPU, H100
from tests.run_folders import make_run

PACKAGE = Path(finetune.__file__).parent
KEY = r"(?:model|precision|lora|data|eval|train)\.[a-z_0-9.]*[a-z_0-9]"
SETTING = re.compile(rf"~{KEY}|{KEY}=(?:\[[^]]*\]|[^\s,;)\[]+)|~lora\b")


def ways(fix: str) -> list[list[str]]:
    """The settings that a fix offers: alternatives, each of one or more overrides.

    >>> ways("~precision.margin, or precision.scaling=delayed")
    [['~precision.margin'], ['precision.scaling=delayed']]
    >>> ways("precision.compute=bf16 (QLoRA); or ~model.storage precision.frozen=fp8 for all")
    [['precision.compute=bf16'], ['~model.storage', 'precision.frozen=fp8']]
    """
    parts = [SETTING.findall(part) for part in re.split(r"[,;:]? or |; ", fix)]
    return [[word.rstrip(".:") for word in part] for part in parts if part]


def test_the_examples() -> None:
    assert doctest.testmod(section).failed == 0
    assert ways.__doc__
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(ways, globs={"ways": ways}):
        assert runner.run(example).failed == 0


# ------------------------------------------------------------------------------ every error has one


def error_classes() -> set[str]:
    return {kind.__name__ for kind in _below(FinetuneError)}


def _below(kind: type) -> list[type]:
    return [kind, *(found for sub in kind.__subclasses__() for found in _below(sub))]


def without_fix(source: str) -> list[int]:
    """Lines that make an error without a fix, or set one to an empty text."""
    found, classes = [], error_classes()
    for node in ast.walk(ast.parse(source)):
        empty = isinstance(node, ast.Assign | ast.keyword) and _is_empty(node.value)
        if empty and "fix" in ast.unparse(node).partition("=")[0]:
            found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in classes:
            fixes = [key.value for key in node.keywords if key.arg in ("fix", None)]
            found += [] if fixes else [node.lineno]
    return found


def _is_empty(value: ast.expr) -> bool:
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    return any(isinstance(v, ast.Constant) and v.value == "" for v in values)


@pytest.mark.parametrize(
    "source",
    [
        "raise ConfigError('no')",
        "raise ConfigError('no', fix='')",
        "what, fix = 'no', ''",
        "return PlanError('no', where='here')",
    ],
)
def test_a_missing_fix_is_found(source) -> None:
    assert without_fix(source if source.startswith(("raise", "what")) else f"def f(): {source}")


def test_every_error_of_the_package_has_a_fix() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "errors.py"]
    bare = {str(path.relative_to(PACKAGE)): without_fix(path.read_text("utf-8")) for path in files}
    assert {path: lines for path, lines in bare.items() if lines} == {}


# ------------------------------------------------------------------------------------ of a recipe

READ = [
    ("tiny_full_fp8", "precision.scaling=tensorwise precision.margin=2"),
    ("tiny_full_fp8", "precision.scaling=nvfp4 precision.format=e4m3"),
    ("tiny_full_fp8", "precision.scaling=mxfp8 precision.power_of_two_scales=false"),
    ("tiny_full_bf16", "precision.eval=fp8"),
    ("tiny_full_fp8", "precision.high_gemms=[fprop,dgrad,wgrad]"),
    ("tiny_full_fp8", "precision.scaling=rowwise_with_gw_hp precision.high_gemms=[fprop,dgrad]"),
    ("tiny_full_fp8", "precision.kernels=eager"),
    ("tiny_lora_fp8", "precision.frozen=fp8 precision.scaling=delayed"),
    ("tiny_lora_fp8", "precision.frozen=fp8 precision.kernels=eager precision.scaling=mxfp8"),
    ("tiny_lora_fp8", "precision.frozen=fp8 precision.format=hybrid"),
    ("tiny_lora_fp8", "precision.frozen=fp8 precision.high_gemms=[fprop,dgrad]"),
    ("tiny_full_fp8", "data.path=mine.jsonl data.name=builtin:harbour"),
    ("tiny_full_fp8", "~data.name"),
    ("tiny_full_fp8", "data.seed=1 data.eval_fraction=0"),
    ("tiny_full_fp8", "eval.limit=3"),
    ("tiny_full_fp8", "eval.samples=false eval.max_new_tokens=3"),
    ("tiny_lora_fp8", "lora.r=0"),
    ("tiny_lora_fp8", "lora.dropout=many"),
    ("tiny_full_fp8", "precision.first_n=-1"),
    ("tiny_full_fp8", "precision.keep=q_proj"),
]  # fmt: skip
"""Refused when it is read, without torch."""

CHECKED = [
    ("tiny_full_fp8", "train.bf16=true"),
    ("tiny_full_fp8", "train.output_dir=out"),
    ("tiny_full_fp8", "train.max_steps=lots"),
    ("tiny_full_fp8", "train.logging_steps=[1]"),
]
"""Refused by what TRL's SFTConfig takes."""

PLANNED = [
    *site_reference.REFUSED["CPU"],
    ("tiny_qlora_bf16", "precision.compute=fp32 model.dtype=float32"),
    ("tiny_qlora_bf16", "precision.compute=fp8"),
    ("tiny_qlora_bf16", "precision.map.mlp=fp32"),
    ("tiny_full_bf16", "precision.map.mlp=fp8"),
    ("tiny_full_fp8", "precision.map.norm=fp8"),
    ("tiny_full_fp8", "precision.map.router=fp32"),
    ("tiny_full_fp8", "precision.map.attn=fp32 precision.map.self_attn=bf16"),
    ("tiny_full_fp8", "precision.keep=[q_proj] precision.map.self_attn=fp8"),
    ("tiny_full_fp8", "precision.first_n=2 precision.last_n=2"),
    ("bdh_tiny_full_fp8", "precision.first_n=1"),
    ("tiny_full_fp8", "precision.keep=[model]"),
    ("tiny_full_fp8", "precision.frozen=fp8 precision.scaling=rowwise"),
    ("tiny_full_fp8", "train.optim=adamw_fused"),
    ("tiny_full_fp8", "train.optim_args=momentum=1"),
    ("tiny_full_fp8", "train.optim_args=fast"),
    ("tiny_full_bf16", "precision.compute=fp32 train.tf32=true"),
    ("tiny_full_fp8", "precision.backend=torchao precision.scaling=blockwise"),
    ("tiny_qlora_bf16", "train.fsdp=full_shard"),
    ("tiny_lora_fp8", "lora.target_modules=[nope]"),
    ("tiny_full_fp8", "precision.map.atn=fp32"),
    ("tiny_full_fp8", "model.name=builtin:tiny_lama"),
]  # fmt: skip
"""Refused before a model is loaded. The first ones are those of the documentation."""


def check(
    level: str, recipe: str, overrides: list[str], device: Device = CPU
) -> FinetuneError | None:
    """The error of a recipe with overrides, None if it is accepted."""
    try:
        config = load_recipe(recipe, overrides, check_train=level != "read").config
        if level == "planned":
            preflight(config, device)
    except FinetuneError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("level", "recipe", "overrides"),
    [
        *(("read", *row) for row in READ),
        *(("checked", *row) for row in CHECKED),
        *(("planned", *row) for row in PLANNED),
    ],
)
def test_each_setting_that_a_refusal_names_is_accepted(level, recipe, overrides, tried) -> None:
    words = overrides.split()
    error = check(level, recipe, words)
    assert error is not None
    assert error.fix
    offered = ways(error.fix) or named(error, words)
    assert offered, error.fix
    kept = [] if error.fix.endswith(" instead") else words
    for way in offered:
        left = check(level, recipe, [*kept, *way])
        if isinstance(left, PrecisionError):  # FP8 is an answer where there is a GPU for it
            left = check(level, recipe, [*kept, *way], H100)
        assert left is None, f"{' '.join(way)} gives another error: {left}"
    tried(f"{recipe} {overrides}", error, "; ".join(" ".join(way) for way in offered))


def named(error: FinetuneError, overrides: list[str]) -> list[list[str]]:
    """The wrong setting with a word that the error names: 'did you mean', or of its list."""
    key = overrides[-1].partition("=")[0]
    close = re.findall(r"did you mean '([^']+)'", error.what)
    words = close or re.findall(r"(?:one of|made of:|known:|or choose) ([\w]+)", error.fix)
    brackets = "[{}]" if "[" in overrides[-1] else "{}"
    return [[f"{key}={brackets.format(word)}"] for word in words]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("precision.scalin=delayed", "precision.scaling=delayed"),
        ("precison.scaling=delayed", "precision.scaling=delayed"),
        ("train.learning_rat=1e-3", "train.learning_rate=1e-3"),
        ("precision.scaling=delay", "precision.scaling=delayed"),
        ("precision.compute=fp-8", "precision.compute=fp8"),
    ],
)
def test_a_misspelt_word_is_named_as_it_is_spelt(wrong, right, tried) -> None:
    with pytest.raises(ConfigError, match="did you mean") as caught:
        load_recipe("tiny_full_fp8", [wrong], check_train=wrong.startswith("train"))
    (close,) = re.findall(r"did you mean '([^']+)'", caught.value.what)
    assert close in re.split(r"[ ,.=]+", caught.value.fix)
    fixed = re.sub(r"\b(scalin|precison|delay|fp-8|learning_rat)(?=[.=]|$)", close, wrong)
    assert fixed == right
    load_recipe("tiny_full_fp8", [fixed], check_train=False)
    tried(wrong, caught.value, fixed)


# ------------------------------------------------------------------------- of the helper's settings


@pytest.mark.parametrize(
    "settings",
    [
        {"scaling": "tensorwise", "margin": 2},
        {"scaling": "nvfp4", "fp8_format": "e4m3"},
        {"scaling": "mxfp8", "power_of_two_scales": False},
        {"scaling": "rowwise", "high_gemms": ["fprop", "dgrad", "wgrad"]},
        {"scaling": "delayed", "frozen": "fp8"},
        {"scaling": "delay"},
        {"amax_history_len": "long", "scaling": "delayed"},
        {"precisionn": "fp8"},
    ],
    ids=str,
)
def test_each_argument_that_the_helper_names_is_accepted(settings, tried) -> None:
    with pytest.raises(FinetuneError) as caught:
        setup_fp8_mixed_precision_training("emulated", cpu=True, **settings)
    fixes = caught.value.fix.split("; ")[0].split(", or ")
    for fix in fixes:
        changed = dict(settings)
        for part in fix.split(" and "):
            out = re.fullmatch(r"leave (\w+) out", part)
            if out:
                del changed[out[1]]
            else:
                key, _, value = part.partition("=")
                changed[key] = ast.literal_eval(value)
        setup_fp8_mixed_precision_training("emulated", cpu=True, **changed)
    tried(f"setup_fp8_mixed_precision_training(**{settings})", caught.value, "; ".join(fixes))


# ---------------------------------------------------------------------------------------- of rows

ROW = b'{"prompt": "Where?", "completion": "Here."}\n'
LATIN = b'{"text": "caf\xe9"}\n'
FILES: list[tuple[str, bytes, str, str, bytes]] = [
    ("a.jsonl", b"", "add rows, such as", "a.jsonl", ROW),
    ("a.jsonl", b"\n \n", "add rows, such as", "a.jsonl", ROW),
    ("a.doc", ROW, "use .jsonl", "a.jsonl", ROW),
    ("a.jsonl", ROW + b"{no\n", "fix or remove that line", "a.jsonl", ROW),
    (
        "a.jsonl",
        b'{"text": "caf\xe9"}\n',
        "iconv -f WINDOWS-1252 -t UTF-8",
        "a.jsonl",
        b'{"text": "caf\xc3\xa9"}\n',
    ),
    ("a.csv", b"in,out\na,b\n", "prompt and completion", "a.csv", b"prompt,completion\na,b\n"),
    ("a.jsonl", b'{"messages": "Hi"}\n', "fix or remove that row", "a.jsonl", ROW),
]
"""A file, words of its error's fix, and the file after that."""


@pytest.mark.parametrize(("name", "content", "says", "better", "fixed"), FILES)
def test_rows_changed_as_the_error_says_are_read(
    name, content, says, better, fixed, tmp_path, tried
) -> None:
    from transformers import AutoTokenizer

    from finetune.config.paths import TINY_LLAMA
    from finetune.data.dataset import load_data

    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)

    def read(file: str, content: bytes):
        (tmp_path / file).write_bytes(content)
        return load_data(DataConfig(path=str(tmp_path / file), eval_fraction=0), tokenizer, 0)

    with pytest.raises(FinetuneError) as caught:
        read(name, content)
    assert says in caught.value.fix
    assert len(read(better, fixed).train) == 1
    tried(f"{name}: {content.decode('latin-1')!r}", caught.value, f"{better}: {fixed.decode()!r}")


# ------------------------------------------------------------------------------ of the command line


@pytest.fixture
def there(cli, tmp_path):
    """The command line, in a folder with a run, a recipe and rows."""
    make_run(tmp_path / "runs" / "tiny_full_fp8" / "20260101-000000-aaaa", steps=8)
    (tmp_path / "mine.yaml").write_text("model: {}\n", encoding="utf-8")
    return cli


def long(wrong: str, right: str) -> Any:
    return pytest.param(wrong, right, marks=pytest.mark.long)


TINY = "estimate tiny_full_fp8 --gpu H100"
COMMANDS = [
    ("tiny_lora_fp", "ls"),
    ("validate no/such.yaml", "ls"),
    ("validate nothing", "ls"),
    ("cp tiny_lora_fp8 mine.yaml", "cp tiny_lora_fp8 mine.yaml --force"),
    ("cp tiny_lora_fp8 new/mine.yaml", "cp tiny_lora_fp8 new/mine.yaml"),
    ("ls --out runs", "ls --runs --out runs"),
    ("cat tiny_full_fb8", "cat tiny_full_fp8"),
    long("report nothing", "report runs/tiny_full_fp8/20260101-000000-aaaa"),
    ("ls --runs --out nowhere", "ls --runs --out runs"),
    long("estimate tiny_full_fp8 --gpus 0", "estimate tiny_full_fp8 --gpus 1"),
    long("estimate tiny_full_fp8 --gpu H10", "estimate tiny_full_fp8 --gpu H100"),
    long("estimate tiny_full_fp8 --fit gpus", "estimate tiny_full_fp8 --fit gpus --gpu H100"),
    long("estimate --gpu H100", "estimate tiny_lora_fp8 --gpu H100"),
    long(f"{TINY} train.max_length=null", f"{TINY} train.max_length=512"),
    long(f"{TINY} train.max_length=9999", f"{TINY} train.max_length=512"),
]
"""A command that ends with an error, and the one that its fix says."""


@pytest.mark.parametrize(("wrong", "right"), COMMANDS)
def test_each_command_that_an_error_names_works(there, wrong, right, tried) -> None:
    failed = there(*shlex.split(wrong))
    assert failed.code == 2
    text = re.sub(r"\s+", " ", failed.err)
    fix = text.partition("fix: ")[2]
    made = re.findall(r"mkdir -p \S+", fix)
    for command in made:
        subprocess.run(command, shell=True, check=True)
    new = [word for word in shlex.split(right) if word not in shlex.split(wrong)]
    assert made or new, "the command has to differ by what the error says"
    assert all(word in text for word in new), (new, text)
    assert there(*shlex.split(right)).code == 0
    what = text.partition(" where:")[0].removeprefix("error: ")
    tried(wrong, FinetuneError(what, fix=fix), "; ".join([*made, right]))
