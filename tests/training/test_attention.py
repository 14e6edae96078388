"""`model.attention`: documents of packed rows are apart without a mask, and what `auto` takes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import finetune
from finetune import load_recipe
from finetune.errors import ConfigError
from finetune.training.helper import varlen
from finetune.training.helper.varlen import UNLIMITED, FixedDocuments, varlen_attention
from finetune.training.model import meta_model, resolve_attention
from tests.conftest import A100, CPU, H100, RTX4090, V100

LENGTHS = (31, 64, 1, 32)
TOKENS = sum(LENGTHS)
PACKED = ("train.packing=true", "train.max_length=128")


@pytest.fixture(scope="module", autouse=True)
def _registered():
    varlen.register()


def boundaries(*lengths: int) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def packed(lengths=LENGTHS, seed: int = 0, **more):
    """A row of documents as TRL's collator makes it."""
    ids = torch.randint(272, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    ends = boundaries(*lengths)
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    } | more  # fmt: skip


def outcome(model: nn.Module, calls: list[dict]) -> tuple[Tensor, Tensor]:
    """Logits of all calls behind one another, and the gradient of their weighted sum."""
    model.zero_grad()
    logits = torch.cat([model(**call).logits for call in calls], dim=1)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def apart(model: nn.Module, ids: Tensor, lengths=LENGTHS) -> tuple[Tensor, Tensor]:
    """The same with one forward per document, by a plain implementation."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = outcome(model, [{"input_ids": part} for part in ids.split(lengths, dim=1)])
    model.set_attn_implementation(before)
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture
def model(make_llama):
    return make_llama(attn_implementation="varlen", use_cache=True, intermediate_size=96)


# --------------------------------------------------------------------------------------- operator


@pytest.mark.slow
@pytest.mark.parametrize("window", [UNLIMITED, 2])
def test_the_operator_is_sound_and_its_gradient_right(window) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(10, heads, width, dtype=torch.float64, requires_grad=True)
        for heads, width in ((4, 4), (2, 4), (2, 3))
    )
    ends = boundaries(3, 0, 6, 1)
    torch.library.opcheck(varlen_attention, (q, k, v, ends, 0.3, window))
    assert torch.autograd.gradcheck(lambda *x: varlen_attention(*x, ends, 0.3, window), (q, k, v))


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    window=st.sampled_from([UNLIMITED, 0, 1, 4, 100]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    block=st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_it_is_masked_attention_over_any_documents(lengths, window, heads, block) -> None:
    """Against a whole masked softmax in float64, with its gradients."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(total, n, d, dtype=torch.float64, generator=generator, requires_grad=True)
        for n, d in ((heads[0], 4), (heads[1], 4), (heads[1], 3))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "BLOCK", block)
        found = varlen_attention(q, k, v, boundaries(*lengths), 0.3, window)
        gradients = torch.autograd.grad(found.square().sum(), (q, k, v))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ahead = torch.arange(total)[:, None] - torch.arange(total)
    seen = (document[:, None] == document) & (ahead >= 0)
    seen &= True if window == UNLIMITED else ahead <= window
    wide = [x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v)]
    scores = torch.einsum("nhd,mhd->hnm", q, wide[0]) * 0.3
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hnm,mhd->nhd", p, wide[1])
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        gradients, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_documents_have_to_cover_the_row() -> None:
    x = torch.randn(8, 2, 4)
    with pytest.raises(ValueError, match="documents end at token 7 of 8"):
        varlen_attention(x, x, x, boundaries(7), 0.5, UNLIMITED)
    for ends in ([2, 8], [0, 5, 3, 8]):  # rows that no document has would be left as they lie
        with pytest.raises(ValueError, match="end at token 8 of 8, and begin at"):
            varlen_attention(x, x, x, torch.tensor(ends, dtype=torch.int32), 0.5, UNLIMITED)


