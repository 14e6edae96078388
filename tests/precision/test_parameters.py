"""FP8 for weights that are plain parameters: products, experts, and the ways round them."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from finetune import PrecisionConfig, disabled, fp8_matmul, get_receipt, revert
from finetune.errors import ConversionError, PlanError, ProofError
from finetune.precision import convert
from finetune.precision.cases import parameters
from finetune.precision.cases.parameters import ParameterMixin, group_sizes
from finetune.precision.planner import plan
from tests.conftest import batch

RULES = [
    ("emulated", "delayed"),
    ("emulated", "tensorwise"),
    ("emulated", "rowwise"),
    ("torchao", "tensorwise"),
    ("torchao", "rowwise"),
]


class Holder(nn.Module):
    """Multiplies by one parameter in the given way."""

    fp8_matmuls: ClassVar[tuple[str, ...]] = ("w",)

    def __init__(self, *shape: int, form=None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(*shape, generator=generator) / 8)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.w)


def precision(backend: str = "emulated", scaling: str = "tensorwise", **kwargs) -> PrecisionConfig:
    return PrecisionConfig(compute="fp8", backend=backend, scaling=scaling, **kwargs)


def converted(model: nn.Module, chosen: PrecisionConfig) -> nn.Module:
    convert.apply(model, plan(model, chosen))
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, x: Tensor, steps: int = 2) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, dx and dw of the last of some steps (delayed scaling needs a first to see amaxes)."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        model.zero_grad()
        y = model(x)
        (y.float() ** 2 / 2).sum().backward()
    return y.detach(), x.grad, [p.grad for p in model.parameters()]


def linear_twin(weight: Tensor, bias: Tensor | None = None) -> nn.Sequential:
    """A model of one linear layer [N, K]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone())
    return nn.Sequential(layer)


FORMS = {
    "[K, N]": ((32, 48), fp8_matmul, lambda w: w.t()),
    "[N, K]": ((48, 32), lambda x, w: fp8_matmul(x, w.mT), lambda w: w),
    "one of a stack": ((2, 32, 48), lambda x, w: fp8_matmul(x, w[1]), lambda w: w[1].t()),
    "a stack of one": ((1, 32, 48), lambda x, w: fp8_matmul(x, w)[0], lambda w: w[0].t()),
    "heads": (
        (3, 32, 16),
        lambda x, w: fp8_matmul(x[:, None], w).transpose(1, 2).flatten(2),
        lambda w: w.mT.flatten(0, 1),
    ),
}
"""Shape of a parameter, product by it, and the [N, K] weight of the linear layer that does so."""


