"""The double of Transformer Engine's library, against what the engine's own Python has of it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def te(real_te):
    """`transformer_engine.pytorch` on an H100."""
    import transformer_engine.pytorch as te

    return te


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16)


def test_a_linear_layer_in_bf16_is_torchs_to_the_bit(te) -> None:
    torch.manual_seed(0)
    layer = te.Linear(64, 32, params_dtype=torch.bfloat16)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    x, same = normal(2, 16, 64).requires_grad_(), normal(2, 16, 64).requires_grad_()
    y, z = layer(x), torch.nn.functional.linear(same, weight, bias)
    for out in (y, z):
        out.backward(normal(2, 16, 32, seed=1))
    pairs = (
        (y, z),
        (x.grad, same.grad),
        (layer.weight.grad, weight.grad),
        (layer.bias.grad, bias.grad),
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("pow2", [False, True])
def test_codes_of_current_scaling_are_the_references(te, pow2) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
    )

    settings = {"force_pow_2_scales": pow2, "device": "cpu"}
    mine = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, **settings)(normal(64, 48))
    theirs = CurrentScalingQuantizerRef(torch.float8_e4m3fn, pow_2_scales=pow2).quantize(
        normal(64, 48)
    )
    assert torch.equal(mine._data.view(torch.float8_e4m3fn).float(), theirs.data.float())
    assert torch.equal(mine._transpose.view(torch.float8_e4m3fn).float(), theirs.data_t.float())
    assert torch.equal(mine._scale_inv, theirs.scale)


@pytest.mark.parametrize(
    ("tile", "hadamard"), [((1, 16), False), ((16, 16), False), ((1, 16), True)]
)
def test_codes_of_nvfp4_are_the_references(te, tile, hadamard) -> None:
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as reference

    x = normal(64, 48)
    mine = te.NVFP4Quantizer(with_rht=hadamard, with_2d_quantization=tile[0] > 1)(x)
    fp4 = reference.reference_utils.Fp4Formats.E2M1
    theirs = reference.NVFP4QuantizerRef(fp4, quant_tile_shape=tile, with_rht=hadamard).quantize(x)
    for data, scale, codes, block in (
        (mine._rowwise_data, mine._rowwise_scale_inv, theirs.data, theirs.scale),
        (mine._columnwise_data, mine._columnwise_scale_inv, theirs.data_t, theirs.scale_t),
    ):
        unpacked = [reference.cast_from_fp4x2(packed, torch.float32) for packed in (data, codes)]
        assert torch.equal(*unpacked), "zero may have a sign"
        rows, columns = block.shape
        mine_block = scale.view(torch.float8_e4m3fn).float()[:rows, :columns]
        assert torch.equal(mine_block, block.float()), "a scale a row, also of 16 x 16 blocks"


def test_block_formats_are_dequantized_by_the_engine(te) -> None:
    """Its Python reads data and scales as they lie in memory, by row and by column."""
    x = normal(256, 384)
    for dimension in (1, 2):
        quantizer = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimension
        )
        for usage in ({"columnwise": False}, {"rowwise": False}):
            quantizer.set_usage(**({"rowwise": True, "columnwise": True} | usage))
            error = (quantizer(x).dequantize().float() - x.float()).norm() / x.float().norm()
            assert 0.01 < error < 0.04


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scales_are_updated_as_by_the_engines_python(te, monkeypatch, algorithm) -> None:
    """Which has a second way for it, without the kernel. An idle step is the kernel's alone."""
    from transformer_engine.common.recipe import DelayedScaling

    def trained(unfused: str) -> list[torch.Tensor]:
        monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
        torch.manual_seed(0)
        layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
        recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, margin=1)
        states = []
        for step in range(6):
            with te.autocast(recipe=recipe):
                y = layer(normal(16, 32, seed=step) * 3.0 ** (step % 4))
            y.backward(normal(16, 32, seed=step))
            meta = [layer.fp8_meta[f"scaling_{way}"] for way in ("fwd", "bwd")]
            states += [t.clone() for m in meta for t in (m.scale, m.amax_history)]
        return states

    kernel, python = trained("0"), trained("1")
    assert len(kernel) == 24
    # The slots of outputs and input gradients are never used: their scales stay.
    assert all(torch.equal(a, b) for a, b in zip(kernel, python, strict=True))


def test_an_idle_operand_keeps_its_window(te) -> None:
    from transformer_engine_torch import fused_amax_and_scale_update_after_reduction as update

    history, scale = torch.tensor([[0.0, 5.0], [2.0, 0.0], [4.0, 3.0]]), torch.tensor([7.0, 9.0])
    update(history[0].clone(), [history], [scale], "max", te.DType.kFloat8E4M3, 0)
    assert history.tolist() == [[0.0, 0.0], [2.0, 3.0], [4.0, 5.0]]
    assert scale.tolist() == [7.0, pytest.approx(448 / 5)]


def test_a_product_reads_the_codes_of_its_direction(te) -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    quantizer = te.Float8CurrentScalingQuantizer(
        te.DType.kFloat8E4M3, "cpu", rowwise=True, columnwise=False
    )
    x, w = quantizer(normal(32, 48)), quantizer(normal(16, 48))
    assert general_gemm(w, x, torch.bfloat16)[0].shape == (32, 16)
    with pytest.raises(AssertionError, match="were not made"):
        general_gemm(quantizer(normal(16, 48)), quantizer(normal(32, 16)), layout="NN")
    with pytest.raises(AssertionError, match="multiples of 16"):
        general_gemm(quantizer(normal(8, 48)), x, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="has no fused_attn_fwd"):
        tex.fused_attn_fwd()
