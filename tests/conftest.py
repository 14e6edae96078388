"""Shared by all tests: one thread a worker, tiny models, a pretended GPU, skips with reasons."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # two threads on two busy cores are 20 to 40 times slower
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import atexit
import functools
import gc
import hashlib
import importlib.metadata
import pickle
import sys
import warnings
from types import SimpleNamespace

import pytest

gc.disable()  # until all is imported: modules are no garbage, and looking takes a tenth of the time

import torch

torch.set_num_threads(1)

from finetune.errors import FinetuneError
from finetune.hardware.device import Device, this_device

H100 = Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 79.6)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 79.3)
V100 = Device("cuda", "Tesla V100-SXM2-16GB", (7, 0), 15.8)
RTX4090 = Device("cuda", "NVIDIA GeForce RTX 4090", (8, 9), 23.6)
B200 = Device("cuda", "NVIDIA B200", (10, 0), 178.0)
APPLE = Device("mps", "Apple GPU", None, 32.0)
CPU = Device("cpu", "x86_64", None, 16.0)


def _multiply_rows_on_a_cpu() -> torch.library.Library | None:
    """Give torch 2.10 and 2.11 a `_scaled_mm` with a scale per row on a CPU, as later ones have.

    Theirs takes one scale per tensor: what runs on hardware could not be tested here.
    """
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    ones = torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # it replaces torch's own, as it is meant to
            library.impl("_scaled_mm", _scaled_mm, "CPU", allow_override=True)
            library.impl("_scaled_mm.out", _scaled_mm_out, "CPU", allow_override=True)
        return library
    return None


def _scaled_mm(
    a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
):
    """[M, K] @ [K, N], with a scale per row and column or one of each."""
    with torch.autocast("cpu", enabled=False):
        y = (a.float() @ b.float()) * scale_a * scale_b
    y = y if bias is None else y + bias
    return y.to(a.dtype if out_dtype is None else out_dtype)


def _scaled_mm_out(*args, out, **kwargs):
    """As Inductor calls it."""
    return out.copy_(_scaled_mm(*args, **kwargs))


_ROWS = _multiply_rows_on_a_cpu()  # as long as the library is kept


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped with a reason where there is no FP8 GPU."""
    device = this_device()
    from finetune.hardware.device import has_transformer_engine

    engine = has_transformer_engine() if device.has_fp8 else device.has_fp8
    for item in items:
        if item.get_closest_marker("gpu") and not device.has_fp8:
            item.add_marker(pytest.mark.skip(reason=device.has_fp8.reason))
        if item.get_closest_marker("te") and not engine:
            item.add_marker(pytest.mark.skip(reason=engine.reason))


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make, not at a million objects of libraries.

    And read what is installed once: accelerate does at each trainer and loader that it makes.
    """
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    gc.freeze()
    atexit.register(gc.unfreeze)  # or nanobind reports its functions as leaked
    gc.enable()
    gc.set_threshold(5_000)  # not 700: half the time for it, and no more memory


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker that is done takes tests from the other, whose last ones may be long."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(autouse=True)
def _clean_session():
    """No FP8 session and no accelerate state leaks from one test to the next."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from finetune.training.helper import session

    session.uninstall()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


FORETOLD = (
    "test_estimate",
    "test_families",
    "test_images",
    "test_measured_memory",
    "test_one_way",
    "test_rehearsal",
)
"""Files with tests of what a receipt says of expected memory."""


@pytest.fixture(autouse=True, scope="module")
def _no_rehearsal_of_shared_runs(request):
    """As the next one, for fixtures of a module, which are made before those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        _rehearse_nothing(request, patch)
        yield


@pytest.fixture(autouse=True)
def _no_rehearsal_of_runs(request, monkeypatch):
    """A run's memory is predicted by a rehearsal of seconds, which few tests of runs are about."""
    _rehearse_nothing(request, monkeypatch)


