"""`python -m finetune export`: what stock libraries make of its folders, and what it refuses."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import export_run, load_recipe, train
from finetune.config.paths import TINY_LLAMA
from finetune.config.train_keys import TrainSection
from finetune.errors import (
    ConfigError,
    DataError,
    DataNotFoundError,
    MissingExtraError,
    ModelNotFoundError,
    ParityError,
)
from finetune.export import export, parity
from finetune.export import parity as evaluation
from finetune.export.export import FinishedRun, open_run
from finetune.export.folder import writing_to
from finetune.export.merge import merged
from finetune.runs.card import TARGETS as TARGETS_OF_CARD
from finetune.runs.card import without_paths
from tests.conftest import slow_but
from tests.published import FINE_GRAINED, publish

QUIET = Console(quiet=True)
TARGETS = ("adapter", "merged", "fp8", "nvfp4")


def run_recipe(name: str, folder: Path, *overrides: str) -> Path:
    fixed = (
        "data.max_rows=160",
        "data.eval_fraction=0.05",
        "eval.samples=false",
        "precision.health_every=0",
    )
    recipe = load_recipe(name, (*fixed, *overrides))
    return train(recipe, out=folder, console=QUIET).folder


@pytest.fixture(scope="module")
def lora_run(made_once) -> Path:
    """Ten steps of FP8 LoRA, over a base that is stored in several shards."""

    def make(folder: Path) -> Path:
        base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype="auto")
        base.save_pretrained(folder / "base", max_shard_size="900KB")
        AutoTokenizer.from_pretrained(TINY_LLAMA).save_pretrained(folder / "base")
        steps = ("train.max_steps=10", "train.eval_steps=99", "eval.at_start=false")
        return run_recipe("tiny_lora_fp8", folder, f"model.name={folder / 'base'}", *steps)

    return made_once("LoRA run to export", make)


@pytest.fixture(scope="module")
def full_run(made_once) -> Path:
    overrides = ("train.max_steps=3", "train.eval_strategy=no", "data.eval_fraction=0")
    return made_once(
        "full run to export", lambda folder: run_recipe("tiny_full_fp8", folder, *overrides)
    )


@pytest.fixture(scope="module")
def exported(lora_run, made_once):
    """Exports of the LoRA run by their formats, each made when it is first asked for."""

    class Exports(dict):
        def __missing__(self, to: str):
            def make(folder: Path):
                return export_run(lora_run, to, folder / to, console=QUIET)

            self[to] = made_once(f"{to} of the LoRA run", make)
            return self[to]

    return Exports()


@pytest.fixture
def cli(cli, monkeypatch):
    """The command line, wide enough for a line of parity."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    return cli


def reference(run: Path):
    """The run's model by stock libraries alone."""
    finished = open_run(run)
    base = AutoModelForCausalLM.from_pretrained(finished.config.model.name, dtype=torch.bfloat16)
    return PeftModel.from_pretrained(base, finished.model).eval()


def ids(count: int = 64) -> torch.Tensor:
    return torch.arange(3, 3 + count).view(2, -1)


# ------------------------------------------------------------------------------- what is exported


@pytest.mark.parametrize("to", slow_but(["adapter", "merged"], TARGETS))
def test_export_is_complete_and_says_what_it_is(to, exported, lora_run):
    done = exported[to]
    record = json.loads((done.folder / "export.json").read_text())
    assert (record["finished"], record["target"]) == (True, to)
    assert record["run"] == str(lora_run.resolve())
    assert record["proof"] == "proven"
    assert record["rows"] == "16 of 16 eval rows"
    assert record["parity"]["passed"]
    bounds, noise = record["parity"]["bounds"], record["parity"]["noise"]
    if to != "adapter":
        assert record["parity"]["weight_error"] <= 0.6 * bounds["weight_error"]
        assert bounds["logit_error"] == parity.MULTIPLES[to][0] * noise["logit_error"]
        assert 1e-3 < noise["logit_error"] < 0.02
    assert record["versions"]["peft"]
    assert not list(done.folder.parent.glob("*.partial"))
    weights = {"adapter": "adapter_model.safetensors"}.get(to, "model.safetensors")
    assert (done.folder / weights).is_file()
    card = (done.folder / "README.md").read_text()
    assert f"| weights | {TARGETS_OF_CARD[to]} |" in card
    assert "| compared with the trained model | 16 of 16 eval rows: " in card
    for folder in (done.folder, lora_run / "model"):
        text = (folder / "README.md").read_text()
        assert "FP8 verified: " in text
        assert "More Information Needed" not in text
        assert without_paths(text) == text, "no path of this machine"
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY_LLAMA).chat_template