def test_flops_are_those_of_documents() -> None:
    x = torch.randn(12, 4, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        varlen_attention(x, x, x, boundaries(8, 0, 4), 0.5, UNLIMITED).sum().backward()
    product = 2 * (8 * 8 + 4 * 4) * 4 * 8
    assert counter.get_total_flops() == (2 + 5) * product


# ------------------------------------------------------------------------------------ packed rows


@pytest.mark.parametrize(
    "more",
    [
        {"use_cache": False},
        {},  # the model's default, with which plain SDPA lets documents see each other
        {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
        {"cu_seq_lens_q": torch.cat([boundaries(*LENGTHS), torch.tensor([TOKENS] * 3)])},
        {"cu_seq_lens_q": None, "use_cache": False},
    ],
    ids=["trained", "cache", "ones", "empty documents", "positions alone"],
)
def test_packed_rows_are_one_forward_per_document(model, more) -> None:
    row = packed(**more)
    logits, gradient = outcome(model, [row])
    expected = apart(model, row["input_ids"])
    assert error(logits, expected[0]) < 1e-6
    assert error(gradient, expected[1]) < 1e-6
    model.set_attn_implementation("sdpa")
    assert error(outcome(model, [row | {"use_cache": True}])[1], expected[1]) > 0.1


@pytest.mark.parametrize("row", [packed(), {"input_ids": packed()["input_ids"].view(2, 64)}])
def test_a_sliding_window_is_kept(row) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=272, sliding_window=8, attn_implementation="varlen",
    )  # fmt: skip
    model = MistralForCausalLM(config)
    found = outcome(model, [row])
    model.set_attn_implementation("eager")
    expected = outcome(model, [row | {"use_cache": False}])
    config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert error(found[0], expected[0]) < 1e-6
    assert error(found[1], expected[1]) < 2e-6
    assert error(outcome(model, [row])[0], expected[0]) > 0.01


class Largest(TorchDispatchMode):
    """Most elements of a tensor with two equal last sizes of at least one row."""

    def __init__(self) -> None:
        super().__init__()
        self.square = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-2:] == (TOKENS, TOKENS):
                self.square = max(self.square, x.numel())
        return made


@pytest.mark.parametrize(("name", "square"), [("varlen", 0), ("sdpa", TOKENS**2)])
def test_no_tensor_of_a_step_has_row_by_row_elements(model, name, square) -> None:
    model.set_attn_implementation(name)
    with Largest() as seen:
        outcome(model, [packed(use_cache=False)])
    assert seen.square >= square
    assert bool(seen.square) == bool(square)


def test_autocast_narrows_the_operands(model, monkeypatch) -> None:
    seen = []

    def watched(q, *rest):
        seen.append(q.dtype)
        return varlen_attention(q, *rest)

    monkeypatch.setattr(varlen, "varlen_attention", watched)
    query = torch.randn(1, 4, TOKENS, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = varlen.varlen_attention_forward(
            model, query, query, query, None, cu_seq_lens_q=boundaries(*LENGTHS)
        )
    assert seen == [torch.bfloat16]
    assert (out.dtype, out.shape) == (torch.bfloat16, (1, TOKENS, 4, 16))


def test_the_witness_counts_it_as_attention(model) -> None:
    from finetune.precision.planner import plan
    from finetune.precision.proof.witness import ATTENTION, Witness
    from finetune.precision.settings import PrecisionConfig

    witness = Witness(model, plan(model, PrecisionConfig()))
    with witness.watching():
        outcome(model, [packed(use_cache=False)])
    product = 2 * sum(length**2 for length in LENGTHS) * 64  # in each of two layers
    assert witness.seen[ATTENTION, "fprop", "fp32"].flops == 2 * 2 * product
    assert witness.seen[ATTENTION, "dgrad", "fp32"].flops == 2 * 5 * product
    witness.close()


# ------------------------------------------------------------------------------------- other rows


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_and_generation_are_those_of_sdpa(model, side) -> None:
    model.eval()
    ids = torch.randint(1, 272, (2, 24), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    mask = mask if side == "left" else mask.flip(1)
    answers, logits = [], []
    for name in ("varlen", "sdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask).logits[mask.bool()])
        if side == "left":
            answers.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            )
    torch.testing.assert_close(*logits)
    assert side == "right" or torch.equal(*answers)


def test_boundaries_beside_padding_are_refused(model) -> None:
    row = packed(attention_mask=torch.tensor([[0] * 9 + [1] * (TOKENS - 9)]))
    with pytest.raises(ConfigError, match="a mask, and boundaries"):
        model(**row)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"softcap": 30.0}, "soft-capped scores"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "bidirectional"),
    ],
)
def test_attention_that_the_kernel_lacks_is_refused(model, more, what) -> None:
    x = torch.randn(1, 4, TOKENS, 16)
    with pytest.raises(ConfigError, match=f"no {what}"):
        varlen.varlen_attention_forward(
            model, x, x, x, None, cu_seq_lens_q=boundaries(*LENGTHS), **more
        )


