"""GGUF files of tiny random models in llama.cpp's engine, beside Transformers in float32.

    LLAMA_CPP=CLONE python -m tests.benchmarks.gguf_engine FAMILY... --python OTHER/bin/python

`CLONE` is llama.cpp's repository, whose converter writes the files; `OTHER` an environment with
llama-cpp-python, its engine (built from source, with dependencies that need not fit ours). Both
read the same 20 rows of 48 random tokens. Printed is the largest difference of any token's
log-probability at a position: the median and the worst position, and the share beyond 0.01. A
router whose choice is a near tie may choose another expert under another rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.export import gguf
from tests.families import config_of, folder_of

ROWS, LENGTH = 20, 48
TOKENS = 1536
"""Of the packaged tokenizer."""
ENGINE = """
import sys
import numpy as np
from llama_cpp import Llama
file, ids, out = sys.argv[1:]
rows = np.load(ids)
engine = Llama(file, n_ctx=rows.shape[1], n_batch=rows.shape[1], logits_all=True, verbose=False)
found = []
for row in rows:
    engine.reset()
    engine.eval(row.tolist())
    found.append(engine.scores[: len(row)].copy())
np.save(out, np.stack(found))
"""


def tiny_file(family: str, folder: Path, clone: str) -> Path:
    """A tiny random model of a family in BF16 in `folder`, as GGUF by the real converter.

    It knows tokenizers by a hash; that of the packaged one, which it does not know, is given.
    """
    script = f"""
import runpy, sys
sys.path[:0] = [{clone!r}, {clone + "/gguf-py"!r}]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda *_: "smollm"
runpy.run_path({clone + "/" + gguf.SCRIPT!r}, run_name="__main__")
"""
    (folder / gguf.SCRIPT).write_text(script)
    home = folder_of(family, folder)
    torch.manual_seed(0)
    shape = config_of(family)
    shape.save_pretrained(home)
    # Of the class that belongs to the family: Qwen 2's adds a token.
    shape.vocab_size = len(AutoTokenizer.from_pretrained(home))
    AutoModelForCausalLM.from_config(shape).bfloat16().save_pretrained(home)
    before = os.environ.get("LLAMA_CPP")
    os.environ["LLAMA_CPP"] = str(folder)
    try:
        gguf.convert(home, folder / "out.gguf", "gguf")
    finally:
        os.environ["LLAMA_CPP"] = before or ""
    return home


def differences(family: str, python: str) -> dict[str, float | str]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = tiny_file(family, folder, os.environ["LLAMA_CPP"])
        model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
        ids = np.random.default_rng(0).integers(3, TOKENS, (ROWS, LENGTH))
        with torch.inference_mode():
            exact = model(torch.from_numpy(ids)).logits
        np.save(folder / "ids.npy", ids)
        files = [str(folder / one) for one in ("out.gguf", "ids.npy", "logits.npy")]
        subprocess.run([python, "-c", ENGINE, *files], check=True, stderr=subprocess.DEVNULL)
        logits = torch.from_numpy(np.load(files[-1])).float()
    # Some converters leave out rows beyond the tokenizer's vocabulary.
    both = min(logits.shape[-1], exact.shape[-1])
    exact = torch.log_softmax(exact[..., :both], -1)
    off = (torch.log_softmax(logits[..., :both], -1) - exact).abs()
    worst = off.amax(-1).flatten()
    shown = {"median": worst.median(), "worst": worst.max(), "beyond 0.01": (worst > 0.01).float()}
    return {"family": family} | {name: round(float(x.mean()), 4) for name, x in shown.items()}


def main() -> None:
    """Print a row for each family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    for family in given.families:
        print(json.dumps(differences(family, given.python)), flush=True)


if __name__ == "__main__":
    main()