def test_reference_is_the_run_at_its_end(exported, lora_run):
    """The rows are the run's own: averaged as the Trainer does, its held-out loss comes out."""
    finished = open_run(lora_run)
    model = reference(lora_run)
    batches = evaluation.batches_of(finished.config, model).evaluation
    losses = [(len(b["labels"]), float(model(**b).loss.detach())) for b in batches]
    mean = sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)
    assert len(losses) == 4  # of four rows each; batches of the run had eight
    assert exported["merged"].parity.loss_reference == pytest.approx(finished.eval_loss, rel=0.02)
    assert mean == pytest.approx(finished.eval_loss, rel=0.05)


def test_adapter_loads_in_stock_peft(exported, lora_run):
    folder = exported["adapter"].folder
    config = json.loads((folder / "adapter_config.json").read_text())
    named = Path(config["base_model_name_or_path"])
    assert named.is_absolute()
    stock = AutoModelForCausalLM.from_pretrained(named, dtype=torch.bfloat16)
    with torch.inference_mode():
        loaded = PeftModel.from_pretrained(stock, folder).eval()(ids()).logits
        assert torch.equal(loaded, reference(lora_run)(ids()).logits)


def test_merged_is_the_original_with_the_adapter(exported, lora_run):
    folder = exported["merged"].folder
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    expected = reference(lora_run).merge_and_unload().state_dict()
    original = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype="auto").state_dict()
    for name, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16
        size = original[name].float().abs() + expected[name].float().abs()
        error = (tensor.float() - expected[name].float()).abs()
        assert (error <= 2**-6 * size + 1e-9).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("to", ["fp8", "nvfp4"])
def test_quantized_export_reloads_through_transformers(to, exported):
    """Stored in 8 or 4 bits, read by Transformers, and really computed with rounded inputs."""
    done = exported[to]
    held = {}
    for file in done.folder.glob("*.safetensors"):
        held |= load_file(file)
    name = "model.layers.0.mlp.up_proj"
    if to == "fp8":
        assert held[f"{name}.weight"].dtype == torch.float8_e4m3fn
        assert held[f"{name}.weight_scale"].shape == (512, 1)
    else:
        assert held[f"{name}.weight_packed"].dtype == torch.uint8
        assert held[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn
        gate = held["model.layers.0.mlp.gate_proj.weight_global_scale"]
        assert torch.equal(held[f"{name}.weight_global_scale"], gate)
        assert held[f"{name}.input_global_scale"].dtype == torch.float32
        assert f"{name}.weight" not in held
    assert held["lm_head.weight"].dtype == torch.bfloat16
    assert (len(done.quantized), done.kept) == (28, ("lm_head",))

    model = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.bfloat16).eval()
    merged = AutoModelForCausalLM.from_pretrained(exported["merged"].folder, dtype="auto").eval()
    with torch.inference_mode():
        said, expected = model(ids()).logits.float(), merged(ids()).logits.float()
    error = float((said - expected).norm() / expected.norm())
    assert 1e-3 < error < {"fp8": 0.1, "nvfp4": 0.35}[to]
    scheme = model.get_submodule(name).quantization_scheme
    assert scheme.input_activations.num_bits == {"fp8": 8, "nvfp4": 4}[to]


@pytest.mark.slow
def test_quantized_weights_of_a_float32_model_load_without_a_word(full_run, tmp_path):
    """NVFP4 unpacks to BF16, beside float32 norms: the first forward was a `RuntimeError`."""
    assert load_file(full_run / "model" / "model.safetensors")["lm_head.weight"].dtype.itemsize == 4
    out = export_run(full_run, "nvfp4", tmp_path / "out", console=QUIET).folder
    held = load_file(out / "model.safetensors")
    assert {held[f"{name}.weight"].dtype for name in ("lm_head", "model.norm")} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.dtype == torch.bfloat16
    with torch.inference_mode():
        assert model(ids()).logits.isfinite().all()


