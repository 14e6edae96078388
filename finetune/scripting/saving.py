"""An Unsloth notebook's last cell: `model.save_pretrained_merged(...)` and its like export.

    save_pretrained_merged(folder, tokenizer, save_method="merged_16bit")     push_to_hub_merged
    save_pretrained_gguf(folder, tokenizer, quantization_method="q8_0")       push_to_hub_gguf

They are put beside `save_pretrained` of Transformers' and PEFT's classes, and export the weights as
they are now (`finetune.export`), compared with the model on the rows of its run, or on packaged
text where a trainer of the script's own has trained it. An earlier export there is replaced.
"""

from __future__ import annotations

import tempfile
from functools import partialmethod
from pathlib import Path
from typing import Any

from finetune.config.recipe import read_recipe
from finetune.config.sections import BUILTIN
from finetune.errors import ConfigError
from finetune.export import hub
from finetune.export.export import Export, export_run
from finetune.logging import output
from finetune.precision.model.layers import without_adapters
from finetune.runs.folder import RunFolder
from finetune.runs.receipt import Receipt
from finetune.scripting.keywords import Settings, recipe_of
from finetune.scripting.run import TRAINED
from finetune.storage.pretrained import load_tokenizer
from finetune.training.helper import session

MERGED = {"merged_16bit": "merged", "lora": "adapter", "fp8": "fp8", "nvfp4": "nvfp4"}
GGUF = {"fast_quantized": "gguf-q8", "q8_0": "gguf-q8", "not_quantized": "gguf", "bf16": "gguf"}
KINDS = {"merged": ("save_method", MERGED), "gguf": ("quantization_method", GGUF)}
"""End of a method's name -> its argument, and value of that -> target; the first if left out."""
UNSEEN = "not proven: trained by a trainer of the script, without FP8"


def put_on(cls: type, settings_of: Any) -> None:
    """Give a class of models the methods; `settings_of` gives the settings of one."""
    for kind in KINDS:
        for verb in ("save_pretrained", "push_to_hub"):
            setattr(cls, f"{verb}_{kind}", partialmethod(_save, settings_of, kind, verb))


def _save(
    model: Any, settings_of: Any, kind: str, verb: str,
    where: Any, tokenizer: Any = None, asked: Any = None, **others: Any,
) -> Export:  # fmt: skip
    word, known = KINDS[kind]
    asked = others.pop(word, asked) or next(iter(known))
    if asked not in [*known]:
        raise ConfigError(
            f"a model is not saved as {asked!r} here",
            where=f"{verb}_{kind}({word}={asked!r})",
            fix=f"{word}= one of {', '.join(known)}"
            + ("; llama.cpp's llama-quantize makes more of that of bf16" if kind == "gguf" else ""),
        )
    access = {key: others.pop(key, None) for key in ("private", "token")}
    for key in filter(others.get, others):
        output().print(f"! {key} has no effect here", style="yellow")
    if verb == "save_pretrained":
        return _export(model, settings_of(model), tokenizer, known[asked], where)
    hub.check_name(where)
    done = _export(model, settings_of(model), tokenizer, known[asked], Path(where).name)
    print(hub.pushed(done.folder, where, yes=True, **access))
    return done


def _export(model: Any, said: Settings, tokenizer: Any, target: str, out: Path | str) -> Export:
    rows = {"data": {"name": f"{BUILTIN}harbour_text"}}
    config, base = recipe_of("trainer", said, rows), without_adapters(model)
    receipt = Receipt(UNSEEN, {"ran": said["precision"].get("compute", "bf16")})
    if run := TRAINED.get(base):
        config, receipt = (
            read_recipe(str(run / "config.yaml")),
            Receipt.read(RunFolder(run).receipt),
        )
    else:
        running = session.in_force()
        found = running and running.conversion  # of this model, not of another
        if running and found and without_adapters(found.model) is base:
            receipt = running.receipt()
        output().print("! rows of a trainer of your own are not known: compared on packaged text")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        receipt.save(folder / "receipt.json")
        model.save_pretrained(folder / "model")
        tokenizer = tokenizer or load_tokenizer(config.config.model)[0]
        tokenizer.save_pretrained(folder / "model")
        # The export loads models of its own, which a set-up of FP8 in the script would convert.
        with session.aside():
            return export_run(folder, target, out, force=True)
