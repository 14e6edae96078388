"""What a run says of its first batches, method by method: right, repaired or refused, and its cost.

    python -m tests.benchmarks.first_batches [--methods dpo kto ...] [--models]

Rows with tools, calls, thoughts, a system's turn and arguments of the template, under the chat
templates of five families, go to a tiny random model of each method (`finetune.training.
first_batches`). `right` is what needs nothing of ours, `repaired` what TRL alone would have learned
otherwise: the same rows are looked at once more with our repairs switched off. With `--models` the
families of `tests.families` are looked at instead, by a method whose prompts stand behind padding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM
from trl import unpair_preference_dataset
from trl.data_utils import maybe_apply_chat_template

from finetune import load_recipe
from finetune.config.methods import METHODS
from finetune.errors import FinetuneError
from finetune.logging import quiet_libraries
from finetune.training.health.first_batches import check_first_batches
from finetune.training.model import load_model
from finetune.training.run.run import begun
from tests.data.shapes import CALLS, FAMILIES, SYSTEM, THOUGHTS, TOOL, answer, tokenizer_of, user
from tests.families import FAMILIES as MODELS
from tests.families import config_of, folder_of

QUIET = Console(quiet=True)


def shapes_of(family: str) -> dict[str, dict[str, Any]]:
    """Conversations that a family's template takes: messages, and what stands beside them."""
    asked = [user("Tide at Kiel?"), answer("High.")]
    found: dict[str, dict[str, Any]] = {"plain": {"messages": asked}}
    if family != "gemma":
        found["system"] = {"messages": [SYSTEM, *asked]}
    if family in THOUGHTS:
        thought = answer("High.", **{THOUGHTS[family]: "Six hours past."})
        found["thoughts"] = {"messages": [asked[0], thought]}
        found["tools"] = {"messages": CALLS, "tools": [TOOL]}
    if family == "qwen3":
        found["arguments"] = {"messages": asked, "chat_template_kwargs": {"enable_thinking": False}}
    return found


def row_of(shape: dict[str, Any], method: str, good: bool) -> dict[str, Any]:
    """A conversation in the form that a method reads."""
    *prompt, last = shape["messages"]
    beside = {key: value for key, value in shape.items() if key != "messages"}
    form = METHODS[method].rows[0]
    if form == "text":
        return {"text": f"{prompt[-1]['content']} {last['content']}"}
    if form == "preference":
        return {"prompt": prompt, "chosen": [last], "rejected": [answer("Low.")], **beside}
    if form == "unpaired":
        return {"prompt": prompt, "completion": [last], "label": good, **beside}
    return {"prompt": prompt, **beside} if form == "prompts" else shape


@contextlib.contextmanager
def unrepaired() -> Iterator[None]:
    """TRL as it is: nothing of what is prepared otherwise here."""

    def plainly(tokenizer: Any, row: dict[str, Any]) -> Any:
        return maybe_apply_chat_template(row, tokenizer)

    def in_order(rows: Any, seed: int) -> Any:
        return unpair_preference_dataset(rows) if "chosen" in rows.column_names else rows

    with contextlib.ExitStack() as stack:
        for target, value in (
            ("finetune.data.pairs._as_text", plainly),
            ("finetune.data.both_labels.spread", in_order),
            ("finetune.data.both_labels.InBlocks", lambda n, *_: SequentialSampler(range(n))),
            ("finetune.training.health.first_batches.place_by_mask", lambda *_: None),
        ):
            stack.enter_context(mock.patch(target, value))
        yield


def look(method: str, model: Path, rows: list[dict[str, Any]], folder: Path) -> tuple[str, float]:
    """What is said of these rows (empty: all is well), and the milliseconds that it took."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    teacher = [f"train.teacher_model_name_or_path={model}"] * (method == "distill")
    given = [
        "~data.name", f"data.path={file}", f"model.name={model}",
        *("train.max_length=null",) * (method not in ("grpo", "rloo", "distill")),
        "eval.samples=false", "data.eval_fraction=0", "train.eval_strategy=no", *teacher,
        *("~train.max_length", "~train.packing") * (method == "continue"),
    ]  # fmt: skip
    recipe = load_recipe(f"tiny_{'full' if method == 'sft' else method}_bf16", given)
    try:
        with begun(recipe, out=folder / "runs", console=QUIET, force=True) as run:
            begin = time.perf_counter()
            check_first_batches(run.trainer)
            return "", (time.perf_counter() - begin) * 1e3
    except FinetuneError as error:
        return f"{error.what}: {error.why}" if error.why else error.what, 0.0


def verdict(method: str, model: Path, rows: list[dict[str, Any]], folder: Path) -> tuple[str, str]:
    """`right`, `repaired` or `refused`, and what TRL alone would do or why."""
    said, took = look(method, model, rows, folder)
    if said:
        return "refused", said
    with unrepaired():
        alone, _ = look(method, model, rows, folder)
    return ("repaired", alone) if alone else ("right", f"{took:.0f} ms")


def by_template(methods: list[str], folder: Path) -> Iterator[dict[str, str]]:
    """A row for each method, family of templates and shape of rows."""
    for family in FAMILIES:
        model = folder_of("llama", folder / family)
        tokenizer_of(family).save_pretrained(model)
        config = config_of("llama")
        config.vocab_size = len(tokenizer_of(family))
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        for method in methods:
            for name, shape in shapes_of(family).items():
                # Sorted by label, as files are: seventy answers to give come first.
                rows = [row_of(shape, method, good=i < 70) for i in range(140)]
                found, why = verdict(method, model, rows, folder)
                yield {"method": method, "family": family, "rows": name, "": found, "why": why}


def by_model(folder: Path) -> Iterator[dict[str, str]]:
    """A row for each family of models, whose prompts stand behind padding."""
    rows = [{"prompt": [user("Tide?" * (1 + index % 9))]} for index in range(16)]
    for family in MODELS:
        model = folder_of(family, folder)
        given = [f"model.name={model}", "model.weights=random"]
        load_model(load_recipe("tiny_full_bf16", given).config.model).save_pretrained(model)
        found, why = verdict("distill", model, rows, folder)
        yield {"method": "distill", "family": family, "rows": "prompts", "": found, "why": why}


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--models", action="store_true", help="families of models instead")
    asked = parser.parse_args()
    table = Table("method", "family", "rows", "", "why")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in by_model(folder) if asked.models else by_template(asked.methods, folder):
            table.add_row(*row.values())
            print(*row.values(), sep=" | ", flush=True)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
