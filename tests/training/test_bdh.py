"""BDH equals the paper's token-by-token form, and behaves as a causal model of Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from finetune import load_recipe
from finetune.config.schema import ModelConfig
from finetune.errors import ConfigError, ModelNotFoundError
from finetune.storage import bdh
from finetune.storage.bdh import BdhBlock, BdhConfig, BdhForCausalLM, BdhModel
from finetune.storage.pretrained import load_shape, load_tokenizer
from finetune.training.model import load_model, meta_model
from tests.conftest import batch

VOCABULARY = 96


@pytest.fixture
def make():
    """A factory of small BDHs with seeded weights that are large enough to matter."""

    def make_model(seed: int = 0, **overrides) -> BdhForCausalLM:
        torch.manual_seed(seed)
        values = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_neurons": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "dropout": 0.0,
            "initializer_range": 0.2,
            "pad_token_id": 0,
        } | overrides
        return BdhForCausalLM(BdhConfig(**values))

    return make_model


def tokens(rows: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return batch(rows, length, VOCABULARY, seed)["input_ids"]


# ---------------------------------------------------------------------------- the paper's equations


def recurrent_logits(model: BdhForCausalLM, ids: list[int]) -> torch.Tensor:
    """One token after the other, float64 [T, vocabulary]: the reference, by loops over heads.

    The state of a level and head is an N/2 x D matrix of complex numbers: neurons i and i + N/2 are
    real and imaginary part of one, which the rotary turn multiplies by exp(j · t · theta^(-2i/N)).
    """
    config, block = model.config, model.model.block
    heads, size = config.num_attention_heads, config.num_neurons // config.num_attention_heads
    encoder = block.encoder.double().view(-1, heads, size)
    encoder_v, decoder = block.encoder_v.double(), block.decoder.double().view(heads, size, -1)

    def norm(x):
        centred = x - x.mean()
        return centred / (centred.square().mean() + config.layer_norm_eps).sqrt()

    turn = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    empty = torch.zeros(size // 2, config.hidden_size, dtype=torch.complex128)
    states = [[empty.clone() for _ in range(heads)] for _ in range(config.num_hidden_layers)]
    logits = []
    for t, token in enumerate(ids):
        x = norm(model.model.embed_tokens.weight[token].double())
        for level in range(config.num_hidden_layers):
            written = torch.zeros_like(x)
            for h in range(heads):
                active = (x @ encoder[:, h]).clamp(min=0)
                turned = torch.complex(*active.view(2, -1)) * torch.exp(1j * t * turn)
                read = (turned.conj() @ states[level][h]).real
                excited = (norm(read) @ encoder_v[h]).clamp(min=0)
                written = written + (active * excited) @ decoder[h]
                states[level][h] += turned[:, None] * x  # after reading: strictly causal
            x = norm(x + norm(written))
        logits.append(model.lm_head.weight.double() @ x)
    return torch.stack(logits)


@torch.no_grad()
def test_parallel_form_equals_the_recurrence_token_by_token(make) -> None:
    model = make(num_attention_heads=4, rope_theta=50.0)  # turns that matter within 20 tokens
    ids = tokens(rows=1, length=20)
    expected = recurrent_logits(model, ids[0].tolist())
    torch.testing.assert_close(model(ids).logits[0].double(), expected, rtol=0, atol=2e-4)
    assert expected.std() > 0.5, "the comparison has something to compare"


@torch.no_grad()
def test_no_logit_depends_on_a_later_token_and_none_reads_itself(make) -> None:
    model, ids = make(), tokens()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()
    # The first token has no past; were it to read itself, its stream would move.
    streams = model(ids, output_hidden_states=True).hidden_states
    assert len(streams) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(streams[-1][:, 0], streams[0][:, 0], rtol=0, atol=2e-3)
    assert (streams[-1][:, 1] - streams[0][:, 1]).abs().max() > 0.1


# --------------------------------------------------------------------------------- padding, packing


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(make, side) -> None:
    model, ids = make(rope_theta=50.0), tokens()
    filler = torch.zeros(2, 5, dtype=torch.long)
    real = slice(5, None) if side == "left" else slice(0, 12)
    parts = [filler, ids] if side == "left" else [ids, filler]
    mask = torch.cat([torch.full_like(part, part is ids) for part in parts], dim=1)
    padded = model(torch.cat(parts, dim=1), attention_mask=mask).logits[:, real]
    torch.testing.assert_close(padded, model(ids).logits, rtol=0, atol=1e-4)
    other = [part if part is ids else part + 9 for part in parts]
    assert torch.equal(model(torch.cat(other, dim=1), attention_mask=mask).logits[:, real], padded)


@torch.no_grad()
def test_packed_texts_do_not_read_each_other(make) -> None:
    model, ids = make(), tokens(rows=1)
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(ids, position_ids=position_ids).logits
    alone = [model(part).logits for part in ids.split([5, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-4)


def test_a_mask_of_another_shape_is_refused(make) -> None:
    with pytest.raises(ValueError, match=r"attention_mask \[batch, length\], not a 4-dim"):
        make()(tokens(), attention_mask=torch.ones(2, 1, 12, 12))


def test_heads_that_cannot_share_the_neurons_are_refused() -> None:
    with pytest.raises(
        StrictDataclassClassValidationError,
        match=r"num_neurons \(100\) must be a multiple of twice",
    ):
        BdhConfig(num_neurons=100, num_attention_heads=4, hidden_size=32)


# --------------------------------------------------------------------- as a model of Transformers


def test_saved_and_loaded_it_is_the_same_model(make, tmp_path) -> None:
    model, ids = make().eval(), tokens()
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is BdhForCausalLM
    assert not any(info.values()), info
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()
    assert type(AutoModel.from_pretrained(tmp_path)) is BdhModel
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_loss_is_that_of_the_shifted_labels(make) -> None:
    model, ids = make(), tokens()
    labels = ids.clone()
    labels[:, :4] = -100
    out = model(ids, labels=labels)
    rows = nn.functional.log_softmax(out.logits, -1)[:, 3:-1]
    picked = rows.gather(-1, ids[:, 4:, None])
    torch.testing.assert_close(out.loss, -picked.mean())
    assert torch.equal(model(ids, logits_to_keep=2).logits, out.logits[:, -2:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_to_the_bit(make, reentrant, monkeypatch) -> None:
    ids, gradients, runs, hooked = tokens(), {}, [], []
    attend = bdh.attend
    monkeypatch.setattr(bdh, "attend", lambda *args: (runs.append(1), attend(*args))[1])
    for checkpointed in (False, True):
        model = make(dropout=0.3).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.model.block.register_forward_hook(lambda *_: hooked.append(1))
        torch.manual_seed(3)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients[checkpointed] = {name: p.grad for name, p in model.named_parameters()}
    assert len(runs) == 3 + 2 * 3, "three levels, and then each once more in backward"
    assert len(hooked) == 2 * 3, "the block's hooks are not run again"
    for name, gradient in gradients[False].items():
        assert gradient.abs().max() > 0
        assert torch.equal(gradient, gradients[True][name]), name


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}])
def test_generation_is_the_same_with_and_without_cache(make, settings) -> None:
    model, ids = make().eval(), tokens(length=6)
    settings = {"max_new_tokens": 10, "do_sample": False, **settings}
    cached = model.generate(ids, use_cache=True, **settings)
    assert cached.shape == (2, 16)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(9) >= 3).long().expand(2, 9)
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 3:], cached)


def registered() -> list[type]:
    """Our classes that Transformers makes and calls, found among its own subclasses."""
    found, waiting = [], [PreTrainedModel]
    while waiting:
        subclasses = waiting.pop().__subclasses__()
        found += [each for each in subclasses if each.__module__.startswith("finetune.")]
        waiting += subclasses
    models = AutoModelForCausalLM._model_mapping  # to look at all would import all families
    return [
        each for each in found if each.config_class and models.get(each.config_class, None) is each
    ]


@pytest.mark.parametrize("kind", registered())
def test_a_class_that_transformers_calls_reads_the_cache_and_refuses_what_it_does_not_know(
    kind,
) -> None:
    """A new name of the cache in `**kwargs` was a new cache for each token: nonsense."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind.config_class(num_neurons=512, hidden_size=32))
    model, ids = model.eval(), tokens(length=6)
    lengths = []
    model.get_input_embeddings().register_forward_hook(
        lambda *call: lengths.append(call[2].shape[1])
    )
    settings = {"max_new_tokens": 8, "do_sample": False}
    cached = model.generate(ids, use_cache=True, **settings)
    assert lengths == [6, *[1] * 7], "one token a step"
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))
    logits = model(cached).logits[:, -1]
    with torch.no_grad():
        before = model(cached[:, :-1], use_cache=True)
    for name in ("cache", "past_key_values", "next_name"):  # found by type: a cache is what it is
        cache = copy.deepcopy(getattr(before, bdh.CACHE))
        after = model(cached[:, -1:], **{name: cache}).logits[:, -1]
        torch.testing.assert_close(after, logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="next_name"):
        model(ids, next_name=1)


