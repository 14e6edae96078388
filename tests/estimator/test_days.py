"""Days of a number of tokens by precision: the estimator's own figures, divided and multiplied."""

from __future__ import annotations

import json
import re

import pytest

from finetune import load_recipe
from finetune.estimator.days import CHANGES, days_of
from finetune.estimator.estimate import estimate
from finetune.units import amount

TOKENS = 3_000_000_000


@pytest.mark.slow
def test_days_are_those_of_the_answer_and_energy_is_power_times_time():
    config = load_recipe("tiny_full_fp8").config
    answer = estimate(config, gpu="H100", tokens=TOKENS, price=0.5)
    spent = days_of(config, [answer.machine], TOKENS, price=0.5).facts()
    found = {(one["gpus"], one["compute"]): one for one in spent}
    assert len(found) == 3 * len(CHANGES)
    assert answer.run_seconds
    assert answer.pair
    assert answer.pair.twin.timing
    assert found[1, "fp8"]["days"] == pytest.approx(answer.run_seconds / 86400)
    assert found[1, "fp8"]["cost"] == pytest.approx(answer.cost)
    twin = TOKENS / answer.pair.twin.timing.tokens_per_s / 86400
    assert found[1, "bf16"]["days"] == pytest.approx(twin)
    for (gpus, compute), one in found.items():
        hours = one["days"] * 24 * gpus
        assert (one["kwh"], one["cost"]) == pytest.approx((hours * 0.7, hours * 0.5))
        assert one["days"] * gpus >= found[1, compute]["days"] * 0.999  # N times at most


@pytest.mark.slow
def test_a_precision_that_cannot_run_there_is_a_dash_with_its_reason(cli):
    words = ("estimate", "tiny_full_bf16", "--gpu", "A100-80GB", "--tokens", "3B")
    done = cli(*words)
    assert "3,000,000,000 tokens" in done.out
    assert "! FP8 on 8 x A100-80GB: " in done.out
    rows = [line.split() for line in done.out.splitlines() if line.startswith("4 x A100-80GB")]
    assert [cell == "-" for cell in rows[0][3:]] == [False, False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", "ten"), "10e9, 10B"),
        (("--tokens", "0"), "10e9, 10B"),
        (("--gpu", "H100,4090", "--fit", "gpus"), "--gpu H100"),
        (("--gpu", "H100,4090", "--whole"), "--gpu H100, or leave it out"),
        (("--gpu", "H100,4090", "--tokens", "1B", "--price", "2"), "price_usd_per_hour"),
        (("--gpu", "H100,H10000", "--tokens", "1B"), "did you mean"),
    ],
)
def test_a_mistake_is_told_with_what_works(cli, words, said):
    done = cli("estimate", "tiny_full_fp8", *words)
    assert done.code == 2
    assert said in " ".join(done.err.split())


@pytest.mark.long
def test_without_a_gpu_the_fix_names_one_that_works_as_typed(cli):
    words = ("estimate", "tiny_full_fp8", "~precision.emulation", "--tokens", "10e9")
    refused = cli(*words)
    assert refused.code == 2
    (gpu,) = re.findall(r"fix: +(--gpu \w+), or another GPU", refused.err)
    found = cli(*words, *gpu.split())
    assert (found.code, "10,000,000,000 tokens" in found.out) == (0, True)


@pytest.mark.slow
def test_fp8_that_a_gpu_lacks_leaves_the_days_of_other_precisions(cli):
    words = ("estimate", "tiny_full_fp8", "precision.emulation=forbid", "--gpu", "A100-80GB")
    done = cli(*words, "--tokens", "3B", "--json")
    assert done.code == 0, done.err
    rows = {(row["compute"], row["gpus"]): row for row in json.loads(done.out)["days"]}
    assert all(rows[compute, 1]["days"] for compute in ("fp32", "bf16"))
    assert rows["fp8", 1]["days"] is None
    assert "FP8 needs 8.9" in rows["fp8", 1]["why"]
    refused = cli(*words)
    assert refused.code == 2
    assert "_bf16 twin" in refused.err
    assert "emulated (" not in refused.err


def test_amounts_as_people_type_them():
    texts = ("10e9", "10B", "10 000M", "10_000_000_000", "10,000,000,000", "0.01t")
    assert [amount(text.replace(" ", "")) for text in texts] == [10**10] * len(texts)
    assert [amount(text) for text in ("", "B", "1.5", "1x", "nan", "inf", "1BB")] == [None] * 7