def _rehearse_nothing(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> None:
    if {
        "finetune.api",
        "finetune.training.run.run",
    } & sys.modules.keys() and request.module.__name__.split(".")[-1] not in FORETOLD:
        patch.setattr("finetune.estimator.gate.MemoryForecast.predicted", lambda *_: {})


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """A function `made_once(key, make)`: what `make(folder)` gives, made by one of all workers.

    For tests that only read it. The value is pickled for the other workers, so that runs, exports
    and reports are as good as those of a fixture; what stands in `folder` stays there.
    """
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder above is common to all workers
        home = home.parent

    def once(key: str, make):
        from filelock import FileLock

        folder = home / "made" / hashlib.sha256(key.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            value = folder / "value.pickle"
            if not value.exists():
                made = pickle.dumps(make(folder))
                value.write_bytes(made)
        return pickle.loads(value.read_bytes())

    return once


@pytest.fixture
def imported():
    """The trainers' libraries, for a test of warnings: some warn when they are first imported.

    bitsandbytes 0.50 compiles then, for which torch 2.13 imports classes of its deprecated
    `torch.jit`.
    """
    import finetune.training.health.monitor  # noqa: F401


@pytest.fixture
def tried(request):
    """A function that adds an error, its fix and what was done to the report of `--junitxml`."""

    def add(provoked: str, error: FinetuneError, did: str) -> None:
        values = {"provoked": provoked, "error": error.what, "fix": error.fix, "did": did}
        request.node.user_properties.extend(values.items())

    return add


@pytest.fixture
def make_llama():
    """A factory of two-layer Llamas with seeded weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(*, tie: bool = False, seed: int = 0, **overrides):
        torch.manual_seed(seed)
        values = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 272,
            "max_position_embeddings": 128,
            "tie_word_embeddings": tie,
            "use_cache": False,
            "pad_token_id": 0,
        } | overrides
        return LlamaForCausalLM(LlamaConfig(**values)).train()

    return make


@pytest.fixture
def te_engine(monkeypatch):
    """Transformer Engine on a machine that says it is an H100: its own Python, or a stand-in."""
    from tests import te

    on_h100(monkeypatch)
    return te.install(monkeypatch)


def on_h100(monkeypatch) -> None:
    """Let sessions see an H100, where layers would compile: to themselves, but under `traced`."""
    import finetune.training.helper.session

    own = torch.nn.Module.compile

    def compile(module: torch.nn.Module, **asked: str) -> None:
        if asked:
            own(module, **asked)
        else:
            module._compiled_call_impl = module._call_impl

    monkeypatch.setattr(finetune.training.helper.session, "this_device", lambda: H100)
    monkeypatch.setattr(torch.nn.Module, "compile", compile)


@pytest.fixture
def real_te(te_engine):
    """Transformer Engine's own Python; skips without its wheel."""
    if not te_engine.is_real:
        pytest.skip("needs Transformer Engine's wheel: python -m tests.te.fetch")
    return te_engine


@pytest.fixture
def setup_backend(request, monkeypatch):
    """A function that sets FP8 up with a backend; of TE, its own Python or a stand-in."""
    from finetune import setup_fp8_mixed_precision_training

    def setup(backend: str, **kwargs):
        if backend == "te":
            request.getfixturevalue("te_engine")
            return setup_fp8_mixed_precision_training("te", cpu=True, **kwargs)
        return setup_fp8_mixed_precision_training(backend, emulation="allow", cpu=True, **kwargs)

    return setup


@pytest.fixture
def cli(tmp_path, tmp_path_factory, monkeypatch, capsys):
    """A function that runs a command line in this process, in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    # What is installed may be new: `hardware/test_versions.py` has what is said about it.
    monkeypatch.setattr("finetune.hardware.versions.concerns", lambda _: [])

    def run(*words: object) -> SimpleNamespace:
        from finetune.cli.app import main

        monkeypatch.setattr(sys, "argv", ["finetune", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def batch(rows: int = 2, length: int = 32, vocab: int = 272, seed: int = 1) -> dict:
    """Token ids [rows, length] and labels."""
    ids = torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def emulated(**settings):
    """A precision of FP8 that is emulated here."""
    from finetune.precision.settings import PrecisionConfig

    known = {"compute": "fp8", "backend": "emulated", "emulation": "allow"}
    return PrecisionConfig.model_validate(known | settings)


def prepared(model, setup_backend, backend="emulated", *, parameters=None, lr=1e-2, **settings):
    """An accelerator, and a model and optimizer that it has prepared with these settings."""
    accelerator = setup_backend(backend, **settings)
    trained = parameters or [p for p in model.parameters() if p.requires_grad]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(trained, lr=lr))


def step(accelerator, model, optimizer, seed: int = 0) -> None:
    """One step on a batch of its own."""
    accelerator.backward(model(**batch(seed=seed)).loss)
    optimizer.step()
    optimizer.zero_grad()


def train(accelerator, model, optimizer, steps: int = 2) -> None:
    """Some steps."""
    for seed in range(steps):
        step(accelerator, model, optimizer, seed)


def slow_but(quick, values, mark=pytest.mark.slow):
    """Cases of a parametrized test, all of them slow (or `mark`) but those named in `quick`.

    For cross products whose every value goes the same way through the code: `pytest` proves one of
    them, `pytest -m slow` the rest.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else mark,
        )
        for value in values
    ]