@pytest.mark.long
def test_full_run_is_copied_and_can_be_quantized(full_run, tmp_path):
    done = export_run(full_run, "merged", tmp_path / "merged", console=QUIET)
    ours, theirs = (load_file(f / "model.safetensors") for f in (done.folder, full_run / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert done.parity.kl == 0
    assert "training rows (the run kept none for evaluation)" in done.rows
    fp8 = export_run(full_run, "fp8", tmp_path / "fp8", console=QUIET)
    assert fp8.parity.kl > 0
    with pytest.raises(ConfigError, match=r"has no adapter(.|\n)*--to merged"):
        export_run(full_run, "adapter", tmp_path / "adapter", console=QUIET)


@pytest.mark.slow
def test_model_of_the_hub(lora_run, tmp_path, monkeypatch):
    """Its weights come from the cache; the adapter names the hub id and the revision."""
    base, asked = lora_run.parents[1] / "base", []

    def snapshot(repo, *, revision, **_):
        asked.append((repo, revision))
        return str(base)

    stock = AutoTokenizer.from_pretrained
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: stock(base))
    run = edited(lora_run, tmp_path / "run", f"name: {base}", "name: org/model")
    run = edited(run, tmp_path / "pinned", "revision: null", "revision: abc123")
    export_run(run, "adapter", tmp_path / "out", console=QUIET)
    assert set(asked) == {("org/model", "abc123")}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "abc123")


def test_model_of_the_hub_that_is_out_of_reach(lora_run, tmp_path):
    base = lora_run.parents[1] / "base"
    run = edited(lora_run, tmp_path / "run", f"name: {base}", "name: org/no-such-model")
    with pytest.raises(ModelNotFoundError, match=r"'org/no-such-model' could not be loaded"):
        export_run(run, "merged", tmp_path / "out", console=QUIET)


# ----------------------------------------------------------------------------------------- parity


def test_rows_that_are_gone_are_said_with_where_their_path_stands(lora_run, tmp_path):
    here = edited(lora_run, tmp_path / "run", "  path: null", "  path: gone.jsonl")
    run = edited(here, tmp_path / "moved", "name: builtin:harbour", "name: null")
    with pytest.raises(DataNotFoundError, match="there is no data file") as caught:
        export_run(run, "adapter", tmp_path / "out", console=QUIET)
    assert str(run / "config.yaml") in caught.value.fix


