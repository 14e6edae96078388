"""Every scaling x format x backend: trains a step as asked, or is refused with what to use.

Backend `te` runs as on an H100 or a B200 (`tests.te`); the other two run on this machine. A refusal
must help: the settings that it names are tried, and one must be had.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import pytest
import site_reference
import torch

import finetune.training.helper.session
from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.errors import ConfigError, PrecisionError
from finetune.hardware.device import Device
from finetune.hardware.requirements import resolve
from finetune.precision.facts import EngineName, Fp8Format, Scaling
from finetune.precision.settings import PrecisionConfig
from tests.conftest import B200, CPU, H100, batch, train

BACKENDS, SCALINGS, FORMATS = get_args(EngineName), get_args(Scaling), get_args(Fp8Format)


def machine(backend: str) -> tuple[Device, ...]:
    return (H100, B200) if backend == "te" else (CPU,)


@pytest.fixture
def on(te_engine, monkeypatch):
    """A function that puts a session on a machine and returns the accelerator."""

    def setup(backend: str, device: Device, **settings: Any):
        monkeypatch.setattr(finetune.training.helper.session, "this_device", lambda: device)
        if device.capability is not None:
            te_engine.become(device.capability)
        return setup_fp8_mixed_precision_training(backend, cpu=True, **settings)

    return setup


def one_step(accelerator, make_llama) -> set[tuple[str, str, str]]:
    """What the witness saw of the decoder's layers: fprop, dgrad, wgrad."""
    model = make_llama(num_hidden_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(**batch(length=16)).loss
    accelerator.backward(loss)
    optimizer.step()
    assert bool(loss.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    rows = [row for row in get_receipt().layers if row.role == "base"]
    assert len(rows) == 7
    return {(row.fprop, row.dgrad, row.wgrad) for row in rows}


def wanted(scaling: str, high: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    low = "fp4" if scaling == "nvfp4" else "fp8"
    kept = {*high, "wgrad"} if scaling == "rowwise_with_gw_hp" else {*high}
    return {tuple("bf16" if gemm in kept else low for gemm in ("fprop", "dgrad", "wgrad"))}


def advice(text: str) -> list[dict[str, Any]]:
    """Settings that a refusal names: `backend=te or emulated`, `format=hybrid`, `leave x out`."""
    found: list[dict[str, Any]] = []
    for names in re.findall(r"backend=([a-z]+(?: or [a-z]+\b(?!=))*)", text):
        found += [{"backend": name} for name in names.split(" or ")]
    for key, value in re.findall(r"(format|scaling|compile)=([a-z0-9]+)", text):
        found.append({key: value})
    for value in re.findall(r"high_gemms=\[([a-z,]+)\]", text):
        found.append({"high_gemms": tuple(value.split(","))})
    for name in re.findall(r"leave ([a-z0-9_]+) out", text):
        found.append({name: PrecisionConfig.model_fields[name].default})
    return found


def check_refusal(error: PrecisionError, device: Device, settings: dict[str, Any]) -> None:
    """Every setting that a refusal names can be had somewhere, and one of them on this machine."""

    def can_be_had(offer: dict[str, Any], on: Device) -> bool:
        changed = {"compute": "fp8", "emulation": "allow"} | settings | offer
        try:
            resolve(PrecisionConfig.model_validate(changed), on)
        except PrecisionError:
            return False
        return True

    offers = advice(error.why)
    assert offers, error.why
    assert all(any(can_be_had(o, other) for other in (device, H100, B200, CPU)) for o in offers)
    assert any(can_be_had(offer, device) for offer in offers), error.why


def try_one(on, make_llama, backend: str, device: Device, **settings: Any) -> str:
    """`trained`, or `refused`: both as they should be."""
    try:
        accelerator = on(backend, device, emulation="allow", **settings)
    except PrecisionError as error:
        plain = {("format" if k == "fp8_format" else k): v for k, v in settings.items()}
        check_refusal(error, device, {"backend": backend} | plain)
        return "refused"
    seen = one_step(accelerator, make_llama)
    assert seen == wanted(settings["scaling"], settings.get("high_gemms", ()))
    precision = get_receipt().precision
    assert (precision["backend"], precision["scaling"]) == (backend, settings["scaling"])
    if settings.get("fp8_format"):
        assert precision["format"] == settings["fp8_format"]
    return "trained"


COMBINATIONS = [
    (backend, device, scaling, fmt)
    for backend in BACKENDS
    for device in machine(backend)
    for scaling in SCALINGS
    for fmt in ((None,) if scaling == "nvfp4" else FORMATS)
]


@cache
def table() -> dict[tuple[str, str], dict[str, str]]:
    """The reference's: (scaling, format) -> backend -> its cell."""
    lines = site_reference.combinations().splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    names = ("emulated", "torchao", "te")
    return {
        (row[0].strip("`"), row[1].removesuffix(" (usual)").strip("`")): dict(
            zip(names, row[2:], strict=True)
        )
        for row in rows
    }


@pytest.mark.parametrize(
    ("backend", "device", "scaling", "fmt"),
    COMBINATIONS,
    ids=[
        f"{b}-{d.name.split()[1] if d.kind == 'cuda' else 'cpu'}-{s}-{f}"
        for b, d, s, f in COMBINATIONS
    ],
)
def test_trains_or_is_refused_as_the_table_says(
    on, make_llama, backend, device, scaling, fmt
) -> None:
    happened = try_one(on, make_llama, backend, device, scaling=scaling, fp8_format=fmt)
    cell = table()[scaling, fmt or "E2M1"][backend]
    needed = re.fullmatch(r"(\d+)\.(\d+)\+(, not 12\.0)?", cell)
    if cell == "anywhere":
        assert happened == "trained"
    elif needed:
        least = tuple(map(int, needed.groups()[:2]))
        # torchao was tried on a CPU, where it emulates itself and needs nothing.
        enough = device.capability is None or device.capability >= least
        assert happened == ("trained" if enough else "refused")
    else:
        assert happened == "refused"
        assert "; " in cell, "and says what to use"


def test_an_rtx_5090_has_no_mxfp8_as_the_table_says(on) -> None:
    with pytest.raises(
        PrecisionError, match="has no mxfp8 on NVIDIA GeForce RTX 5090 yet"
    ) as caught:
        on("te", site_reference.RTX5090, scaling="mxfp8")
    check_refusal(caught.value, site_reference.RTX5090, {"backend": "te", "scaling": "mxfp8"})
    assert table()["mxfp8", "e4m3"]["te"].endswith(", not 12.0")


def test_the_table_has_every_combination() -> None:
    rows = {(s, f or "E2M1") for _, _, s, f in COMBINATIONS}
    assert table().keys() == rows


@pytest.mark.parametrize(("scaling", "pow2"), [*((s, True) for s in SCALINGS), ("rowwise", False)])
def test_power_of_two_scales(on, make_llama, scaling, pow2) -> None:
    """A choice where scales are float32; an error where the scaling defines what they are."""
    for backend, device in [(b, d) for b in BACKENDS for d in machine(b)]:
        if scaling in ("mxfp8", "nvfp4"):
            with pytest.raises(ConfigError, match="leave power_of_two_scales out"):
                on(backend, device, scaling=scaling, power_of_two_scales=pow2)
            continue
        happened = try_one(
            on, make_llama, backend, device, scaling=scaling, power_of_two_scales=pow2
        )
        assert backend != "emulated" or happened == "trained"
        if happened == "trained" and backend != "te":
            effective = get_receipt().precision["effective"]
            key = {"emulated": "power_of_two_scales", "torchao": "round_scales_to_power_of_2"}
            assert effective[key[backend]] is pow2


def test_scales_are_powers_of_two_where_asked(make_llama, on) -> None:
    for scaling in ("delayed", "tensorwise", "rowwise", "blockwise"):
        accelerator = on(
            "emulated", CPU, scaling=scaling, power_of_two_scales=True, emulation="allow"
        )
        model = accelerator.prepare(make_llama(num_hidden_layers=1))
        for seed in range(2):
            accelerator.backward(model(**batch(seed=seed)).loss)
        module = model.model.layers[0].mlp.up_proj
        codes = module.fp8_rule.cast("w", module.weight.detach(), 1)
        inverse = codes.inverse if codes.block is None else codes.block
        assert bool((inverse.frexp().mantissa == 0.5).all()), scaling


@pytest.mark.parametrize(
    "high",
    [("wgrad",), ("fprop", "dgrad"), ("dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")],
    ids="+".join,
)
@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_high_gemms(on, scaling, high) -> None:
    """Of Transformer Engine; of the others in test_gemm_precision."""
    settings = {"scaling": scaling, "high_gemms": high}
    for device in machine("te"):
        if len(high) == 3:
            with pytest.raises(ConfigError, match="nothing would run in FP8"):
                on("te", device, **settings)
            continue
        try:
            on("te", device, emulation="allow", **settings)
            happened = "had"  # what the real engine does with it, its stand-in does not know
        except PrecisionError as error:
            check_refusal(error, device, {"backend": "te"} | settings)
            happened = "refused"
        too_old = scaling in ("mxfp8", "nvfp4") and device is H100
        fine = not high or (set(high) == {"dgrad", "wgrad"} and scaling != "delayed")
        assert happened == ("had" if fine and not too_old else "refused")


@pytest.mark.usefixtures("imported")
def test_what_falls_back_to_bf16_leaves_fp8s_settings_behind(on, make_llama) -> None:
    """A map to FP8 and GEMMs kept high ask nothing of a BF16 run."""
    with pytest.warns(UserWarning, match="FP8 was requested, BF16 will run"):
        accelerator = on(
            "auto", CPU, on_unsupported="bf16", high_gemms=("wgrad",),
            map={"output": "fp8", "attn": "fp32"}, keep=("down_proj",), first_n=0,
        )  # fmt: skip
    model = make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.fp8_flop_share == 0
    rows = {row.name: row.fprop for row in receipt.layers}
    assert rows["model.layers.0.self_attn.q_proj"] == "fp32"
    assert rows["model.layers.0.mlp.up_proj"] == rows["lm_head"] == "bf16"