# ---------------------------------------------------------------------------------------- precision


class CountMatmuls(TorchFunctionMode):
    """Outputs of the matmuls whose operand is a parameter of the block, by its name."""

    def __init__(self, block: BdhBlock) -> None:
        super().__init__()
        self.names = {id(getattr(block, name)): name for name in block.fp8_matmuls}
        self.outputs: dict[str, list[torch.Tensor]] = {name: [] for name in block.fp8_matmuls}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = next((self.names[id(a)] for a in args if id(a) in self.names), None)
        if name is not None and func.__name__ in ("matmul", "__matmul__"):
            self.outputs[name].append(out)
        return out


def test_every_parameter_of_the_block_is_multiplied_as_it_is_once_a_level(make) -> None:
    model, ids = make(), tokens()
    block = model.model.block
    assert set(block.fp8_matmuls) == {name for name, _ in block.named_parameters()}
    assert not any(isinstance(m, nn.Linear) for m in block.modules())
    with CountMatmuls(block) as seen:
        model(ids, use_cache=False)
    assert {len(outputs) for outputs in seen.outputs.values()} == {model.config.num_hidden_layers}


def test_a_token_that_reads_nothing_sets_no_gradient_scale(make) -> None:
    model, ids = make(initializer_range=0.02), tokens()
    with CountMatmuls(model.model.block) as seen:
        out = model(ids, labels=ids, use_cache=False)
    for written in seen.outputs["decoder"]:
        written.retain_grad()
    out.loss.backward()
    for written in seen.outputs["decoder"]:
        assert not written[:, 0].any()
        assert not written.grad[:, 0].any()
        assert written.grad[:, 1:-1].abs().amax(-1).all()


