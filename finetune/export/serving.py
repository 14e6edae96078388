"""Commands that serve an export: what is written, by which server, in which words.

vLLM and SGLang read the formats of Transformers and compressed-tensors; Ollama a folder of 16-bit
weights (of the families that it converts: Llama, Mistral, Gemma, Phi-3) or a GGUF file, as
llama.cpp does. A server that has no row for a format cannot read it, or nobody says that it can.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

SGLANG = "python -m sglang.launch_server --model-path"
OLLAMA = "printf 'FROM %s\\n' {at} > Modelfile && ollama create {name} && ollama run {name}"
COMMANDS = {
    "adapter": {
        "vllm": "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={at}",
        "sglang": f"{SGLANG} {{base}} --max-lora-rank {{most}} --lora-paths {{name}}={{at}}",
    },
    "merged": {"vllm": "vllm serve {at}", "sglang": f"{SGLANG} {{at}}", "ollama": OLLAMA},
    "fp8": {"vllm": "vllm serve {at}", "sglang": f"{SGLANG} {{at}}"},
    "nvfp4": {"vllm": "vllm serve {at}"},
    "gguf": {"llama.cpp": "llama-server -m {at}", "ollama": OLLAMA},
}
"""Format -> server -> command. A format of several kinds (`gguf-q8`) is that before the dash."""


def commands(folder: Path, target: str) -> list[str]:
    """Commands that serve an export of a format, the most used server first."""
    file = next(iter(sorted(folder.glob("*.gguf"))), folder)
    words = {"at": str(file.absolute() if target.startswith("gguf") else folder)}
    words["name"] = folder.absolute().name
    if target == "adapter":
        adapter = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        most = max(adapter["r"], *(adapter.get("rank_pattern") or {}).values(), 1)
        words |= {"base": adapter["base_model_name_or_path"], "most": str(most)}
        words["rank"] = str(1 << (max(most, 16) - 1).bit_length())  # vLLM's: powers of two from 16
    quoted = {key: shlex.quote(word) for key, word in words.items()}
    row = COMMANDS.get(target.partition("-")[0], {})
    return [command.format(**quoted) for command in row.values()]
