"""Answers end: a base model whose end of text is not its template's end of a turn."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.config.paths import TINY_LLAMA
from finetune.data.doubled_tokens import once
from finetune.errors import ParityError
from finetune.export import parity
from finetune.export.export import Reference, check_export, open_run

PAD, END = 0, 2
QUESTION = "What is the capital of France?"


@pytest.fixture
def base(tmp_path):
    """The packaged model as a base one: text ends with a token of its own, a turn with another."""
    folder = shutil.copytree(TINY_LLAMA, tmp_path / "base")
    changes = {
        "tokenizer_config.json": {"eos_token": "<|pad|>"},
        "generation_config.json": {"eos_token_id": PAD},
        "config.json": {"eos_token_id": PAD},
    }
    for name, changed in changes.items():
        values = json.loads((folder / name).read_text()) | changed
        (folder / name).write_text(json.dumps(values))
    return folder


def lengths(folder) -> list[int]:
    """Tokens of an answer by plain Transformers, and the last of them."""
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    found = model.generate(**asked, max_new_tokens=64, do_sample=False)
    found = found[0, asked["input_ids"].shape[1] :].tolist()
    return [len(found), found[-1]]


@pytest.mark.slow
def test_what_was_trained_to_end_ends_in_generate_and_in_exports(cli, base) -> None:
    assert lengths(base)[0] == 64, "it writes the end of a turn, and goes on"
    few = (
        "train.max_steps=2", "train.per_device_train_batch_size=2", "train.eval_strategy=no",
        "eval.samples=false", "data.max_rows=20", "precision.health_every=0",
    )  # fmt: skip
    done = cli("tiny_lora_bf16", f"model.name={base}", *few, "--out", "runs")
    assert done.code == 0, done.err
    assert "answers end with '<|im_end|>'" in done.out
    (run,) = (file.parent.resolve() for file in (base.parent / "runs").rglob("receipt.json"))
    assert GenerationConfig.from_pretrained(run / "model").eos_token_id == [PAD, END]
    said = json.loads(cli("generate", run, QUESTION, "--json", "--max-new-tokens", 64).out)
    assert "assistant" not in said["answers"][0]["answer"]
    exported = cli("export", run, "merged", "--to", "merged")
    assert exported.code == 0, exported.err
    assert "that ends" in exported.out
    tokens, last = lengths("merged")
    assert (tokens < 64, last) == (True, END)

    finished = open_run(run)
    model = parity.load_stock(base, finished.config, adapter=finished.model)
    batches = parity.batches_of(finished.config, model).evaluation
    seen = parity.observe(model, batches)
    reference = Reference(seen, parity.compare(seen, seen), {})
    shutil.copy(base / "generation_config.json", "merged")  # as a merge by hand leaves it
    found = check_export(base.parent / "merged", "merged", finished, batches, reference)
    with pytest.raises(ParityError, match="continues after its end token"):
        parity.check(found, "merged", reference.noise, "merged")


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([1, 1, 1, 5, 6, 2], slice(2, 6)),
        ([1, 5, 6, 2, 2, 2], slice(0, 4)),
        ([1, 5, 2, 9, 2], slice(0, 3)),
        ([1, 5, 2, 6, 2], slice(0, 5)),
        ([5, 6, 9], slice(0, 3)),
        ([1, 1], slice(1, 2)),
    ],
)
def test_a_row_begins_and_ends_once(ids, kept) -> None:
    class Tokenizer:
        bos_token_id, eos_token_id = 1, 2

        def decode(self, tokens: list[int]) -> str:
            return "\n" if tokens == [9] else "x"

    row = {"input_ids": ids, "labels": [-100, *ids[1:]]}
    assert once(row, Tokenizer()) == {key: values[kept] for key, values in row.items()}


@pytest.mark.parametrize("more", [(), ("data.streaming=true", "train.max_steps=1")])
def test_doubled_tokens_of_texts_are_cut_and_counted(cli, tmp_path, more) -> None:
    """A tokenizer that sets `<s>`, and texts that have it, too; ends before a new line."""
    model = shutil.copytree(TINY_LLAMA, tmp_path / "model")
    start, text = "<|im_start|>", {"Sequence": {"id": "A", "type_id": 0}}
    begins = [{"SpecialToken": {"id": start, "type_id": 0}}, text]
    special = {start: {"id": start, "ids": [1], "tokens": [start]}}
    for name, changed in (
        ("tokenizer_config.json", {"bos_token": start}),
        (
            "tokenizer.json",
            {
                "post_processor": {
                    "type": "TemplateProcessing", "single": begins, "pair": begins,
                    "special_tokens": special,
                }
            },
        ),
    ):  # fmt: skip
        values = json.loads((model / name).read_text()) | changed
        (model / name).write_text(json.dumps(values))
    rows = [{"text": f"{start}Once.<|im_end|>\n"}, {"text": "Twice."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "tiny_full_bf16",
        f"model.name={model}",
        "data.path=rows.jsonl",
        "data.eval_fraction=0",
    )
    found = json.loads(cli("data", *words, *more, "--json").out)
    decode = AutoTokenizer.from_pretrained(model).decode
    shown = [decode(row["input_ids"]) for row in found["rows"]]
    assert shown == [f"{start}Once.<|im_end|>", f"{start}Twice.<|im_end|>"]
    assert found["train"]["doubled"] == 1
    assert found["train"]["ends"] == [END]