# ------------------------------------------------------------------------------------------- CUDA


@pytest.mark.parametrize(
    "takes",
    [{"window_size"}, {"scale", "window_size"}, {"scale", "window_size", "enable_gqa"}],
    ids=["2.11", "2.12", "2.13"],
)
def test_torchs_function_gets_the_arguments_that_it_takes(takes, monkeypatch) -> None:
    """Its signature moves; values that are narrower than queries are padded."""
    torch.manual_seed(0)
    q, k, v = torch.randn(TOKENS, 4, 16), torch.randn(TOKENS, 2, 16), torch.randn(TOKENS, 2, 8)
    ends = boundaries(*LENGTHS)

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, **more):
        assert set(more) == takes
        assert q.shape[-1] == v.shape[-1]
        assert (max_q, max_k) == (64, 64)
        assert more.get("enable_gqa", True), "torch 2.13 refuses grouped heads without it"
        left, right = more["window_size"]
        assert right == 0
        return varlen_attention(q, k, v, cu_q, more.get("scale", 16**-0.5), left)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_TAKES", frozenset(takes))
    for window in (UNLIMITED, 5):
        found = varlen._on_cuda(q, k, v, ends, 64, 0.3, window, "FlashAttention-2")
        torch.testing.assert_close(found, varlen_attention(q, k, v, ends, 0.3, window))


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_takes_cudnn_exactly_where_it_is_to(compiled, monkeypatch) -> None:
    """torch 2.15 compares boundaries by identity, in a graph as outside of it."""
    torch.manual_seed(0)
    q, k = torch.randn(TOKENS, 4, 16), torch.randn(TOKENS, 2, 16)

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, **_):
        ran = q.new_full((1,), float(cu_q is cu_k))
        return varlen_attention(q, k, v, cu_q, scale, UNLIMITED) + ran

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_TAKES", frozenset({"scale", "enable_gqa"}))
    run = varlen._on_cuda
    if compiled:
        run = torch.compile(run, backend="eager", fullgraph=True)
    plain = varlen_attention(q, k, k, boundaries(*LENGTHS), 0.3, UNLIMITED)
    for name, is_one in (("cuDNN", 1.0), ("FlashAttention-2", 0.0)):
        found = run(q, k, k, boundaries(*LENGTHS), 64, 0.3, UNLIMITED, name)
        torch.testing.assert_close(found, plain + is_one)


class Gpu:
    """What is asked of queries on a GPU."""

    is_cuda, shape = True, (8192, 32, 128)

    def __len__(self) -> int:
        return self.shape[0]


