"""`finetune.trainer` trains as the command line does, returns stock objects, and says mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput
from trl import SFTTrainer

import finetune
from finetune.config.paths import TINY_LLAMA
from finetune.errors import FinetuneError, OrderError, PrecisionError
from finetune.hardware.device import this_device
from finetune.scripting.keywords import recipe_of
from finetune.training.helper import session
from tests.image_models import processor_of, tiny_image_model

EMULATED: dict[str, Any] = {"precision": "fp8", "emulation": "allow"}
SHORT: dict[str, Any] = {
    "max_steps": 3, "max_length": 128, "packing": False, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1, "max_rows": 24, "save_strategy": "no", "logging_steps": 1,
    "eval_strategy": "no", "gradient_checkpointing": False, "eval": {"samples": False},
}  # fmt: skip


def losses(folder) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture
def loaded():
    return finetune.load("builtin:tiny_llama", **EMULATED)


@pytest.mark.long
def test_eight_lines_are_the_run_of_their_recipe(tmp_path):
    """Stock objects; losses bit for bit those of `config.yaml`; proof, page, export; once."""
    model, tokenizer = finetune.load("builtin:tiny_llama", **EMULATED)
    assert isinstance(model, PreTrainedModel)
    model = finetune.add_lora(model, r=8)
    trainer = finetune.trainer(model, tokenizer, data="builtin:harbour", out=tmp_path, **SHORT)
    run = trainer.train()
    assert isinstance(model, PeftModel)
    assert isinstance(trainer, SFTTrainer)
    assert isinstance(run, TrainOutput)
    assert run.global_step == 3
    assert run.receipt.status == "proven"
    assert run.receipt.fp8_flop_share > 0.5
    assert session.in_force() is None
    twin = finetune.train(finetune.load_recipe(str(run.folder / "config.yaml")), out=tmp_path)
    assert losses(twin.folder) == losses(run.folder)
    page = run._repr_html_()
    assert "data:image/png" in page
    assert run.receipt.headline.split(":")[0] in page
    run.export("merged", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)  # the same, replaced
    record = json.loads((tmp_path / "merged" / "export.json").read_text())
    assert (record["proof"], record["recipe"]) == ("proven", "tiny_llama_lora_fp8")
    with pytest.raises(OrderError, match="has trained"):
        trainer.train()
    with pytest.raises(FinetuneError, match="has adapters"):
        finetune.add_lora(model)


@pytest.mark.long
def test_an_interrupt_saves_and_the_next_trainer_resumes(tmp_path, loaded):
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    model, tokenizer = loaded
    trainer: Any = finetune.trainer(
        finetune.add_lora(model), tokenizer, "builtin:harbour", out=tmp_path, **SHORT
    )
    trainer.add_callback(Interrupt())
    run = trainer.train()
    assert run.report.interrupted
    assert run.global_step == 2
    resumed = finetune.trainer(
        trainer.model, tokenizer, "builtin:harbour", out=tmp_path, **SHORT,
        resume_from_checkpoint=str(run.folder / "checkpoints"),
    ).train()  # fmt: skip
    assert resumed.global_step == 3
    assert losses(resumed.folder)[:2] == losses(run.folder)
    assert len(losses(resumed.folder)) == 3


@pytest.mark.slow
def test_a_script_s_own_model_and_rows_become_a_recipe(tmp_path):
    """Adapters by PEFT and rows in memory; the next trainer takes the place of one that waits."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    adapters = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], use_rslora=True)
    plain = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    model = get_peft_model(plain, adapters)
    rows = [{"prompt": f"{n}?", "completion": f" {n}."} for n in range(20)]
    precision = {"compute": "fp8", "emulation": "allow"}
    asked = SHORT | {"precision": precision, "out": tmp_path}
    first: Any = finetune.trainer(model, tokenizer, rows, **asked)
    config = first.run.config
    assert config.model.name == str(TINY_LLAMA)
    assert config.model.dtype == "float32"
    assert (config.lora.r, config.lora.alpha, config.lora.use_rslora) == (4, 4, True)
    assert set(config.lora.target_modules) == {"q_proj", "v_proj"}
    assert config.precision.frozen == "fp8"
    assert len(first.train_dataset) + len(first.eval_dataset) == 20
    second: Any = finetune.trainer(model, tokenizer, rows, **asked)
    assert not first.run.folder.exists()
    assert second.run.folder.exists()
    with pytest.raises(OrderError, match="came after this trainer"):
        first.train()
    finetune.teardown_fp8_mixed_precision_training()
    with pytest.raises(OrderError, match="came after this trainer"):
        second.train()


