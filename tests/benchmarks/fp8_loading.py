"""Memory while loading a model into FP8 storage, and the error of changing published scales.

    python -m tests.benchmarks.fp8_loading              peaks, on a sharded random checkpoint
    python -m tests.benchmarks.fp8_loading --errors     block scales -> row scales

Each way of loading runs in a process of its own. `live` is the peak of bytes of tensors alive,
counted at every operation (`finetune.training.memory_meter`), also those in pages of a
memory-mapped file;
`anon` is the growth of RssAnon of the process over that of one that has loaded a tiny model, looked
at every millisecond: without such pages, which the system may drop, and with the holes of the heap.
`bound` is 1.15 times the final model and one shard.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

SHARD_MB = 50
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
WAYS = {
    "bf16, not in FP8": ("plain", ""),
    "load_in_fp8 row": ("plain", "row"),
    "load_in_fp8 tensor": ("plain", "tensor"),
    "load_in_fp8 block": ("plain", "block"),
    "saved, reloaded": ("own", None),
    "published in blocks": ("published", None),
    "published, to rows": ("published", "row"),
    "random weights, row": ("random", "row"),
}


def make(folder: Path, shape: dict[str, int], shard_mb: int) -> None:
    """Checkpoints of one random model: plain, our own, published in blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune import load_in_fp8
    from tests.published import FINE_GRAINED, publish

    torch.manual_seed(0)
    config = LlamaConfig(**shape, dtype="bfloat16")
    model = LlamaForCausalLM._from_config(config)
    size = f"{shard_mb}MB"
    model.save_pretrained(folder / "plain", max_shard_size=size)
    shards = len(list((folder / "plain").glob("*.safetensors")))
    publish(
        model, folder / "published", FINE_GRAINED, "block", scale="weight_scale_inv", shards=shards
    )
    load_in_fp8(folder / "plain").save_pretrained(folder / "own", max_shard_size=size)


def load(folder: Path, source: str, granularity: Any) -> Any:
    """The model, in one of the ways that are compared."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune import load_in_fp8
    from finetune.precision.stored import storable
    from finetune.storage.loading import build_stored

    if source == "random":
        config = AutoConfig.from_pretrained(folder / "plain")
        with torch.device("meta"):
            names = storable(AutoModelForCausalLM.from_config(config))
        return build_stored(config, names, granularity)
    if granularity == "":
        return AutoModelForCausalLM.from_pretrained(folder / source, dtype=torch.bfloat16)
    return load_in_fp8(folder / source, granularity)


class Resident(threading.Thread):
    """Peak of RssAnon of this process in bytes, above what it was at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = self._now()
        self.running = True

    def run(self) -> None:
        while self.running:
            self.peak_bytes = max(self.peak_bytes, self._now())
            time.sleep(0.001)

    def stop(self) -> int:
        self.running = False
        self.join()
        return max(self.peak_bytes, self._now()) - self.start_bytes

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("this kernel does not tell RssAnon")


def measure(folder: Path, tiny: Path, source: str, granularity: Any) -> dict[str, int]:
    """Bytes at the peak and of the final model, in this process."""
    from finetune.training.memory_meter import LiveTensors

    for way in (source, "plain"):
        load(tiny, way, granularity or "row")  # imports, thread pools, kernels
    resident = Resident()
    resident.start()
    began = time.perf_counter()
    model = load(folder, source, granularity)
    seconds = time.perf_counter() - began
    anon = resident.stop()
    final = sum(t.nbytes for t in {id(p): p for p in model.parameters()}.values())
    final += sum(b.nbytes for b in model.buffers())
    del model
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the count sees one thread
    with LiveTensors() as live:
        load(folder, source, granularity)
    return {"final": final, "live": live.peak, "anon": anon, "ms": int(seconds * 1000)}


def peaks(layers: int) -> None:
    """Print the table of peaks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "real", SHAPE | {"num_hidden_layers": layers}, SHARD_MB)
        make(folder / "tiny", TINY, SHARD_MB)
        shards = {
            kind: max(f.stat().st_size for f in (folder / "real" / kind).glob("*.safetensors"))
            for kind in ("plain", "own", "published")
        }
        print(f"{'MB':24s} {'final':>7s} {'live':>7s} {'anon':>7s} {'bound':>7s} {'s':>6s}")
        for way, (source, granularity) in WAYS.items():
            call = [sys.executable, "-m", "tests.benchmarks.fp8_loading", "--one", source]
            call += [str(granularity), "--at", name]
            done = subprocess.run(call, check=True, capture_output=True, text=True)
            got = json.loads(done.stdout.splitlines()[-1])
            bound = 1.15 * got["final"] + shards.get(source, 0)
            columns = [got["final"], got["live"], got["anon"], bound]
            print(
                f"{way:24s} " + " ".join(f"{c / 1e6:7.1f}" for c in columns),
                f"{got['ms'] / 1000:6.2f}",
            )


def errors() -> None:
    """Print relative errors ‖W - Ŵ‖ / ‖W‖ of block scales, row scales, and the one on the other."""
    from torch import nn

    from finetune.precision.stored import requantize, store

    def relative(layer: Any, w: torch.Tensor) -> float:
        return float((layer.weight_in(torch.float32) - w).norm() / w.norm())

    def held(w: torch.Tensor, granularity: Any) -> Any:
        layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(w)
        store(layer, granularity)
        return layer

    generator = torch.Generator().manual_seed(0)
    n, k = 1536, 1024
    normal = torch.randn(n, k, generator=generator) * 0.02
    spread = normal * torch.logspace(-2, 0, n)[torch.randperm(n, generator=generator)][:, None]
    heavy = normal * torch.randn(n, k, generator=generator).exp()
    outliers = normal.clone()
    outliers[:, ::97] *= 50
    print(f"{'weights':28s} {'block':>8s} {'row':>8s} {'block->row':>11s} {'√(b²+r²)':>9s}")
    for name, w in {
        "normal": normal,
        "rows over two decades": spread,
        "log-normal tails": heavy,
        "columns 50 times larger": outliers,
    }.items():
        w = w.bfloat16().float()
        block, row = relative(held(w, "block"), w), relative(held(w, "row"), w)
        both = held(w, "block")
        requantize(both, "row")
        after = relative(both, w)
        print(f"{name:28s} {block:8.4f} {row:8.4f} {after:11.4f} {(block**2 + row**2) ** 0.5:9.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.errors:
        errors()
    elif given.one:
        source, granularity = given.one
        folder = Path(given.at)
        kind = None if granularity == "None" else granularity
        print(json.dumps(measure(folder / "real", folder / "tiny", source, kind)))
    else:
        peaks(given.layers)


if __name__ == "__main__":
    main()