@pytest.mark.parametrize(("backend", "scaling"), RULES)
@pytest.mark.parametrize("form", FORMS)
def test_bit_equal_to_a_linear_layer(form, backend, scaling) -> None:
    """Output, dx and dw of each way to write a product are those of nn.Linear."""
    shape, write, as_linear = FORMS[form]
    x = tokens(4, 8, 32) if form != "a stack of one" else tokens(32, 32)
    model = Holder(*shape, form=write)
    twin = linear_twin(as_linear(model.w))
    chosen = precision(backend, scaling)
    y, dx, (dw,) = train(converted(nn.Sequential(model), chosen), x)
    y_twin, dx_twin, (dw_twin,) = train(converted(twin, chosen), x)
    assert torch.equal(y, y_twin)
    assert torch.equal(dx, dx_twin)
    assert torch.equal(as_linear(dw), dw_twin)
    plain = write(x, model.w.detach())
    assert not torch.equal(y, plain)
    assert float((y - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize("scaling", ["rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("form", ["[K, N]", "[N, K]"])
def test_bit_equal_in_other_recipes(form, scaling) -> None:
    _, write, as_linear = FORMS[form]
    x, model = tokens(4, 8, 32), Holder(*((32, 64) if form == "[K, N]" else (64, 32)), form=write)
    twin = linear_twin(as_linear(model.w))
    chosen = precision(scaling=scaling)
    y, dx, (dw,) = train(converted(nn.Sequential(model), chosen), x)
    y_twin, dx_twin, (dw_twin,) = train(converted(twin, chosen), x)
    assert torch.equal(y, y_twin)
    assert torch.equal(dx, dx_twin)
    assert torch.equal(as_linear(dw), dw_twin)


@pytest.mark.parametrize(("backend", "scaling"), RULES)
def test_batched_weights_are_as_many_linear_layers(backend, scaling) -> None:
    """x [H, T, K] times w [H, K, N]: each head has the numbers of a linear layer of its own."""
    x, model = tokens(3, 8, 32), Holder(3, 32, 16, form=fp8_matmul)
    slices = model.w.detach().clone().unbind(0)
    y, dx, (dw,) = train(converted(model, precision(backend, scaling)), x, steps=1)
    for head, weight in enumerate(slices):
        twin = converted(linear_twin(weight.t()), precision(backend, scaling))
        y_twin, dx_twin, (dw_twin,) = train(twin, x[head], steps=1)
        assert torch.equal(y[head], y_twin)
        assert torch.equal(dx[head], dx_twin)
        assert torch.equal(dw[head].t(), dw_twin)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    return fp8_matmul(x, w.mT, torch.tensor([5, 5, 12, 20], dtype=torch.int32))


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    pieces = x.split([5, 0, 7, 8])
    return torch.cat([fp8_matmul(piece, w[e].mT) for e, piece in enumerate(pieces)])


@pytest.mark.parametrize(("backend", "scaling"), RULES)
def test_experts_grouped_and_one_by_one(backend, scaling) -> None:
    """Expert 1 has no tokens: the same bits."""
    x = tokens(20, 32)
    results = []
    for form in (by_hand, grouped):
        model = converted(Holder(4, 48, 32, form=form), precision(backend, scaling))
        results.append(train(model, x))
    (y, dx, (dw,)), (y_other, dx_other, (dw_other,)) = results
    assert torch.equal(y, y_other)
    assert torch.equal(dx, dx_other)
    assert torch.equal(dw, dw_other)
    assert not dw[1].any()
    assert all(dw[e].any() for e in (0, 2, 3))
    assert not torch.equal(y, by_hand(x, model.w.detach()))


def test_rows_of_nobody_come_out_as_zero() -> None:
    def tail(x: Tensor, w: Tensor) -> Tensor:
        return fp8_matmul(x, w, torch.tensor([3, 8], dtype=torch.int32))

    model = converted(Holder(2, 32, 16, form=tail), precision())
    y, dx, (dw,) = train(model, tokens(12, 32))
    assert y[:8].any(dim=1).all()
    assert not y[8:].any()
    assert not dx[8:].any()
    assert dw.any()


# ------------------------------------------------------------------------------------ the plan


class Block(nn.Module):
    """A linear layer, a matrix of its own and three experts; parameters of other uses beside."""

    fp8_matmuls: ClassVar[tuple[str, ...]] = ("inner", "experts")

    def __init__(self, odd: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(32, 32)
        self.inner = nn.Parameter(torch.randn(32, odd) / 6)
        self.experts = nn.Parameter(torch.randn(3, 32, odd) / 6)
        self.table = nn.Parameter(torch.randn(64, 32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.proj(self.table[ids])  # [T, 32]
        x = fp8_matmul(fp8_matmul(x, self.inner), self.inner.t())
        scores = x @ x.t()  # nobody's
        heads = fp8_matmul(x, self.experts)  # [3, T, odd]
        return scores.softmax(-1) @ fp8_matmul(heads, self.experts.mT).sum(0)


IDS = torch.arange(48) % 64


@pytest.mark.parametrize("rows", [0, 3, 8, 21])
def test_a_rehearsal_shares_rows_evenly_among_experts(rows) -> None:
    """Fake tensors hold no numbers: sizes of groups cannot be read from them."""
    with FakeTensorMode():
        sizes = group_sizes(torch.empty(8, dtype=torch.int32), rows)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


def test_rows_of_parameters() -> None:
    found = {row.name: row for row in plan(Block(), precision()).layers}
    assert {(n, r.kind, r.owner, r.shape, r.compute) for n, r in found.items()} == {
        ("proj", "linear", "proj", (32, 32), "fp8"),
        ("inner", "parameter", "", (32, 32), "fp8"),
        ("experts", "parameter", "", (32, 32), "fp8"),
    }
    assert found["inner"].reason == "parameter that multiplies"
    frozen = Block()
    frozen.experts.requires_grad_(False)
    row = plan(frozen, precision()).layers[-1]
    assert row.frozen
    assert row.gemms == ("fprop", "dgrad")


def test_keep_and_alignment_and_map() -> None:
    rows = {r.name: r for r in plan(Block(), precision(keep=("experts",))).layers}
    assert rows["experts"].compute == "bf16"
    assert rows["experts"].reason == "kept by pattern 'experts'"
    assert rows["inner"].compute == "fp8"
    rows = {r.name: r for r in plan(Block(odd=24), precision()).layers}
    assert rows["inner"].reason == "K=24 is not a multiple of 16"
    assert rows["experts"].compute == "bf16"
    with pytest.raises(PlanError, match="only linear layers"):
        plan(Block(), precision(map={"inner": "fp32"}))


@pytest.mark.parametrize("names", [("missing",), ("bias",)])
def test_wrong_declaration(names) -> None:
    class Wrong(nn.Linear):
        fp8_matmuls: ClassVar[tuple[str, ...]] = names

    with pytest.raises(PlanError, match=rf"'{names[0]}' is declared to multiply"):
        plan(nn.Sequential(Wrong(32, 32)), precision())


def test_a_declaration_counts_for_subclasses_until_they_have_their_own() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(32, 32))

    class Derived(Theirs):
        pass

    with pytest.raises(PlanError, match="no linear layers, and no parameters declared"):
        plan(Theirs(), precision())
    Theirs.fp8_matmuls = ("kernel",)
    assert [r.name for r in plan(nn.Sequential(Derived()), precision()).layers] == ["0.kernel"]
    Derived.fp8_matmuls = ()
    with pytest.raises(PlanError):
        plan(Derived(), precision())


def test_transformer_engine_takes_no_parameters() -> None:
    rows = {r.name: r for r in plan(Block(), precision("te")).layers}
    assert rows["proj"].compute == "fp8"
    assert "precision.backend=torchao" in rows["inner"].reason
    with pytest.raises(PlanError, match=r"precision\.backend=torchao"):
        plan(Holder(32, 32), precision("te"))


def test_parametrized_weights_stay_high() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Holder(32, 32, form=fp8_matmul))
    nn.utils.parametrizations.weight_norm(model[1], "w")
    row = plan(model, precision()).layers[-1]
    assert (row.name, row.compute) == ("1.w", "bf16")
    assert "computed again" in row.reason
    convert.apply(model, plan(model, precision()))
    assert model(tokens(8, 32)).requires_grad, "the operand is no parameter, and promised to nobody"


# -------------------------------------------------------------------- what cannot run in FP8 raises


@pytest.mark.parametrize(
    ("x", "w", "offs"),
    [
        ((8, 32), (48, 32), None),
        ((8, 32), (32,), None),
        ((8, 32), (2, 2, 32, 16), None),
        ((3, 8, 32), (2, 32, 16), None),
        ((32,), (2, 32, 16), None),
        ((8, 32), (2, 32, 16), 3),
        ((8, 32), (32, 16), 2),
        ((2, 8, 32), (2, 32, 16), 2),
    ],
)
def test_operands_of_other_shapes_are_refused_wherever(x, w, offs) -> None:
    offs = None if offs is None else torch.full((offs,), 8, dtype=torch.int32)
    with pytest.raises(ConversionError, match=r"operands of these shapes[\s\S]*w \["):
        fp8_matmul(tokens(*x), tokens(*w), offs)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (lambda x, w: fp8_matmul(x[..., :24], w[:24]), "K=24 of this product"),
        (lambda x, w: fp8_matmul(x, w[:, :8]), "N=8 of this product"),
    ],
)
@torch.no_grad()
def test_views_that_no_gemm_takes_are_refused(form, reason) -> None:
    model = converted(Holder(32, 32, form=form), precision())
    with pytest.raises(ConversionError, match=rf"'w' is planned in FP8[\s\S]*{reason}"):
        model(tokens(8, 32))


class Two(nn.Module):
    """A linear layer, and a product with a parameter that is declared, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.w = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return fp8_matmul(self.proj(x), self.w.mT)


class Declared(Two):
    fp8_matmuls: ClassVar[tuple[str, ...]] = ("w",)


def test_a_product_that_the_plan_does_not_know_is_refused() -> None:
    """As FP8 it would be a promise that no row of the plan makes."""
    model, x = Two(), tokens(8, 32)
    plain = model(x)
    converted(model, precision())
    with pytest.raises(ConversionError, match=r"by 'w', which is not declared[\s\S]*fp8_matmuls"):
        model(x)
    assert torch.equal(revert(model)(x), plain)
    assert torch.equal(converted(model, PrecisionConfig(compute="bf16"))(x), plain)
    # `keep` is a choice, and a plan made again counts.
    model = converted(Declared(), precision(keep=("w",)))
    assert model(x).requires_grad
    convert.apply(model, plan(model, precision()))
    assert isinstance(model, ParameterMixin)


def test_a_planned_parameter_outside_of_its_modules_forward_is_refused() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Declared()

        def forward(self, x: Tensor) -> Tensor:
            return fp8_matmul(x, self.inner.w) + self.inner(x)

    model, x = Outside(), tokens(8, 32)
    plain = model(x)
    converted(model, precision())
    with pytest.raises(ConversionError, match=r"'inner\.w' is planned[\s\S]*its module's forward"):
        model(x)
    with disabled(model):
        assert torch.equal(model(x), plain)
    assert torch.equal(model.eval()(x), plain)


def test_a_part_checkpointed_inside_of_the_forward_is_refused() -> None:
    def form(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(fp8_matmul, x, w, use_reentrant=False)

    model = converted(Holder(32, 32, form=form), precision())
    with pytest.raises(ConversionError, match="checkpointed inside"):
        model(tokens(16, 32).requires_grad_()).sum().backward()


def test_other_uses_of_a_planned_parameter_are_its_modules_own() -> None:
    def form(x: Tensor, w: Tensor) -> Tensor:
        penalty = (w @ w.t()).square().mean() + w.norm()
        return x @ x.t() * penalty + F.linear(x, x, bias=w[0, :8])

    model = Holder(32, 32, form=form)
    x = tokens(8, 32)
    assert torch.equal(form(x, model.w), converted(model, precision())(x))


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
def test_a_model_that_is_not_prepared_compiles_whole() -> None:
    model, x = Two(), tokens(8, 32)
    expected = model(x)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


# ------------------------------------------------------------------------- a converted model's life


def test_revert_evaluation_copies(setup_backend) -> None:
    model, plain = Block(), Block()
    before = list(model.parameters())
    converted(model, precision())
    assert isinstance(model, ParameterMixin)
    assert type(model).__name__ == "Block"
    assert not torch.equal(model(IDS), plain(IDS))
    with disabled(model):
        assert torch.equal(model(IDS), plain(IDS))
    model.eval()
    assert torch.equal(model(IDS), plain(IDS)), "evaluation is in high precision"
    model.train()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is Block
        assert torch.equal(twin(IDS), plain(IDS))
        assert not [name for name in vars(twin) if name.startswith("fp8_")]
    revert(model)
    assert type(model) is Block
    assert torch.equal(model(IDS), plain(IDS))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    model = converted(model, precision(eval="fp8"))
    trained = model(IDS)
    with torch.inference_mode():
        assert torch.equal(model.eval()(IDS), trained)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("scaling", ["delayed", "rowwise"])
def test_checkpointing_recomputes_the_same(use_reentrant, scaling) -> None:
    class Layers(nn.Module):
        def __init__(self, *, checkpointed: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Holder(32, 32, form=fp8_matmul) for _ in range(2))
            self.checkpointed = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = (
                    checkpoint(layer, x, use_reentrant=use_reentrant)
                    if self.checkpointed
                    else layer(x)
                )
            return x

    results = []
    for checkpointed in (False, True):
        model = converted(Layers(checkpointed=checkpointed), precision(scaling=scaling))
        y, dx, grads = train(model, tokens(16, 32), steps=3)
        results.append([y, dx, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# -------------------------------------------------------------------------------------- the proof


def prepared(model: nn.Module, setup_backend, backend: str = "emulated", **kwargs):
    accelerator = setup_backend(backend, **kwargs)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, *args, **kwargs) -> None:
    y = model(*args, **kwargs)
    accelerator.backward(y.loss if not isinstance(y, Tensor) else y.float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("backend", "scaling"), RULES)
def test_receipt_of_parameters(setup_backend, backend, scaling) -> None:
    run = prepared(Block(), setup_backend, backend, scaling=scaling)
    for _ in range(2):
        step(*run, IDS)
    receipt = get_receipt()
    rows = {row.name: row for row in receipt.layers}
    assert receipt.status == "proven"
    assert receipt.trainable["moved"] == receipt.trainable["before"]
    matmul = 2 * 48 * 32 * 32
    for name, products in (("inner", 2), ("experts", 4)):
        row = rows[name]
        assert (row.fprop, row.dgrad, row.wgrad) == ("fp8", "fp8", "fp8"), name
        # x @ experts is one GEMM of all three; the other way each expert has its own.
        gemms = products
        assert row.calls == dict.fromkeys(("fprop", "dgrad", "wgrad"), gemms), name
        assert row.flops == 3 * matmul * (2 if name == "inner" else 6)
    assert rows["(other)"].fprop == "bf16", "the scores"


def test_frozen_parameter_has_no_weight_gradient(setup_backend) -> None:
    model = Block()
    model.experts.requires_grad_(False)
    run = prepared(model, setup_backend)
    for _ in range(2):
        step(*run, IDS)
    row = next(row for row in get_receipt().layers if row.name == "experts")
    assert (row.fprop, row.dgrad, row.wgrad) == ("fp8", "fp8", "none")
    assert get_receipt().status == "proven"


def test_kept_parameter_is_counted_outside_of_the_layers(setup_backend) -> None:
    run = prepared(Block(), setup_backend, keep=("experts",))
    for _ in range(2):
        step(*run, IDS)
    receipt = get_receipt()
    row = next(row for row in receipt.layers if row.name == "experts")
    assert row.fprop == "none"
    assert row.reason.startswith("multiplied by its module in high precision")
    counted = sum(r.flops for r in receipt.layers if r.name in ("(batched)", "(other)"))
    assert counted >= 3 * 2 * 48 * 32 * 32 * 6
    assert receipt.status == "proven"


@pytest.mark.parametrize("alone", [False, True])
def test_parameters_in_a_bf16_run(setup_backend, alone) -> None:
    """Also of a model that has nothing else, as BDH."""
    setup_backend("emulated")
    from finetune.training.helper.session import install

    install(PrecisionConfig(compute="bf16"))
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), Block()
    if alone:
        model.proj = nn.Identity()
    run = accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(2):
        step(*run, IDS)
    rows = {row.name: row for row in get_receipt().layers}
    for name in ("inner", "experts"):
        assert rows[name].reason.startswith("multiplied by its module in high precision")
    assert get_receipt().status == "proven"


@pytest.mark.parametrize(
    "form",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("tk,kn->tn", x, w),
        lambda x, w: fp8_matmul(x, w.to(torch.bfloat16)),
        lambda x, w: fp8_matmul(x, w.clone()),
        lambda x, w: fp8_matmul(x, w * x.new_full((), 0.5)),
        lambda x, w: F.conv1d(x.t()[None], w[..., None])[0].t(),
        lambda x, w: x * w.sum(),
    ],
)
def test_products_past_fp8_matmul_fail_the_proof(form, setup_backend) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Holder(32, 32, form=form))
    run = prepared(model, setup_backend)
    with pytest.raises(ProofError, match=r"did not run[\s\S]*1\.w[\s\S]*finetune\.fp8_matmul"):
        step(*run, tokens(16, 32))


def test_lookups_and_penalties_do_not_fail_the_proof(setup_backend) -> None:
    """A tied table: rows looked up are tokens, not weights."""

    def form(x: Tensor, w: Tensor) -> Tensor:
        rows = F.embedding(IDS, w) + w[IDS]
        mixed = rows @ rows.t() @ rows  # nobody's
        return fp8_matmul(mixed, w.t()) + (w @ w.t()).square().mean()

    run = prepared(Holder(64, 32, form=form), setup_backend)
    for _ in range(2):
        step(*run, tokens(1))
    row = next(row for row in get_receipt().layers if row.name == "w")
    assert (row.fprop, row.dgrad, row.wgrad) == ("fp8", "fp8", "fp8")
    assert get_receipt().status == "proven"


# --------------------------------------------------------------------- experts of Transformers


def mixtral(implementation: str, **overrides):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=272, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False, output_router_logits=False, **overrides,
    )  # fmt: skip
    model = MixtralForCausalLM(config).train()
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize("backend", ["emulated", "torchao"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral_in_fp8(setup_backend, implementation, backend) -> None:
    model = mixtral(implementation)
    accelerator, model, optimizer = prepared(model, setup_backend, backend, scaling="rowwise")
    accelerator.backward(model(**batch()).loss)
    experts = model.model.layers[0].mlp.experts
    for parameter in (experts.gate_up_proj, experts.down_proj):
        assert all(parameter.grad[e].any() for e in range(4)), "all four experts are in use"
    optimizer.step()
    optimizer.zero_grad()
    step(accelerator, model, optimizer, **batch())
    receipt = get_receipt()
    rows = {row.name.rpartition(".")[2]: row for row in receipt.layers if "experts" in row.name}
    assert rows.keys() == {"gate_up_proj", "down_proj"}
    for name, n in (("gate_up_proj", 128), ("down_proj", 64)):
        row = rows[name]
        assert (row.fprop, row.dgrad, row.wgrad) == ("fp8", "fp8", "fp8")
        assert row.calls == dict.fromkeys(("fprop", "dgrad", "wgrad"), 4), "one for each expert"
        assert row.flops == 3 * 2 * (2 * 32 * 2) * n * 64, "64 tokens, two experts each"
    assert receipt.status == "proven"
    linear = sum(r.flops for r in receipt.layers if r.role == "base")
    fp8 = sum(r.flops for r in receipt.layers if r.fprop == "fp8")
    assert fp8 == linear


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral_kept_high_is_counted(setup_backend, implementation) -> None:
    run = prepared(mixtral(implementation), setup_backend, keep=("experts",))
    for _ in range(2):
        step(*run, **batch())
    receipt = get_receipt()
    assert all(row.fprop == "none" for row in receipt.layers if "experts" in row.name)
    counted = sum(
        r.flops for r in receipt.layers if r.name in ("(batched)", "(other)", "(experts)")
    )
    assert counted >= 3 * 2 * (2 * 32 * 2) * (128 + 64) * 64
    assert receipt.status == "proven"


_SMALL = {"vocab_size": 272, "use_cache": False}
OTHER_FAMILIES = {
    "jetmoe": {
        "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 16,
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 64,
        "ffn_config": {
            "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64,
        },
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000},
    },
}  # fmt: skip


@pytest.mark.parametrize(("family", "stacks"), [("jetmoe", 4), ("dbrx", 3)])
def test_experts_that_their_module_multiplies_have_a_row_that_says_so(
    setup_backend, family, stacks
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **OTHER_FAMILIES[family], **_SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    run = prepared(model.train(), setup_backend)
    for _ in range(2):
        step(*run, **batch())
    receipt = get_receipt()
    rows = [r for r in receipt.layers if r.name.rpartition(".")[2] in ("weight", "w1", "v1", "w2")]
    rows = [r for r in rows if "fp8_matmul in its forward" in r.reason]
    assert len(rows) == stacks
    assert {p for r in rows for p in (r.fprop, r.dgrad, r.wgrad)} == {"none"}
    assert receipt.status == "proven"


def test_shared_experts_in_one_parameter_are_known() -> None:
    from transformers.models.inkling.modeling_inkling import InklingSharedExperts

    config = SimpleNamespace(
        n_shared_experts=2, moe_intermediate_size=64, hidden_size=32, hidden_act="silu"
    )
    model = nn.Sequential(nn.Linear(32, 32), InklingSharedExperts(config))
    names = {layer.name: layer.compute for layer in plan(model, precision()).layers[1:]}
    assert names == {f"1.{n}": "bf16" for n in ("gate_proj", "up_proj", "down_proj")}


def test_experts_under_adapters_of_their_own_run_in_fp8(setup_backend) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    run = prepared(get_peft_model(mixtral("eager"), config).train(), setup_backend)
    for _ in range(2):
        step(*run, **batch())
    receipt = get_receipt()
    rows = [row for row in receipt.layers if "experts" in row.name]
    base = [row for row in rows if row.role == "base"]
    assert [(row.fprop, row.dgrad, row.wgrad) for row in base] == [("fp8", "fp8", "none")] * 2
    adapters = [row for row in rows if row.role == "adapter"]
    assert [(row.fprop, row.dgrad, row.wgrad) for row in adapters] == [("bf16",) * 3] * 2
    assert receipt.status == "proven"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        # Stored [experts, K, N], with biases. The softmax over one expert has no gradient.
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Llama4Text", {"num_local_experts": 4, "interleave_moe_layer_step": 1}),  # one bmm
        ("Qwen3Moe", {"num_experts": 4}),
    ],
)
def test_families_of_experts(setup_backend, family, settings) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=272, use_cache=False,
        pad_token_id=0, **{"num_experts_per_tok": 1} | settings,
    )  # fmt: skip
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).train()
    run = prepared(model, setup_backend)
    for _ in range(2):
        step(*run, **batch())
    rows = [row for row in get_receipt().layers if row.name.endswith(("gate_up_proj", "down_proj"))]
    assert {(row.fprop, row.dgrad, row.wgrad) for row in rows} == {("fp8", "fp8", "fp8")}
    assert len([row for row in rows if "experts" in row.name]) >= 2
    assert get_receipt().status == "proven"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # inductor warns about its own environment
def test_compiled_layers_leave_experts_out(setup_backend) -> None:
    losses = []
    for compile in ("off", "on"):
        torch._dynamo.reset()
        run = prepared(mixtral("eager"), setup_backend, scaling="tensorwise", compile=compile)
        for seed in range(3):
            step(*run, **batch(seed=seed))
        losses.append(run[1](**batch()).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2), "a token may change its expert"
    assert "1 decoder layers" in get_receipt().precision["compile"]
    assert "multiply by parameters are left out" in get_receipt().precision["compile"]
    assert get_receipt().status == "proven"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_interrupted_recomputation_leaves_nothing_open(setup_backend, use_reentrant) -> None:
    model = mixtral("eager")
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    accelerator, model, optimizer = prepared(model, setup_backend)
    experts = model.model.layers[0].mlp.experts

    def interrupt(*_) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise KeyboardInterrupt

    hook = experts.act_fn.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(accelerator, model, optimizer, **batch())
    hook.remove()
    assert not parameters._running
    optimizer.zero_grad()
    for _ in range(2):
        step(accelerator, model, optimizer, **batch())
    rows = [row for row in get_receipt().layers if ".experts." in row.name]
    assert [row.fprop for row in rows] == ["fp8", "fp8"]
    assert {row.calls["fprop"] for row in rows} == {8}, "forward and recomputation"
    assert get_receipt().status == "proven"


def test_auto_takes_torchao_where_transformer_engine_cannot(te_engine) -> None:
    from finetune.config.schema import ModelConfig
    from finetune.training.helper import session
    from finetune.training.model import load_model

    model = load_model(ModelConfig(name="builtin:bdh_tiny", weights="random", dtype="float32"))
    running = session.install(PrecisionConfig(compute="fp8", backend="auto", compile="off"))
    assert running.precision.backend == "te"
    running.prepare_model(model)
    assert running.precision.backend == "torchao"
    assert "plain parameters" in running.resolution.reason