def broken(folder: Path, into: Path, change) -> Path:
    """A copy of an export with one shard changed."""
    shutil.copytree(folder, into)
    for file in sorted(into.glob("*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return into


def scaled(suffix: str, factor: float, where: str = ""):
    def change(tensors):
        for name in tensors:
            if name.endswith(suffix) and where in name:
                wide = tensors[name].float() * factor
                tensors[name] = wide.to(tensors[name].dtype)

    return change


def transpose_a_block(tensors):
    for name, weight in tensors.items():
        if "layers.1.mlp.down_proj" in name:
            weight[:32, :32] = weight[:32, :32].T.clone()


def swap_nibbles(tensors):
    for name, packed in tensors.items():
        if name.endswith("weight_packed"):
            tensors[name] = packed << 4 | packed >> 4


def leave_out_one_layer(tensors):
    original = load_file(TINY_LLAMA / "model.safetensors")
    for name in tensors:
        if "layers.0.mlp.up_proj" in name:
            tensors[name] = original[name]


def forget_adapter(tensors):
    for name in tensors:
        if "lora_B" in name:
            tensors[name] = torch.zeros_like(tensors[name])


BROKEN = {
    "one layer that was not merged": ("merged", leave_out_one_layer),
    "one merged weight": ("merged", scaled("weight", 1.05, "layers.1.mlp.down_proj")),
    "a transposed block": ("merged", transpose_a_block),
    "FP8 scales": ("fp8", scaled("weight_scale", 1.5)),
    "one FP8 scale": ("fp8", scaled("weight_scale", 2, "layers.3.self_attn.q_proj")),
    "global scales": ("nvfp4", scaled("weight_global_scale", 0.5)),
    "one global scale": ("nvfp4", scaled("weight_global_scale", 0.5, "layers.0.self_attn.q_proj")),
    "one layer's scales": ("nvfp4", scaled("weight_scale", 2, "layers.3.mlp.up_proj")),
    "the order of nibbles": ("nvfp4", swap_nibbles),
    "an adapter without its B": ("adapter", forget_adapter),
}


@pytest.fixture(scope="module")
def said(lora_run):
    """Evaluation batches of the run, and what its model says to them; of an adapter, in BF16."""
    finished = open_run(lora_run)
    found = {
        to: export._observe_reference(finished, Path(finished.config.model.name), to, [])
        for to in ("adapter", "merged")
    }
    base, config = Path(finished.config.model.name), finished.config
    weights = parity.signed_sums(merged(base, config, finished.model, torch.bfloat16))
    seen = {to: reference._replace(weights=weights) for to, (_, reference, _) in found.items()}
    seen["adapter"] = seen["adapter"]._replace(weights={})
    return found["merged"][0].evaluation, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    slow_but(["one layer that was not merged", "global scales"], BROKEN, pytest.mark.long),
)
def test_parity_finds_a_broken_export(what, exported, lora_run, said, tmp_path):
    """What passes it intact: `exported` is there."""
    to, change = BROKEN[what]
    folder = broken(exported[to].folder, tmp_path / "broken", change)
    batches, references = said
    seen = references.get(to, references["merged"])
    found = export.check_export(folder, to, open_run(lora_run), batches, seen)
    with pytest.raises(ParityError, match="does not say what the run's model says"):
        parity.check(found, to, seen.noise, str(folder))


def test_a_weight_that_is_missing_is_not_drawn_by_chance(tmp_path):
    """Where chance draws what is usual, as ones for a norm, figures would say nothing of it."""
    folder = broken(
        TINY_LLAMA, tmp_path / "broken", lambda tensors: tensors.pop("model.norm.weight")
    )
    with pytest.raises(ModelNotFoundError, match="lacks 1 of its weights"):
        evaluation.load_stock(folder, load_recipe("tiny_lora_fp8").config)


def test_original_weights_instead_of_merged_ones_are_found(lora_run, said):
    """An export that lost the adapter altogether is out of even the widest bounds."""
    stock = evaluation.load_stock(TINY_LLAMA, open_run(lora_run).config)
    seen = said[1]["merged"]
    found = parity.compare(seen.outputs, parity.observe(stock, said[0]))
    assert len(found.failures(parity.bounds_of("merged", seen.noise))) >= 3


@pytest.mark.long
@pytest.mark.parametrize("library", [True, False])
def test_a_disk_that_is_full_is_said(library, tmp_path):
    """safetensors has an error of its own for it, which was a traceback."""
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    full = SafetensorError(text) if library else OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(ConfigError, match="No space left on device") as caught,
        writing_to(tmp_path / "out", force=False, keep_clear=()),
    ):
        raise full
    assert "another disk" in caught.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_failed_export_is_left_unfinished(lora_run, tmp_path, cli, monkeypatch):
    monkeypatch.setitem(parity.MULTIPLES, "fp8", (0, 0, "nothing may differ"))
    said = cli("export", lora_run, "--to", "fp8", tmp_path / "out")
    assert said.code == 2
    assert "does not say what the run's model says" in said.err
    assert f"{tmp_path / 'out.partial'} holds it, unfinished" in said.err
    assert not (tmp_path / "out").exists()
    record = json.loads((tmp_path / "out.partial" / "export.json").read_text())
    assert record["finished"] is False
    assert record["parity"]["failed"]
    monkeypatch.undo()
    export_run(lora_run, "fp8", tmp_path / "out", console=QUIET)  # the next try clears it away
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.long
def test_modules_saved_beside_an_adapter_are_in_its_exports(tmp_path, cli):
    """A head, an embedding, a layer, a block and a norm: logits are PEFT's over the base."""
    saved = "lora.modules_to_save=[lm_head, embed_tokens, o_proj, mlp, norm]"
    few = ("train.max_steps=3", "train.learning_rate=0.01", "train.eval_strategy=no")
    run = run_recipe("tiny_lora_bf16", tmp_path, saved, *few)
    finished = open_run(run)
    base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA)
    before = base(ids()).logits
    expected = PeftModel.from_pretrained(base, finished.model).eval()(ids()).logits
    assert not torch.allclose(before, expected, atol=0.1)
    for to, close in (("merged", 0.01), ("fp8", 0.1)):
        said = cli("export", run, "--to", to, tmp_path / to)
        assert said.code == 0, said.err
        model = AutoModelForCausalLM.from_pretrained(tmp_path / to, dtype="auto").eval()
        assert (model(ids()).logits - expected).norm() < close * expected.norm()


