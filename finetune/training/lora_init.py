"""Adapters that begin as a part of the base, or as its rounding error.

    pissa   the r largest singular directions of W train, and the base is the rest, W - s·B₀·A₀
    olora   likewise, with the first r columns and rows of W = Q R
    loftq   s·B₀·A₀ approximates W - Q(W), the error of the stored base, which stays as it is

PEFT 0.21 has the first two for plain weights, and the third for bitsandbytes on a GPU. Here the
rest is stored after it was taken, as the base is (plain, FP8 codes, NF4), from the weights in 16
bits, which a stored base makes load a second time, into host memory.

Files hold an adapter of the weights as published, not of the rest: with A and B as trained,

    W + s·(B·A - B₀·A₀) = W + s·[B, B₀] @ [A; -A₀]          ([N, 2r] @ [2r, K])

is a plain one of rank 2r, for stock PEFT, merges and exports (PEFT's own conversion, by
`path_initial_model_for_weight_conversion`, is the same). What resumes from such a file, or reloads
it, finds A₀ and B₀ there, and with them the same base to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.config.schema import LoraSection, RunConfig
from finetune.errors import ConfigError
from finetune.hardware.device import generators
from finetune.precision.layers import is_conv1d
from finetune.precision.stored import StoredMixin, stored_as
from finetune.precision.swap import Swapped, swap
from finetune.precision.weights import quantize_weight
from finetune.storage import nf4
from finetune.training.scope import ADAPTER, adapted_layers, has_original, reads_base

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Factors(NamedTuple):
    """Factors A [r, K] and B [N, r] of an adapter, in float32."""

    a: Tensor
    b: Tensor


@torch.no_grad()
def begin(model: Any, config: RunConfig, folder: Path | None = None) -> None:
    """Set adapters and base as they begin; files of the model are then of the published weights.

    Adapters that begin by chance are left as they are.

    Args:
        model: with adapters as PEFT made them, and the base as it is stored.
        folder: of an adapter that was trained from the same beginning.
    """
    from finetune.training.model import load_model

    if not reads_base(config):
        return
    lora = config.lora or LoraSection()
    began = _began(folder, lora.r) if folder is not None else {}
    layers = adapted_layers(model)
    is_stored = any(stored_as(layer.get_base_layer()) for layer in layers.values())
    original = None
    if is_stored and has_original(config):
        plain = config.model.model_copy(update={"storage": None, "attention": None})
        original = load_model(plain)
    initial = {}
    for name, layer in layers.items():
        base, s = layer.get_base_layer(), layer.scaling[ADAPTER]
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        now = matrix_of(base)
        w = now if original is None else matrix_of(original.get_submodule(name)).to(now.device)
        if lora.init_lora_weights == "loftq" and not stored_as(base):  # kept: no rounding error
            initial[name] = Factors(torch.zeros_like(a), torch.zeros_like(b))
            continue
        if folder is not None and name not in began:
            raise ConfigError(
                "the adapter was saved by a run with another initialization",
                where=f"{folder}: {name}",
                why="it does not say what was taken out of the base at the beginning",
                fix="take the value of lora.init_lora_weights that it was trained with",
            )
        found = began.get(name) or _factors(lora, w, now, s, config.train.get("seed", 42))
        a.data.copy_(found.a)
        b.data.copy_(found.b)
        start = Factors(a.detach().float().clone(), b.detach().float().clone())
        if lora.init_lora_weights != "loftq":
            _write(base, w - s * start.b @ start.a)  # [N, r] @ [r, K]
        initial[name] = Factors(start.a.cpu(), start.b.cpu())  # for files alone
    swap(model, BegunMixin, initial=initial)


def _factors(lora: LoraSection, w: Tensor, now: Tensor, s: float, seed: int) -> Factors:
    """Factors whose product times s is the part of W, or of the error of `now`, to begin with.

    Args:
        w: weight as published, [N, K].
        now: weight as it is stored.
    """
    kind, r = lora.init_lora_weights, lora.r
    if kind == "olora":
        q, upper = torch.linalg.qr(w)
        return Factors(upper[:r], q[:, :r])
    if kind.startswith("pissa_niter_"):
        with torch.random.fork_rng(generators()):  # alike in each process
            torch.manual_seed(seed)
            u, values, v = torch.svd_lowrank(w, r, niter=int(kind.rpartition("_")[2]))
        vh = v.t()
    else:
        u, values, vh = torch.linalg.svd(w - now if kind == "loftq" else w, full_matrices=False)
    root = (values[:r] / s).sqrt()
    return Factors(root[:, None] * vh[:r], u[:, :r] * root)


# ------------------------------------------------------------------------------------------ layers


def matrix_of(layer: Any) -> Tensor:
    """The weight [N, K] of a linear layer in float32, from any storage."""
    kind = stored_as(layer)
    if isinstance(layer, StoredMixin):
        return layer.weight_in(torch.float32)
    if kind:
        return nf4.weight_of(layer).float()
    return (layer.weight.t() if is_conv1d(type(layer)) else layer.weight).detach().float()


def _write(layer: Any, w: Tensor) -> None:
    """Store a weight [N, K] as the one that the layer has is stored."""
    if isinstance(layer, StoredMixin):
        layer.put_bits(*quantize_weight(w, layer.stored_tile))
    elif stored_as(layer):
        nf4.rewrite(layer, w)
    else:
        layer.weight.data.copy_(w.t() if is_conv1d(type(layer)) else w)


# ------------------------------------------------------------------------------------------- files


class BegunMixin(Swapped):
    """Mixin of a PEFT model: its files are of the weights as published.

    Attributes:
        initial: plain name of each layer -> the factors that it began with.
    """

    in_copies = True
    keeps_name = True
    initial: Mapping[str, Factors]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        this: Any = super()
        this.save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            _add(Path(save_directory), self.initial)

    def load_adapter(self, model_id: Any, adapter_name: str, *_: Any, **__: Any) -> Any:
        """Load what was trained of a file of `save_pretrained`; the base is not changed."""
        from peft import set_peft_model_state_dict
        from peft.utils import load_peft_weights

        this: Any = self
        tensors = load_peft_weights(str(model_id), device="cpu")
        for name, (a, _b) in self.initial.items():
            of_a, of_b = _keys(name)
            tensors[of_a], tensors[of_b] = tensors[of_a][: len(a)], tensors[of_b][:, : len(a)]
        return set_peft_model_state_dict(this, tensors, adapter_name)


def _keys(name: str) -> tuple[str, str]:
    return f"base_model.model.{name}.lora_A.weight", f"base_model.model.{name}.lora_B.weight"


def _add(folder: Path, initial: Mapping[str, Factors]) -> None:
    """Append the initial factors to the adapter in a folder, and double the ranks it declares."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    for name, (a, b) in initial.items():
        of_a, of_b = _keys(name)
        tensors[of_a] = torch.cat([tensors[of_a], -a.to(tensors[of_a])])
        tensors[of_b] = torch.cat([tensors[of_b], b.to(tensors[of_b])], dim=1)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    values["r"] *= 2
    values["lora_alpha"] *= 2**0.5 if values.get("use_rslora") else 2  # s stays
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def _began(folder: Path, r: int) -> dict[str, Factors]:
    """The initial factors in a file of `_add`."""
    from safetensors.torch import load_file

    tensors, began = load_file(folder / WEIGHTS), {}
    for key, a in tensors.items():
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if key == _keys(name)[0] and len(a) == 2 * r:
            began[name] = Factors(-a[r:], tensors[_keys(name)[1]][:, r:])
    return began
