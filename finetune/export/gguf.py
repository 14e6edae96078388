"""GGUF, for llama.cpp, Ollama and LM Studio: written by llama.cpp's own converter, checked by us.

`convert_hf_to_gguf.py` knows some 150 architectures, their tokenizers and what each release of
llama.cpp expects; it is a script of that repository and on no index. It is looked for in the folder
`LLAMA_CPP` and on the `PATH`, and run on a merged model. The file is then read again by other code:
`gguf` dequantizes, and Transformers names the tensors and undoes what the format permutes. With
these weights the merged model is compared with the run's (`finetune.export.parity`). Not compared
are tokenizer, chat template and the model's settings, which the converter writes.

A model that reads images becomes two files: llama.cpp holds its tower and projector in one of their
own, which the converter writes when asked again (`--mmproj`), for the families that it knows. No
other code reads that file, so its numbers are the converter's word: BF16, as the model's own are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.errors import ConfigError, install_hint
from finetune.hardware.requirements import require
from finetune.precision.model.towers import decoder_name

TYPES = {"gguf": "bf16", "gguf-q8": "q8_0"}
"""Target -> type of the matrices, as the converter names it."""
FILE, MERGED = "model.gguf", "merged"
"""File of the export, and folder beside it of the model that is converted; removed at the end."""
TOWER = "mmproj-model.gguf"
"""File of tower and projector: the converter puts this word before the name that it is given."""
SCRIPT = "convert_hf_to_gguf.py"
LIKE_LLAMA = ("smollm3", "granite", "arcee")
"""Architectures with q and k permuted as Llama's are, which Transformers (5.23) does not read."""


def converter(target: str) -> Path:
    """Path of llama.cpp's converter.

    Raises:
        ConfigError: it is not here.
        MissingExtraError: the file could not be read back.
    """
    home = os.environ.get("LLAMA_CPP")
    found = os.path.join(home, SCRIPT) if home else shutil.which(SCRIPT)
    if found is None or not Path(found).expanduser().is_file():
        raise ConfigError(
            f"--to {target} needs llama.cpp's converter",
            where=f"LLAMA_CPP={home}" if home else "LLAMA_CPP is not set",
            why=f"{SCRIPT} is a part of llama.cpp's repository, and on no package index",
            fix="git clone --depth 1 https://github.com/ggml-org/llama.cpp, and set LLAMA_CPP to "
            "its folder (nothing has to be built)",
        )
    require(f"--to {target}", "gguf", install_hint("gguf"))
    return Path(found).expanduser()


def convert(model: Path, out: Path, target: str) -> None:
    """Convert the merged model in a folder to the file `out`.

    Raises:
        ConfigError: the converter does not know it, with its last line.
    """
    _complete(model / "config.json")
    said = _run(target, model, "--outfile", str(out), "--outtype", TYPES[target])
    if said or not out.is_file():
        raise ConfigError(
            "llama.cpp's converter failed",
            where=str(converter(target)),
            why=said or "it wrote no file",
            fix="a newer llama.cpp (git pull), if it knows this family; else --to merged",
        )


def convert_tower(model: Path, out: Path, target: str) -> str:
    """Convert tower and projector of a merged model to the file `TOWER` in a folder.

    Returns:
        Empty, or why there is no such file.
    """
    name = TOWER.removeprefix("mmproj-")
    with tempfile.TemporaryDirectory(dir=out) as aside:  # a converter without the prefix
        file = Path(aside) / name
        said = _run(target, model, "--outfile", str(file), "--outtype", "bf16", "--mmproj")
        made = next(Path(aside).glob(f"*{name}"), None)
        if said or made is None:
            return said or "the converter wrote no file"
        made.rename(out / TOWER)
    return ""


def _run(target: str, model: Path, *options: str) -> str:
    """Run the converter over a folder; empty, or its last line if it failed."""
    command = [sys.executable, str(converter(target)), str(model), *options]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, errors="replace"
    )
    if not done.returncode:
        return ""
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    return said.splitlines()[-1]


def _complete(config: Path) -> None:
    """Give GPT-2 a name of its context length that Transformers (5) writes no longer."""
    values = json.loads(config.read_text(encoding="utf-8"))
    if "n_positions" in values:
        config.write_text(json.dumps({"n_ctx": values["n_positions"]} | values), encoding="utf-8")


def read_into(model: Any, file: Path) -> None:
    """Replace the weights of a model's decoder and head by a GGUF file's, dequantized.

    Raises:
        ConfigError: Transformers cannot tell where the file holds a weight.
    """
    import transformers.modeling_gguf_pytorch_utils as stock
    from gguf import GGUFReader, dequantize

    reader, text = GGUFReader(file), model.config.get_text_config()
    architecture = reader.fields["general.architecture"].contents()
    kind = "llama" if architecture in LIKE_LLAMA else architecture
    processor = stock.TENSOR_PROCESSORS.get(kind, stock.TensorProcessor)(config=text.to_dict())
    parts = _text_parts(model)
    # The blocks of a tower may be called like those of the text.
    alone = nn.ModuleDict({key: model.get_submodule(name) for key, name in parts.items()})
    names = stock.get_gguf_hf_weights_map(
        alone if parts else model, processor, architecture, text.num_hidden_layers
    )
    for theirs, name in names.items() if parts else ():
        first, _, rest = name.partition(".")
        names[theirs] = f"{parts[first]}.{rest}"
    read: dict[str, Any] = {}
    for tensor in reader.tensors:
        weights, name, _ = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": read},  # stacked experts are put there
        )
        if name in names:
            read[names[name]] = torch.from_numpy(weights.copy())
    inside = tuple(f"{name}." for name in parts.values()) or ("",)
    parameters = {n: p for n, p in model.named_parameters() if n.startswith(inside)}
    unread = [n for n, p in parameters.items() if n not in read or read[n].shape[1:] != p.shape[1:]]
    if unread:
        raise ConfigError(
            "this GGUF file cannot be compared with the run's model",
            where=f"{unread[0]} and {len(unread) - 1} more weights of {type(model).__name__}",
            why=f"Transformers does not read {architecture!r} from GGUF",
            fix=f"--to merged, and then, unchecked: python {SCRIPT} MERGED --outtype bf16",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter[: len(read[name])] = read[name]  # rows beyond the vocabulary are left out


def _text_parts(model: Any) -> dict[str, str]:
    """Names of decoder and head in a model with a tower, by their names in a Llama."""
    decoder, head = decoder_name(model), model.get_output_embeddings()
    there = (name for name, module in model.named_modules() if module is head)
    return {"model": decoder, "lm_head": next(there)} if decoder else {}