def test_verbs_that_read_the_base_again_refuse_another_one(lora_run, tmp_path, cli, monkeypatch):
    """As `resume` does; one that lies elsewhere is the same."""
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    shutil.copytree(lora_run, run := tmp_path / "run")
    shutil.copytree(open_run(run).config.model.name, base := tmp_path / "other")
    recipe = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(recipe.replace(open_run(run).config.model.name, str(base)))
    open_run(run)
    for file in base.glob("*.safetensors"):
        save_file({k: v * 1.02 for k, v in load_file(file).items()}, file, {"format": "pt"})
    tasks = ("--tasks", "builtin:harbour_choice")
    for words in (("export", run, "--to", "merged", "x"), ("generate", run, "hi"),
                  ("evaluate", run, *tasks), ("chat", run), ("serve", run)):  # fmt: skip
        said = cli(*words)
        assert said.code == 2, words
        assert "the base of this adapter is not the one that it was trained on" in said.err
        assert "model.weights: " in said.err


@pytest.mark.slow
def test_an_export_whose_check_fails_by_itself_stays(lora_run, tmp_path, cli, monkeypatch):
    def broken(*_):
        raise AttributeError("Linear has no attribute `modules_to_save`")

    monkeypatch.setattr(export, "_loaded", broken)
    said = cli("export", lora_run, "--to", "merged", tmp_path / "out")
    assert said.code == 2
    assert "could not be checked" in said.err
    assert "AttributeError: Linear has no attribute" in said.err
    assert f"{tmp_path / 'out.partial'} holds it" in said.err
    assert (tmp_path / "out.partial" / "model.safetensors").is_file()


def test_figures_of_models_that_agree_and_that_do_not():
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))

    def seen(loss: float, logits: torch.Tensor, answer=(3, 2)) -> parity.Observation:
        return parity.Observation(loss, 300, logits, [*answer], [2])

    one = seen(2.0, logits)
    same = parity.compare(one, seen(2.0, logits + 3))  # softmax is the same
    assert same.kl < 1e-6
    assert same.logit_error < 1e-6
    assert same.agreement == 1
    assert same.ended
    better = parity.compare(one, seen(1.5, logits))
    assert better.loss_gap == pytest.approx(0.25)  # other weights, whichever loss is lower
    off = parity.compare(one, seen(2.5, -logits))
    assert off.loss_gap == pytest.approx(0.25)
    assert off.logit_error == pytest.approx(2.0)
    assert off.agreement < 0.1
    p, q = (x.double().softmax(-1) for x in (logits, -logits))
    assert off.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    nan = parity.compare(one, seen(float("nan"), logits * float("nan")))
    noise = parity.compare(one, seen(2.0, logits + 1e-3 * logits.flip(0)))
    assert len(nan.failures(parity.bounds_of("nvfp4", noise))) == 3
    runs_on = parity.compare(one, seen(2.0, logits, answer=(3, 2, 4)))
    assert runs_on.failures(parity.bounds_of("merged", noise)) == [
        "an answer that continues after its end token"
    ]


