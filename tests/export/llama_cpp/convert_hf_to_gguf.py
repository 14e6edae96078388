"""A stand-in for llama.cpp's converter, which is on no index: Llama and SmolVLM, and no tokenizer.

It takes the same arguments and writes with the same library. With `FAULT` it forgets that the
format holds q and k in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import gguf
from safetensors.torch import load_file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile")
    parser.add_argument("--outtype", choices=("bf16", "q8_0"))
    parser.add_argument("--mmproj", action="store_true")
    given = parser.parse_args()
    config = json.loads((given.model / "config.json").read_text())
    if config["model_type"] not in (("smolvlm",) if given.mmproj else ("llama", "smolvlm")):
        raise SystemExit(f"Model {config['model_type']} is not supported")
    config |= config.get("text_config", {})
    layers = config["num_hidden_layers"]
    out = Path(given.outfile)
    if given.mmproj:
        out = out.with_name(f"mmproj-{out.name}")
    writer = gguf.GGUFWriter(out, "clip" if given.mmproj else "llama")
    writer.add_block_count(layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    stored = gguf.GGMLQuantizationType[given.outtype.upper()]
    for name, weight in load_file(given.model / "model.safetensors").items():
        values, is_text = weight.float(), not re.match(r"model\.(vision|connector)", name)
        if given.mmproj != (not is_text):
            continue
        if given.mmproj:  # a tensor has at most four dimensions there
            writer.add_tensor(name[-60:], values.numpy())
            continue
        name = name.replace("model.text_model.", "model.")
        if name.endswith(("q_proj.weight", "k_proj.weight")) and not os.environ.get("FAULT"):
            heads = len(values) // config["head_dim"]
            values = values.view(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape_as(values)
        kind = stored if values.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(values.numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
