"""A private name that is gone costs one feature, with a line; a stock script trains on."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch

from finetune.errors import PrecisionError, StorageNotComputeError
from finetune.hardware import unpromised
from finetune.hardware.unpromised import HEAD_TAKES, stands, switched_off
from finetune.precision.cases.head import Head
from finetune.training.helper.session import _leave_head
from tests.canary import ROOT
from tests.renamed_trl import rename

DPO = "trl.trainer.dpo_trainer"


@pytest.fixture
def module(monkeypatch):
    """A function that puts a module of such a name and content in the place of a library's."""

    def put(name: str, **content) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    return put


def test_one_feature_is_off_and_a_line_says_what_is_lost(module, monkeypatch) -> None:
    others = {name for name in sys.modules if name.startswith("trl.")}
    for name in others:
        monkeypatch.delitem(sys.modules, name)
    module(DPO, DPOTrainer=type("DPOTrainer", (), {}))
    off = [name for name in unpromised.FEATURES if not stands(name)]
    assert off == ["precomputed"]
    (line,) = switched_off()
    assert line.startswith("off with trl ")
    assert "DPOTrainer._precompute_ref_logps is gone" in line
    assert "precompute_ref_log_probs" in line


def test_a_method_that_reads_another_key_does_not_stand(module) -> None:
    def _precompute_ref_logps(self):
        return self.another_key

    kind = type("DPOTrainer", (), {"_precompute_ref_logps": _precompute_ref_logps})
    module(DPO, DPOTrainer=kind)
    assert not stands("precomputed")


def fused(forward):
    body = {"forward": staticmethod(forward), "apply": lambda *args: forward(None, *args)}
    return type("ChunkedLogProbFunction", (), body)


def takes(ctx, hidden, weight, bias, targets, temperature, chunk_size,
          final_logit_softcapping=None, logit_scale=1.0, outputs=()):  # fmt: skip
    found = (hidden @ weight.t()).log_softmax(-1)
    return (found.gather(1, targets[:, None])[:, 0], None)


def other_order(ctx, weight, hidden, *rest):
    return takes(ctx, hidden, weight, *rest)


def other_result(ctx, *given):
    return (-takes(ctx, *given)[0], None)


other_result.__signature__ = inspect.signature(takes)


@pytest.mark.parametrize(
    ("forward", "stand"), [(takes, True), (other_order, False), (other_result, False)]
)
def test_the_fused_loss_is_tried_on_two_tensors(module, forward, stand) -> None:
    module("trl.kernels", ChunkedLogProbFunction=fused(forward))
    assert stands("head") == stand


def test_our_head_takes_what_it_stands_in_for() -> None:
    own = [*inspect.signature(Head.apply).parameters][1:]
    assert [*map({"softcap": "final_logit_softcapping"}.get, own, own)] == HEAD_TAKES


def test_a_head_of_codes_is_refused_without_its_feature(module) -> None:
    module("trl.kernels", ChunkedLogProbFunction=fused(other_result))
    head = SimpleNamespace(stored=None, owner=SimpleNamespace(name="lm_head"))
    conversion = SimpleNamespace(head=head, revert=lambda: None)
    _leave_head(conversion)
    assert conversion.head is None
    conversion.head = SimpleNamespace(stored=torch.nn.Linear(1, 1), owner=head.owner)
    with pytest.raises(PrecisionError, match=r"lm_head, trl [\s\S]*precision.map.output"):
        _leave_head(conversion)


@pytest.mark.slow
def test_all_stands_with_what_is_installed() -> None:
    import trl
    import trl.kernels

    assert trl.DPOTrainer
    assert trl.KTOTrainer
    assert trl.GRPOTrainer
    assert trl.RLOOTrainer
    assert trl.DistillationTrainer
    assert switched_off() == []


@pytest.mark.parametrize(
    "name",
    [
        "_process_model_before_weight_loading",
        "_process_model_after_weight_loading",
        "_dequantize",
        "get_quantize_ops",
        "param_needs_quantization",
    ],
)
def test_a_quantizer_whose_method_is_not_called_is_an_error(monkeypatch, name) -> None:
    from finetune.storage import trial
    from finetune.storage.quantizer import Fp8StorageConfig, Fp8StorageQuantizer

    trial._check.cache_clear()
    monkeypatch.delattr(Fp8StorageQuantizer, name)
    with pytest.raises(StorageNotComputeError, match=r"transformers \d[\s\S]*fix: +pip install"):
        trial.check_quantizer(Fp8StorageQuantizer(Fp8StorageConfig()))


def test_the_quantizer_that_is_installed_passes_its_trial() -> None:
    from finetune.storage import trial
    from finetune.storage.quantizer import Fp8StorageConfig, Fp8StorageQuantizer

    trial._check.cache_clear()
    trial.check_quantizer(Fp8StorageQuantizer(Fp8StorageConfig()))


def stock(folder, **environment) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.stock_worker", str(folder)],
        cwd=ROOT, env=os.environ | environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


@pytest.mark.long
def test_stock_scripts_train_alike_under_a_trl_whose_private_names_are_renamed(tmp_path) -> None:
    (tmp_path / "trl").mkdir()
    assert {"_precompute_ref_logps", "_tokenize_prompts"} < {*rename(tmp_path / "trl")}
    renamed = {"PYTHONPATH": f"{tmp_path / 'trl'}{os.pathsep}{ROOT}"}
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(stock, tmp_path / "a"), pool.submit(stock, tmp_path / "b", **renamed)]
        before, after = (one.result() for one in both)
    assert [one["trl"] for one in after] == ["1.17.0"] * 4
    assert [one["off"] for one in before] == [[]] * 4
    for old, new in zip(before, after, strict=True):
        assert new["status"] == old["status"] == "proven"
        assert new["share"] == old["share"]
        assert [line.partition(" (")[0] for line in new["off"]] == [
            "off with trl 1.17.0: references that score rows before training, in the precision of "
            "the policy",
            "off with trl 1.17.0: prompts compared with the chat template before the first step",
        ]
        if new["script"] == "dpo_precomputed":  # the feature that is off
            assert new["losses"] != old["losses"]
        else:
            assert new["losses"] == old["losses"]