def test_noise_is_that_of_the_model_and_leaves_it_as_it_was(make_llama):
    """Layer by layer, it says what the model in float32 says; the weights are BF16 again."""
    torch.manual_seed(0)
    model = make_llama(num_hidden_layers=3).bfloat16().eval()
    inputs = {"input_ids": ids()}
    batch = [inputs | {"labels": ids()}]
    rounded = parity.observe(model, batch, answers=False)
    with parity.in_float32(model):
        exact = parity.observe(model, batch, answers=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert parity.compare(parity.observe(model, batch, answers=False), rounded).logit_error == 0
    noise = parity.compare(exact, rounded)
    assert 1e-3 < noise.logit_error < 0.05
    model.float()
    assert parity.compare(exact, parity.observe(model, batch)).logit_error < 1e-6


@pytest.mark.parametrize(("loss", "held"), [(0.80, True), (1.9, False), (float("nan"), False)])
def test_a_reference_that_is_not_the_run_is_found(loss, held):
    parity.check_reference(loss, None)
    if held:
        parity.check_reference(loss, 0.77)
        return
    with pytest.raises(ParityError, match="cannot be put together again"):
        parity.check_reference(loss, 0.77)


@pytest.mark.parametrize(
    ("setting", "held"),
    [({}, 2.0), ({"loss_type": "nll"}, 2.0), ({"loss_type": "dft"}, None),
     ({"label_smoothing_factor": 0.1}, None)],
)  # fmt: skip
def test_an_eval_loss_that_is_no_likelihood_is_no_reference(setting, held):
    """A run under label smoothing or DFT could not be exported: its rows were called others."""
    assert parity.likelihood_of(TrainSection(setting), 2.0) == held


def test_rows_to_compare_are_of_all_parts():
    """The first 128 of two files were of one: 25 % from the loss of all, an export was refused."""
    rows = Dataset.from_dict({"n": list(range(1000))})
    chosen = parity._spread(rows, 128)["n"]
    assert len(set(chosen)) == 128
    assert sum(n < 500 for n in chosen) == 64
    assert parity._spread(rows.select(range(5)), 128)["n"] == list(range(5))


def test_rows_without_a_position_that_counts():
    batch = {"input_ids": ids(), "labels": torch.full_like(ids(), -100)}
    model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA)
    with pytest.raises(DataError, match="no position"):
        parity.observe(model, [batch])


# ---------------------------------------------------------------------------------- the destination


@pytest.mark.slow
def test_taken_folder_is_refused_unless_forced(lora_run, tmp_path, exported):
    out = tmp_path / "out"
    shutil.copytree(exported["adapter"].folder, out)
    with pytest.raises(ConfigError, match=r"not empty(.|\n)*--force"):
        export_run(lora_run, "adapter", out, console=QUIET)
    (out / "README.md").write_text("old")
    link = tmp_path / "on another disk"  # it stays a link: what it leads to is replaced
    link.symlink_to(out)
    export_run(lora_run, "adapter", link, force=True, console=QUIET)
    assert link.is_symlink()
    assert (out / "export.json").is_file()
    assert (out / "README.md").read_text() != "old"
    assert not [*tmp_path.glob("*.earlier")]


@pytest.mark.parametrize("record", ["", "{}", '{"finished": true, "files": ["README.md"]}'])
def test_force_removes_only_what_an_export_wrote(record, lora_run, tmp_path):
    thesis, link = tmp_path / "thesis", tmp_path / "link"
    (thesis / "part").mkdir(parents=True)
    (thesis / "part" / "chapter1.tex").write_text("years of work")
    (thesis / "export.json").write_text(record)
    link.symlink_to(thesis)
    for out in (thesis, link):
        with pytest.raises(ConfigError, match=r"no export wrote .*part/chapter1\.tex"):
            export_run(lora_run, "adapter", out, force=True, console=QUIET)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "export.json").write_text("{}")
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="in the way"):
        export_run(lora_run, "adapter", tmp_path / "out", console=QUIET)
    assert (thesis / "part" / "chapter1.tex").is_file()


def replaced(out: Path, text: str) -> None:
    with writing_to(out, force=True, keep_clear=()) as folder:
        (folder / "weights").write_text(text)
        (folder / "export.json").write_text('{"finished": true}')