@pytest.fixture
def hopper(monkeypatch):
    """torch 2.15 with cuDNN 9.26 on an H100."""
    monkeypatch.setattr(varlen, "installed_torch", lambda: (2, 15, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)


@pytest.mark.usefixtures("hopper")
def test_cudnn_is_taken_where_its_buffers_are_small(monkeypatch) -> None:
    def kernel(documents, longest, window=UNLIMITED):
        return varlen._kernel(Gpu(), documents, longest, window)

    assert [kernel(4, 2048), kernel(32, 256), kernel(32, 2048)] == ["cuDNN"] * 3
    assert kernel(33, 2048) == "FlashAttention-2"
    assert kernel(4, 2048, window=512) == "FlashAttention-2"
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert kernel(4, 2048) == "FlashAttention-2"
    monkeypatch.setattr(varlen.attention, "current_flash_attention_impl", lambda: "FA3")
    assert kernel(4, 2048) == "FlashAttention-3"


@pytest.mark.parametrize(
    ("torch_version", "cudnn", "kernel"),
    [
        ((2, 15, 0), 92600, "varlen, cuDNN"),
        ((2, 15, 0), 92400, "varlen, FlashAttention-2"),
        ((2, 13, 0), 92600, "varlen, FlashAttention-2"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_the_receipt_says_which_kernel_ran(
    torch_version, cudnn, kernel, model, monkeypatch
) -> None:
    assert varlen.executed_attention(model) == "varlen"  # nothing ran
    monkeypatch.setattr(varlen, "installed_torch", lambda: torch_version)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    plain = varlen._kernel
    monkeypatch.setattr(varlen, "_kernel", lambda _, *more: plain(Gpu(), *more))
    with torch.no_grad():
        model(**packed())
    assert varlen.executed_attention(model) == "varlen"  # no training
    model(**packed())
    assert varlen.executed_attention(model) == kernel


def test_the_witness_can_count_the_kernel_of_any_torch() -> None:
    """torch 2.10 and 2.11 have no formula: packed rows on a GPU ended in a KeyError."""
    q, k, v = torch.randn(TOKENS, 4, 16), torch.randn(TOKENS, 2, 16), torch.randn(TOKENS, 2, 16)
    ends, kernel = boundaries(*LENGTHS), torch.ops.torch_attn
    calls = {
        kernel._varlen_attn: (q, k, v, ends, ends, 64, 64, True),
        kernel._varlen_attn_backward: (q, q, k, v, q, q, ends, ends, 64, 64, True, q),
    }
    theirs = {one: flop_registry[one] for one in calls}
    try:
        for one in calls:
            del flop_registry[one]
        varlen.count_kernel()
        for one, operands in calls.items():
            assert flop_registry[one](*operands) == theirs[one](*operands) > 0
    finally:
        flop_registry.update(theirs)


# ------------------------------------------------------------------------------------------- auto


@pytest.mark.parametrize(
    ("recipe", "overrides", "device", "implementation", "reason"),
    [
        ("tiny_full_bf16", PACKED, CPU, "varlen", "packed rows"),
        ("tiny_lora_fp8", PACKED, H100, "varlen", "packed rows"),
        ("tiny_full_bf16", ("train.padding_free=true",), A100, "varlen", "packed rows"),
        ("tiny_full_bf16", (), H100, None, "not packed"),
        ("tiny_full_bf16", (*PACKED, "train.packing_strategy=wrapped"), H100, None, "not packed"),
        ("tiny_full_bf16", (*PACKED, "model.attention=sdpa"), H100, "sdpa", "as configured"),
        ("tiny_full_bf16", PACKED, V100, None, "compute capability 8.0"),
        ("bdh_tiny_full_bf16", PACKED, CPU, None, "of its own"),
        (
            "tiny_full_bf16", (*PACKED, "precision.compute=fp32", "model.dtype=float32"), H100,
            None, "16-bit",
        ),
    ],
)  # fmt: skip
def test_auto_takes_varlen_for_packed_rows(
    recipe, overrides, device, implementation, reason
) -> None:
    config = load_recipe(recipe, overrides).config
    found = resolve_attention(config, meta_model(config), device)
    assert found.implementation == implementation
    assert reason in found.reason
    if implementation is None and "not packed" not in found.reason:
        wanted = load_recipe(recipe, [*overrides, "model.attention=varlen"]).config
        with pytest.raises(ConfigError, match=r"is not available here[\s\S]*~model.attention"):
            resolve_attention(wanted, meta_model(config), device)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_logit_softcapping": 50.0}, "caps attention scores"),
        ({"attention_chunk_size": 64}, "within chunks"),
        ({"attention_dropout": 0.1}, "drops attention weights"),
        ({"is_causal": False}, "both directions"),
        ({"head_dim": 20}, "multiples of 8 up to 192"),
        ({"head_dim": 256}, "multiples of 8 up to 192"),
    ],
)
def test_models_that_the_kernel_cannot_serve_keep_their_own(changes, reason, make_llama) -> None:
    config = load_recipe("tiny_full_bf16", PACKED).config
    model = make_llama()
    for key, value in changes.items():
        setattr(model.config, key, value)
    found = resolve_attention(config, model, RTX4090)
    assert found.implementation is None
    assert reason in found.reason


def test_a_torch_without_windows_keeps_the_models_own(make_llama, monkeypatch) -> None:
    """Before anything is loaded: torch 2.10."""
    packed, model = load_recipe("tiny_full_bf16", PACKED).config, make_llama()
    monkeypatch.setattr(varlen, "_TAKES", frozenset({"is_causal"}))
    found = resolve_attention(packed, model, H100)
    assert found.implementation is None
    assert "without sliding windows" in found.reason
    assert resolve_attention(packed, model, CPU).implementation == "varlen"


def test_sinks_are_seen(make_llama) -> None:
    model = make_llama()
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    config = load_recipe("tiny_full_bf16", PACKED).config
    assert "sinks" in resolve_attention(config, model, H100).reason


# ---------------------------------------------------------------------------------------- batches


def rows_of(tokens: int) -> list[dict]:
    return [{"input_ids": [0] * tokens}]


def test_boundaries_of_all_batches_have_one_shape() -> None:
    batches = iter([(3, 4, 2), (5, 4), (1, 8)])

    def collate(rows):
        return packed(next(batches))

    fixed = FixedDocuments(collate, 4, 9)
    found = [fixed(rows_of(9)) for _ in range(3)]
    assert [b["cu_seq_lens_q"].tolist() for b in found] == [
        [0, 3, 7, 9, 9], [0, 5, 9, 9, 9], [0, 1, 9, 9, 9],
    ]  # fmt: skip
    assert {b["max_length_k"] for b in found} == {9}
    assert all(b["cu_seq_lens_k"] is b["cu_seq_lens_q"] for b in found)


def test_boundaries_of_unknown_rows_grow_by_powers_of_two() -> None:
    batch = FixedDocuments(lambda _: packed((3, 4, 2)), 1, None)(rows_of(9))
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 9, 9]
    assert batch["max_length_q"] == 4


def test_padding_is_one_document() -> None:
    """127 of one token each took as many rows of cuDNN's buffers as the longest has tokens."""
    batch = FixedDocuments(lambda _: packed((3, 4, 1, 1, 1)), 3, 4)(rows_of(7))
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 10]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    last = FixedDocuments(lambda _: packed((3, 1)), 2, 4)(rows_of(4))  # of one token, no padding
    assert last["cu_seq_lens_q"].tolist() == [0, 3, 4]