class Dtypes(TorchDispatchMode):
    """Operand types of what PyTorch executes."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: list[tuple[torch.dtype, int]] = []
        self.norms: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm"):
            self.matmuls += [(a.dtype, a.ndim) for a in args if a.ndim > 1]
        if name == "native_layer_norm":
            self.norms.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_autocast_multiplies_in_bf16_and_normalises_in_float32(make) -> None:
    model, ids = make(), tokens()
    with Dtypes() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, output_hidden_states=True, use_cache=False)
    levels = model.config.num_hidden_layers
    # A level: two matrices by parameters, and in batches heads by one, scores, and values.
    assert seen.matmuls == [
        (torch.bfloat16, ndim) for ndim in [*[2, 2, 3, 3, 3, 3, 3, 3, 2, 2] * levels, 2, 2]
    ]
    assert seen.norms == {torch.float32}
    assert {x.dtype for x in out.hidden_states} == {torch.float32}, "the stream is not rounded"


def test_attention_runs_in_float32_under_float16(make) -> None:
    """Inner products of large activities are past float16's 65504, and stay finite."""
    model, ids = make(initializer_range=0.02), tokens()
    with torch.no_grad():
        model.model.block.encoder.mul_(1000)
        active = torch.relu(
            model.model(ids, use_cache=False).last_hidden_state @ model.model.block.encoder
        )
        assert active.unflatten(-1, (2, -1)).square().sum(-1).max() > 65504
    with Dtypes() as seen, torch.autocast("cpu", dtype=torch.float16):
        hidden = model.model(ids, use_cache=False).last_hidden_state
    assert hidden.isfinite().all()
    assert seen.matmuls[:6] == [(torch.float16, 2)] * 2 + [(torch.float32, 3)] * 4
    assert seen.norms == {torch.float32}


# ---------------------------------------------------------------------------------- packaged shapes


@pytest.mark.parametrize(
    ("name", "low", "high"), [("bdh_tiny", 1.0e6, 2.0e6), ("bdh_100m", 0.9e8, 1.1e8)]
)
def test_packaged_shape(name, low, high) -> None:
    asked = ModelConfig(name=f"builtin:{name}", weights="random", dtype="float32")
    shape = load_shape(asked)
    tokenizer, note = load_tokenizer(asked)
    assert not note
    assert len(tokenizer) == shape.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (
        shape.pad_token_id,
        shape.eos_token_id,
    )
    model = meta_model(load_recipe(f"{name}_full_bf16").config)
    assert low < model.num_parameters() < high
    for parameter in model.parameters():
        assert all(size % 16 == 0 for size in parameter.shape[-2:])


def test_packaged_shape_is_built_with_random_weights_of_the_initial_range() -> None:
    model = load_model(ModelConfig(name="builtin:bdh_tiny", weights="random", dtype="float32"))
    assert isinstance(model, BdhForCausalLM)
    for parameter in model.parameters():
        assert parameter.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("load", [load_shape, load_model, load_tokenizer])
def test_pretrained_weights_of_a_shape_are_refused(load) -> None:
    with pytest.raises(ConfigError, match=r"shape without weights[\s\S]*model.weights=random"):
        load(ModelConfig(name="builtin:bdh_tiny"))


def test_packaged_models_are_listed() -> None:
    known = "builtin:bdh_100m, builtin:bdh_tiny, builtin:tiny_llama"
    said = rf"did you mean 'builtin:bdh_tiny'[\s\S]*{known}"
    with pytest.raises(ModelNotFoundError, match=said):
        load_shape(ModelConfig(name="builtin:bdh_tny", weights="random"))


def test_what_it_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.attention: sdpa[\s\S]*~model.attention"):
        load_model(ModelConfig(name="builtin:bdh_tiny", weights="random", attention="sdpa"))
    with pytest.raises(ConfigError, match=r"no such adapters[\s\S]*~lora"):
        meta_model(load_recipe("bdh_tiny_full_bf16", ["lora.r=4"]).config)