@pytest.mark.parametrize("call", range(1, 9))
def test_whenever_a_replacement_is_killed_an_export_is_there_whole(call, tmp_path, monkeypatch):
    """Killed before each change of a folder; the next command finds the earlier one or the new."""
    replaced(tmp_path / "out", "earlier")
    changes = []

    def kill_at(real):
        def change(*args, **kwargs):
            changes.append(real.__name__)
            if len(changes) == call:
                raise SystemExit  # no handler runs: this stands behind all of them
            return real(*args, **kwargs)

        return change

    for name in ("replace", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, kill_at(getattr(Path, name)))
    with pytest.raises(SystemExit):
        replaced(tmp_path / "out", "new")
    last = ["replace", "replace", "rename", "rename", "replace", "unlink", "unlink", "rmdir"]
    assert changes == last[:call]
    monkeypatch.undo()
    with (
        pytest.raises(ConfigError, match="an export is there already"),
        writing_to(tmp_path / "out", force=False, keep_clear=()),
    ):
        pass
    assert (tmp_path / "out" / "weights").read_text() == ("new" if call > 4 else "earlier")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["finished"]
    replaced(tmp_path / "out", "newest")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_run_folder_stays_as_it_is(lora_run):
    for inside in (lora_run / "out", lora_run / "model", lora_run):
        with pytest.raises(ConfigError, match=r"is inside(.|\n)*which is read"):
            export_run(lora_run, "adapter", inside, console=QUIET)
    with pytest.raises(ConfigError, match=r"holds(.|\n)*which is read"):
        export_run(lora_run, "adapter", lora_run.parent, force=True, console=QUIET)


@pytest.mark.parametrize("error", slow_but([KeyboardInterrupt], [KeyboardInterrupt, RuntimeError]))
def test_stopped_export_leaves_nothing(error, lora_run, tmp_path, monkeypatch, cli):
    def stop(*_args, **_kwargs):
        assert (tmp_path / "out.partial" / "model.safetensors").is_file()
        raise error

    monkeypatch.setattr(export, "check_export", stop)
    if error is KeyboardInterrupt:
        assert cli("export", lora_run, "--to", "merged", tmp_path / "out").code == 130
    else:
        with pytest.raises(error):
            export_run(lora_run, "merged", tmp_path / "out", console=QUIET)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_command_prints_the_parity(lora_run, tmp_path, cli):
    said = cli("export", lora_run, "--to", "fp8", tmp_path / "out")
    assert said.code == 0
    assert not {"Applying", "Dispatching"} & set(said.err.split()), "bars of compressed-tensors"
    assert "quantized to fp8: 28 linear layers; kept in high precision: lm_head" in said.out
    assert "parity on 16 of 16 eval rows: loss" in said.out
    assert f"next: vllm serve {tmp_path / 'out'}" in said.out.splitlines()
    record = cli("export", lora_run, "--to", "adapter", tmp_path / "json", "--json")
    assert json.loads(record.out)["parity"]["kl"] == 0