def test_a_batch_of_unusually_many_documents_has_twice_as_many_boundaries() -> None:
    batch = FixedDocuments(lambda _: packed((1, 2, 3, 4)), 3, 8)(rows_of(10))
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 3, 6, 10, 10, 10]


def test_the_usual_number_of_documents_comes_from_the_rows_of_a_trainer() -> None:
    """One row of tiny documents is no reason to make each batch as large."""
    collator = SimpleNamespace(torch_call=lambda _: packed((3, 4, 2)))
    rows = {"seq_lengths": [[3, 4], [2], [5, 1, 1], *[[6, 1]] * 36, [1] * 40]}
    args = SimpleNamespace(per_device_train_batch_size=2, per_device_eval_batch_size=1)

    class Rows(dict):
        column_names = ("input_ids", "seq_lengths")

    trainer = SimpleNamespace(
        args=args, data_collator=collator, padding_free=True,
        train_dataset=Rows(rows), eval_dataset=None,
    )  # fmt: skip
    varlen.fix_documents(trainer)
    assert (collator.torch_call.documents, collator.torch_call.longest) == (2 * 2 + 1, 6)
    assert varlen._usual([], 4) == 1


@pytest.mark.slow
def test_runs_on_packed_rows_have_the_losses_of_sdpa(tmp_path) -> None:
    settings = [
        *PACKED, "precision.compute=fp32", "model.dtype=float32", "train.max_steps=2",
        "train.logging_steps=1", "train.warmup_steps=0", "train.eval_strategy=no",
        "eval.samples=false", "data.max_rows=24", "train.pad_to_multiple_of=16",
        "train.per_device_train_batch_size=2",
    ]  # fmt: skip
    losses, kernels = [], []
    for name in ("auto", "sdpa"):
        recipe = load_recipe("tiny_full_bf16", [*settings, f"model.attention={name}"])
        report = finetune.train(recipe, out=tmp_path / name, console=Console(quiet=True))
        lines = (report.folder / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
        kernels.append(report.receipt.precision["attention"])
        assert report.receipt.conditions["attention"] == kernels[-1]
        assert report.receipt.status == "proven"
    assert kernels == ["varlen, a loop over documents", "sdpa"]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_eight_batches_of_other_documents_are_one_graph(model, make_llama) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, generator = CompileCounterWithBackend("aot_eager"), torch.Generator().manual_seed(0)
    plain = make_llama(attn_implementation="varlen", use_cache=True, intermediate_size=96)
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for seed in range(8):
        cuts = torch.randperm(TOKENS - 1, generator=generator)[: 1 + seed % 7].sort().values + 1
        lengths = torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([TOKENS])])).tolist()
        made = packed(lengths, seed, use_cache=False)
        row = FixedDocuments(lambda _, made=made: made, 8, TOKENS)(rows_of(TOKENS))
        logits, gradient = outcome(model, [row])
        if not seed % 5:
            expected = apart(plain, row["input_ids"], lengths)
            assert error(logits, expected[0]) < 1e-6
            assert error(gradient, expected[1]) < 2e-6
    assert counter.frame_count == 1