@pytest.mark.slow
def test_mistakes_are_answered_with_what_to_write(tmp_path, loaded):
    model, tokenizer = loaded

    def said(function, *args, **kwargs) -> str:
        with pytest.raises(FinetuneError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    def trainer(data="builtin:harbour", **settings):
        return finetune.trainer(model, tokenizer, data, out=tmp_path, **settings)

    assert "builtin:tiny_llama" in said(finetune.load, "builtin:tiny_lama")
    assert "max_length=9 in finetune.trainer" in said(
        finetune.load, "builtin:tiny_llama", max_seq_length=9
    )
    assert "precision='bf16'" in said(finetune.load, "builtin:tiny_llama", "fp8", load_in_4bit=True)
    assert "'learning_rate'" in said(trainer, learning_rat=1)
    assert "no argument 'rank'" in said(finetune.add_lora, model, rank=8)
    assert said(finetune.add_lora, model, r=-1).endswith("leave r out")  # its default is not 8
    adapter = tmp_path / "run" / "model"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    assert f"export {adapter.parent} --to merged" in said(finetune.load, adapter)
    assert "per_device_train_batch_size=4" in said(trainer, batch_size=4)
    assert "mine.jsonl" in said(trainer, "mine.jsonl")
    assert "chosen and rejected" in said(trainer, method="dpo")
    assert "trl.DPOConfig has no" in said(trainer, method="dpo", packing=True)
    assert "a model that scores" in said(trainer, method="reward")
    assert "max_steps=" in said(trainer, max_steps="many")
    codes, _ = finetune.load("builtin:tiny_llama", load_in_fp8=True, emulation="allow")
    assert "stored quantized" in said(finetune.trainer, codes, tokenizer, "builtin:harbour")
    if not this_device().has_fp8:
        with pytest.raises(PrecisionError, match="emulation='allow'"):
            finetune.load("builtin:tiny_llama", precision="fp8")
    shutil.rmtree(adapter.parent)
    assert not list(tmp_path.glob("*/*"))
    model.requires_grad_(False)  # as `merge_and_unload` leaves it
    assert "model.requires_grad_(True)" in said(trainer)


@pytest.mark.slow
def test_the_body_of_an_unsloth_notebook(tmp_path, capsys):
    """Only the first import is another one; TRL's own trainer trains in FP8, proven."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from finetune import FastLanguageModel

    dataset = Dataset.from_list([{"text": f"{n} and {n + 1}"} for n in range(8)])
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(TINY_LLAMA),
        max_seq_length=2048,
        load_in_4bit=False,
        load_in_8bit=False,
        full_finetuning=False,
        load_in_fp8=True,
        fast_inference=True,
        emulation="allow",  # of this test, which has no GPU
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset,
        args=SFTConfig(
            dataset_text_field="text",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            warmup_steps=0,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            optim="adamw_torch",
            weight_decay=0.01,
            lr_scheduler_type="linear",
            seed=3407,
            output_dir=str(tmp_path),
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        ),
    )
    trainer_stats = trainer.train()
    FastLanguageModel.for_inference(model)
    inputs = tokenizer(["1 and"], return_tensors="pt").to(model.device)
    assert model.generate(**inputs, max_new_tokens=4).shape[1] > inputs["input_ids"].shape[1]
    model.save_pretrained(str(tmp_path / "lora_model"))
    expected = model(**inputs).logits
    for method in ("lora", "merged_16bit"):  # the last cell; the second replaces the first
        model.save_pretrained_merged(
            tmp_path / "model", tokenizer, save_method=method, maximum_memory_usage=0.5
        )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert (merged(**inputs).logits - expected).norm() < 0.05 * expected.norm()
    assert (AutoModelForCausalLM.from_pretrained(TINY_LLAMA)(**inputs).logits - expected).norm() > (
        0.1 * expected.norm()
    )
    for call, answer in (
        (lambda: model.save_pretrained_merged("x", tokenizer, save_method="merged_4bit"), "fp8"),
        (lambda: model.save_pretrained_gguf("x", tokenizer, "q4_k_m"), "q8_0"),
        (lambda: model.push_to_hub_merged("x", tokenizer, token=""), "OWNER/NAME"),
        (lambda: model.push_to_hub_gguf("me/x", tokenizer, quantization_method=["f16"]), "bf16"),
    ):
        with pytest.raises(FinetuneError) as caught:
            call()
        assert answer in caught.value.fix
    assert type(trainer) is SFTTrainer
    assert trainer_stats.global_step == 3
    receipt = finetune.get_receipt()
    assert receipt.status == "proven"
    assert receipt.fp8_flop_share > 0.3
    assert (tmp_path / "lora_model" / "adapter_config.json").is_file()
    said = capsys.readouterr().out
    assert "fast_inference has no effect" in said
    assert "maximum_memory_usage has no effect" in said
    assert "compared on packaged text" in said
    record = json.loads((tmp_path / "model" / "export.json").read_text())
    assert (record["proof"], record["target"]) == ("proven", "merged")
    assert "max_length=2048" in said


def test_adapters_over_fp8_are_scaled_by_row_unless_said_otherwise():
    said = {"model": {"name": "builtin:tiny_llama"}, "precision": {"compute": "fp8"}}
    whole = recipe_of("trainer", said, {"train": {"max_steps": 1}}).config
    adapted = recipe_of("trainer", said, {"lora": {"r": 8}}).config
    chosen = {"precision": {"scaling": "tensorwise"}, "lora": {"r": 8}}
    assert adapted.precision.scaling == "rowwise" != whole.precision.scaling
    assert recipe_of("trainer", said, chosen).config.precision.scaling == "tensorwise"


# ----------------------------------------------------------------------------------------- images


@pytest.fixture
def pictures(tmp_path) -> Any:
    """A tiny Qwen3-VL, its processor with sizes of its own, rows with an image, and settings."""
    from PIL import Image

    home = tiny_image_model("qwen3_vl", tmp_path)
    model, _ = finetune.load(home)
    Image.new("RGB", (400, 300), "navy").save(tmp_path / "sea.png")
    image = str(tmp_path / "sea.png")
    rows = [{"prompt": "<image>What?", "completion": "The sea.", "images": [image]}] * 4
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": file, "out": tmp_path, **SHORT, "eval_fraction": 0.0, "max_length": None}
    return model, processor_of(home, max_pixels=84 * 84, min_pixels=56 * 56), rows[0], settings


@pytest.mark.slow
def test_a_trainer_shows_images_by_the_given_processors_sizes_or_those_that_are_set(
    pictures, capsys
):
    """Prepared rows have the ids that the processor itself makes of an image and its text."""
    from PIL import Image

    model, processor, row, settings = pictures
    del settings["packing"]  # what is usual of rows of text

    def tokens(reader: Any, **own: Any) -> tuple[int, Any]:
        made = finetune.trainer(model, reader, **settings, **own)
        ids = made.train_dataset[0]["input_ids"]
        return ids.count(reader.tokenizer.convert_tokens_to_ids("<|image_pad|>")), made

    def due(most: int) -> int:
        image = Image.open(row["images"][0])
        own = processor_of(Path(model.name_or_path), max_pixels=most)
        sizes = own.image_processor([image])["image_grid_thw"][0]
        return int(np.prod(sizes)) // own.image_processor.merge_size**2

    found, made = tokens(processor)
    assert found == due(84 * 84) < due(112 * 112)
    assert "packing is off" in capsys.readouterr().out
    assert made.run.config.train.pixels == {"max_pixels": 84 * 84, "min_pixels": 56 * 56}
    assert tokens(processor, max_pixels=112 * 112)[0] == due(112 * 112)
    with pytest.raises(FinetuneError, match="packing=True is not for rows with images"):
        tokens(processor, packing=True)
    processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    with pytest.raises(FinetuneError, match="otherwise than the model's own") as error:
        tokens(processor)
    assert "image_mean" in error.value.where