@pytest.mark.slow
def test_gguf_is_one_checked_file(lora_run, tmp_path, cli, monkeypatch):
    """By a stand-in of llama.cpp's converter."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("LLAMA_CPP", str(Path(__file__).parent / "llama_cpp"))
    out = tmp_path / "out"
    said = cli("export", lora_run, "--to", "gguf", out)
    assert said.code == 0, said.err
    assert f"next: llama-server -m {out / 'model.gguf'}" in said.out.splitlines()
    assert {f.name for f in out.iterdir()} == {"README.md", "export.json", "model.gguf"}
    record = json.loads((out / "export.json").read_text())["parity"]
    assert 0 < record["logit_error"] < record["noise"]["logit_error"]
    assert f"| weights | {TARGETS_OF_CARD['gguf']} |" in (out / "README.md").read_text()


def test_unknown_target(lora_run, tmp_path, cli):
    said = cli("export", lora_run, "--to", "nvpf4", tmp_path / "out")
    assert said.code == 2
    assert "did you mean 'nvfp4'?" in said.err


def test_not_a_run_folder(lora_run, tmp_path, cli):
    said = cli("export", tmp_path / "nowhere", "--to", "merged", tmp_path / "out")
    assert said.code == 2
    assert "is no run folder" in said.err
    said = cli("export", lora_run.parent, "--to", "merged", tmp_path / "out")
    assert said.code == 2
    assert f"the newest run in it is {lora_run}" in said.err


def copy_of(run: Path, into: Path) -> Path:
    shutil.copytree(run, into, ignore=shutil.ignore_patterns("checkpoints"))
    return into


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        ({"interrupted": True}, "before its end it was stopped"),
        ({"stopped": "loss is NaN"}, "loss is NaN"),
        ({}, "model/ was removed"),
    ],
)
def test_run_without_weights(ended, why, lora_run, tmp_path):
    run = copy_of(lora_run, tmp_path / "run")
    shutil.rmtree(run / "model")
    receipt = json.loads((run / "receipt.json").read_text())
    (run / "receipt.json").write_text(json.dumps(receipt | {"run": ended}))
    with pytest.raises(ConfigError, match=why):
        export_run(run, "merged", tmp_path / "out", console=QUIET)


def edited(run: Path, into: Path, old: str, new: str) -> Path:
    copy_of(run, into)
    config = into / "config.yaml"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    return into


def test_adapter_over_random_weights_is_refused(lora_run, tmp_path):
    run = edited(lora_run, tmp_path / "run", "weights: pretrained", "weights: random")
    with pytest.raises(ConfigError, match=r"stored nowhere(.|\n)*random"):
        export_run(run, "merged", tmp_path / "out", console=QUIET)


@pytest.mark.long
def test_full_run_from_random_weights_is_exported(full_run, tmp_path):
    run = edited(full_run, tmp_path / "run", "weights: pretrained", "weights: random")
    assert export_run(run, "merged", tmp_path / "out", console=QUIET).parity.kl == 0


def test_an_adapter_is_merged_into_what_published_fp8_codes_stand_for(lora_run, tmp_path):
    """In BF16: into the codes themselves rounding would drop it."""
    base, fp8 = lora_run.parents[1] / "base", tmp_path / "base"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    codes = publish(plain, fp8, FINE_GRAINED, "block", scale="weight_scale_inv")
    AutoTokenizer.from_pretrained(base).save_pretrained(fp8)
    run = edited(lora_run, tmp_path / "run", f"name: {base}", f"name: {fp8}")
    receipt = json.loads((run / "receipt.json").read_text())
    del receipt["run"]["model_files"]  # as of a run over this base
    (run / "receipt.json").write_text(json.dumps(receipt))
    assert export_run(run, "merged", tmp_path / "out", console=QUIET).parity.kl < 1e-3
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    adapter = load_file(run / "model" / "adapter_model.safetensors")
    for name, (bits, inverse) in codes.items():
        blocks = inverse.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = bits.view(torch.float8_e4m3fn).float() * blocks[: len(bits), : bits.shape[1]]
        a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"].float() for x in "AB")
        expected = weight.bfloat16().float() + 16 / 8 * b @ a
        torch.testing.assert_close(
            stock.get_submodule(name).weight.float(), expected, rtol=2**-7, atol=2e-4
        )


def test_merging_into_other_quantized_weights_is_refused(lora_run, tmp_path):
    base = lora_run.parents[1] / "base"
    other = shutil.copytree(base, tmp_path / "base")
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (other / "config.json").write_text(json.dumps(config))
    run = edited(lora_run, tmp_path / "run", f"name: {base}", f"name: {other}")
    receipt = json.loads((run / "receipt.json").read_text())
    del receipt["run"]["model_files"]  # as of a run over this base
    (run / "receipt.json").write_text(json.dumps(receipt))
    for to in ("merged", "fp8", "nvfp4"):
        with pytest.raises(
            ConfigError, match=r"\(awq\)(.|\n)*rounding would drop it(.|\n)*--to adapter"
        ):
            export_run(run, to, tmp_path / "out", console=QUIET)
    assert not (tmp_path / "out").exists()


def test_quantized_export_needs_its_extra(lora_run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[export\]"):
        export_run(lora_run, "fp8", tmp_path / "out", console=QUIET)


def test_an_export_of_a_moved_run_names_its_recipe(tmp_path) -> None:
    (tmp_path / "run.json").write_text('{"recipe": "tiny_lora_fp8"}')
    config = load_recipe("tiny_lora_fp8", check_train=False).config
    run = FinishedRun(tmp_path, config, tmp_path / "model", "proven", None)
    equal = parity.Parity(1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 8, 8, 2, True, False)
    record = export._record(run, "merged", tmp_path, "8 rows", equal, None)
    assert record["recipe"] == "tiny_lora_fp8"
