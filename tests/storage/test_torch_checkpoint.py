"""`import`: the model that is written computes what the trainer's own code computes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import load_recipe
from finetune.config.schema import ModelConfig
from finetune.storage.pretrained import load_shape
from finetune.training.model import load_model

WIDTH, HEADS, LENGTH, WORDS = 32, 2, 16, 90
SHAPE = {
    "model_type": "gpt2", "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": LENGTH,
    "vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
PADDED = 128  # rows of nanoGPT's embedding


class NanoBlock(nn.Module):
    """A block with the names of nanoGPT; `attn` and `mlp` are plain containers."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=bias)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=bias)
        self.attn = nn.Module()
        self.attn.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.attn.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.attn.register_buffer("bias", torch.ones(1, 1, LENGTH, LENGTH).tril())
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.mlp.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attn.c_attn(self.ln_1(x)).split(WIDTH, -1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(read.transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class Nano(nn.Module):
    def __init__(self, bias: bool, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(PADDED, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH),
            "h": nn.ModuleList([NanoBlock(bias) for _ in range(2)]),
            "ln_f": nn.LayerNorm(WIDTH, bias=bias),
        })  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, PADDED, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight
        for parameter in self.parameters():  # gains and biases that matter, too
            nn.init.normal_(parameter, std=0.4)

    def forward(self, ids: Tensor) -> Tensor:
        t = self.transformer
        x = t["wte"](ids) + t["wpe"].weight[: ids.shape[1]]
        for block in t["h"]:
            x = block(x)
        return self.lm_head(t["ln_f"](x))


@pytest.fixture
def gpt2(tmp_path, monkeypatch) -> Path:
    """A folder with a small GPT-2's configuration and no weights."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def logits_of(folder: Path, ids: Tensor) -> Tensor:
    model = load_model(ModelConfig(name=str(folder), dtype="float32"))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(("bias", "tied"), [(True, True), (False, False)])
def test_a_checkpoint_of_nanogpt_gives_the_same_logits(bias, tied, gpt2, tmp_path, cli) -> None:
    """Compiled, padded, with a mask and an optimizer; its trainer's GELU is the exact one."""
    torch.manual_seed(0)
    nano, ids = Nano(bias, tied), torch.randint(WORDS, (2, LENGTH))
    state = {f"_orig_mod.{name}": t for name, t in nano.state_dict().items()}
    args = {"n_layer": 2, "bias": bias, "vocab_size": PADDED}
    loss = torch.tensor(3.1)
    whole = {"model": state, "optimizer": {"state": {}}, "model_args": args, "best_val_loss": loss}
    torch.save(whole, "latest.pt")
    done = cli("import", "latest.pt", "--as", gpt2, "mine")
    assert done.code == 0, done.err
    assert ("biases are zero" in done.out) == (not bias)
    assert ("tie_word_embeddings false" in done.out) == (not tied)
    assert "vocab_size 128: 90 tokens" in done.out
    assert "next: python -m finetune RECIPE model.name=mine model.weights=pretrained" in done.out
    with torch.no_grad():
        expected = nano(ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(tmp_path / "mine", ids), expected, rtol=0, atol=1e-4)
    again = cli("import", "latest.pt", "--as", gpt2, "mine")
    assert again.code == 2
    assert "'mine' is there already" in again.err


def test_the_public_bdh_gives_the_same_logits(tmp_path, cli, monkeypatch) -> None:
    """Heads apart, and rotary pairs beside each other."""
    monkeypatch.chdir(tmp_path)
    c = load_shape(ModelConfig(name="builtin:bdh_tiny", weights="random"))
    heads, width, size = c.num_attention_heads, c.hidden_size, c.num_neurons
    size //= heads
    torch.manual_seed(0)
    state = {
        "encoder": torch.randn(heads, width, size) * 0.1,
        "encoder_v": torch.randn(heads, width, size) * 0.1,
        "decoder": torch.randn(heads * size, width) * 0.1,
        "embed.weight": torch.randn(c.vocab_size, width),
        "lm_head": torch.randn(width, c.vocab_size),
        "attn.freqs": torch.ones(1, 1, 1, size),
    }
    torch.save(state, "bdh.pt")
    done = cli("import", "bdh.pt", "--as", "builtin:bdh_tiny", "mine")
    assert done.code == 0, done.err
    assert "next: python -m finetune bdh_tiny_full_fp8" in done.out
    assert AutoTokenizer.from_pretrained("mine").vocab_size <= c.vocab_size
    ids = torch.randint(c.vocab_size, (1, 12))
    angles = torch.arange(12)[:, None] * c.rope_theta ** (-torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones(12, size // 2), angles.float())

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    x = norm(state["embed.weight"][ids])[:, None]
    for _ in range(c.num_hidden_layers):
        active = (x @ state["encoder"]).relu()
        pairs = torch.view_as_complex(active.unflatten(-1, (-1, 2)).contiguous()) * turn
        turned = torch.view_as_real(pairs).flatten(-2)
        read = norm((turned @ turned.mT).tril(-1) @ x)
        both = active * (read @ state["encoder_v"]).relu()
        written = both.transpose(1, 2).reshape(1, 1, 12, -1) @ state["decoder"]
        x = norm(x + norm(written))
    expected = (x[:, 0] @ state["lm_head"])[:, 1:]  # a first token has nothing to normalize
    found = logits_of(tmp_path / "mine", ids)[:, 1:]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * float(expected.std()))


def test_a_model_of_transformers_is_taken_as_it_is(tmp_path, cli, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_recipe("tiny_full_fp8").config.model
    model = load_model(config)
    torch.save({"state_dict": {f"module.{n}": t for n, t in model.state_dict().items()}}, "a.pt")
    done = json.loads(cli("import", "a.pt", "--as", config.name, "mine", "--json").out)
    assert (done["layout"], done["notes"]) == ("Transformers", [])
    assert done["parameters"] == model.num_parameters()
    again = AutoModelForCausalLM.from_pretrained("mine", dtype="auto")
    assert all(torch.equal(again.state_dict()[n], t) for n, t in model.state_dict().items())
    assert "finetune tiny_full_fp8 " in cli("import", "a.pt", "--as", config.name, "other").out


@dataclass
class Args:
    """A trainer's own class in its checkpoint."""

    width: int = WIDTH


def broken(nano: dict[str, Tensor], how: str) -> object:
    first = "transformer.h.0.ln_1.weight"
    if how == "missing":
        del nano[first]
    elif how == "more":
        nano["transformer.h.7.ln_1.weight"] = nano[first]
    elif how == "shape":
        nano[first] = torch.ones(WIDTH + 1)
    elif how == "nan":
        nano[first] = torch.full((WIDTH,), math.nan)
    elif how == "codes":
        nano[first] = torch.ones(WIDTH, dtype=torch.uint8)
    elif how == "twice":
        nano[f"module.{first}"] = nano[first] + 1
    elif how == "number":
        nano[7] = nano[first]
    elif how == "meta":
        nano[first] = nano[first].to("meta")
    elif how == "sparse":
        nano[first] = nano[first].to_sparse()
    elif how == "numbers":
        return dict(enumerate(nano.values()))
    elif how == "code":
        return {"model": nano, "config": Args()}
    elif how == "none":
        return {"step": 3}
    return nano


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "'shape' lacks 1 of its weights"),
        ("more", "transformer.h.7.ln_1.weight: "),
        ("shape", "[33] in the file, [32] by config.json"),
        ("nan", "1 of 29 tensors are not finite"),
        ("codes", "1 of 29 tensors are no floats of 16 bits"),
        ("code", "test_torch_checkpoint.Args"),
        ("none", "latest.pt is a dict of step"),
        ("numbers", "31 of 31 tensors have no name"),
        ("number", "1 of 32 tensors have no name"),
        ("twice", "1 of 32 tensors have no name, or that of another behind `module.`"),
        ("meta", "1 are sparse or without numbers"),
        ("sparse", "1 are sparse or without numbers"),
        ("cut", "cannot be read as tensors"),
        ("text", "cannot be read as tensors"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_nothing(how, said, gpt2, cli) -> None:
    torch.save(broken(Nano(bias=True).state_dict(), how), "latest.pt")
    if how in ("cut", "text"):
        content = Path("latest.pt").read_bytes()[:4000] if how == "cut" else b"step 3, loss 2.1"
        Path("latest.pt").write_bytes(content)
    found = cli("import", "latest.pt", "--as", gpt2.name, "mine")
    assert found.code == 2
    assert said in " ".join(found.err.split())
    assert sorted(path.name for path in Path().iterdir()) == ["latest.pt", "shape"]


def test_a_file_or_model_that_is_not_there(gpt2, cli) -> None:
    for words, said in (
        (("import", "none.pt", "--as", gpt2, "mine"), "none.pt: No such file"),
        (("import", "none.pt", "--as", "builtin:bdh_tniy", "mine"), "did you mean"),
        (("import", gpt2, "--as", gpt2, "mine"), "shape: Is a directory"),
        (("import", "none.pt", "mine"), "--as"),
        (("import", "none.pt", "--as", "", "mine"), "--as names no model"),
    ):
        found = cli(*words)
        assert found.code == 2
        assert said in found.err
