"""Stock trainers of TRL and Transformers over tiny models and rows: what `trainers` runs.

Each function makes one, for a method: all weights (`full`), adapters (`LoRA`), or adapters over a
base that is stored in FP8 (`frozen`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from finetune.config.paths import TINY_LLAMA

STEPS = 4
METHODS = ("full", "LoRA", "frozen")
"""All weights; adapters; adapters over a base stored in FP8."""
WORDS = [
    "calm", "water", "and", "small", "boats", "come",
    "home", "before", "night", "falls", "on", "it",
]  # fmt: skip
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": True,
    "seed": 0,
}  # fmt: skip
GENERATION = {"num_generations": 2, "max_completion_length": 8}


class Workshop:
    """Tiny models and rows, made once in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=len(self.tokenizer), max_position_embeddings=128,
            tie_word_embeddings=False, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        config.num_labels = 1
        LlamaForCausalLM(config).save_pretrained(folder / "policy")
        LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
        wide = LlamaConfig(**{**config.to_dict(), "intermediate_size": 192})
        LlamaForCausalLM(wide).save_pretrained(folder / "teacher")

    def policy(self, name: str = "policy") -> Any:
        return LlamaForCausalLM.from_pretrained(self.folder / name)

    def classifier(self, labels: int) -> Any:
        return LlamaForSequenceClassification.from_pretrained(
            self.folder / "reward", num_labels=labels, ignore_mismatched_sizes=True
        )

    def rows(self, **columns: Callable[[int], Any]) -> Dataset:
        rows = [{name: make(i) for name, make in columns.items()} for i in range(16)]
        return Dataset.from_list(rows)


def text(i: int, words: int = 6) -> str:
    """Words of a row, the same in each run."""
    return " ".join(WORDS[(i + 3 * k) % len(WORDS)] for k in range(words))


def adapters(method: str, task: str | None = "CAUSAL_LM") -> LoraConfig | None:
    return (
        None if method == "full" else LoraConfig(r=8, target_modules="all-linear", task_type=task)
    )


def by_length(completions: list[str], **_: Any) -> list[float | None]:
    """Reward that differs within a group: the share of vowels in the completion."""
    return [sum(c in "aeiou" for c in text) / (len(text) + 1) + len(text) for text in completions]


# --------------------------------------------------------------------------------------- trainers

Make = Callable[[Workshop, str], Trainer]


def _of_trl(
    kind: Any, config: Any, shop: Workshop, method: str, rows: Dataset, settings: Any, **own: Any
) -> Trainer:
    """One of TRL's trainers, with `settings` of its configuration and arguments of its own."""
    task = own.pop("task", "CAUSAL_LM")
    return kind(
        model=own.pop("model", None) or shop.policy(),
        args=config(str(shop.folder), **COMMON, **settings),
        train_dataset=rows,
        processing_class=own.pop("reader", shop.tokenizer),
        peft_config=adapters(method, task),
        **own,
    )


def sft(shop: Workshop, method: str) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    rows, settings = shop.rows(text=text), {"max_length": 64}
    return _of_trl(SFTTrainer, SFTConfig, shop, method, rows, settings)


def sft_images(shop: Workshop, method: str) -> Trainer:
    """Rows with a picture each but for some, by TRL's own collator: Qwen3-VL with its tower."""
    from trl import SFTConfig, SFTTrainer

    from tests.image_models import processor_of, tiny_image_model

    def turns(i: int) -> list[dict[str, Any]]:
        parts = [{"type": "image"}] * len(pictures(i)) + [{"type": "text", "text": text(i)}]
        answer = [{"type": "text", "text": text(i + 5, 3)}]
        return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]

    def pictures(i: int) -> list[Any]:
        return [Image.new("RGB", (40, 32 + i), (10 * i, 90, 200))] if i % 4 else []

    home = tiny_image_model("qwen3_vl", shop.folder)
    own = {"model": AutoModelForImageTextToText.from_pretrained(home), "reader": processor_of(home)}
    rows = shop.rows(messages=turns, images=pictures)
    return _of_trl(SFTTrainer, SFTConfig, shop, method, rows, {"max_length": None}, **own)


def dpo(shop: Workshop, method: str, *, given: bool = False, **settings: Any) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    rows = shop.rows(
        prompt=text, chosen=lambda i: " " + text(i + 5, 4), rejected=lambda i: " " + text(i + 9, 3)
    )
    own = {"ref_model": shop.policy()} if given else {}
    own["model"] = settings.pop("model", None)
    settings = {"max_length": 64, **settings}
    return _of_trl(DPOTrainer, DPOConfig, shop, method, rows, settings, **own)


def kto(shop: Workshop, method: str, *, given: bool = False) -> Trainer:
    from trl import KTOConfig, KTOTrainer

    rows = shop.rows(
        prompt=text, completion=lambda i: " " + text(i + 5, 4), label=lambda i: i % 2 == 0
    )
    reference = shop.policy() if given else None
    settings = {"max_length": 64}
    return _of_trl(KTOTrainer, KTOConfig, shop, method, rows, settings, ref_model=reference)


def reward(shop: Workshop, method: str) -> Trainer:
    from trl import RewardConfig, RewardTrainer

    rows = shop.rows(chosen=text, rejected=lambda i: text(i + 9, 5))
    own = {"model": shop.classifier(1), "task": "SEQ_CLS"}
    return _of_trl(RewardTrainer, RewardConfig, shop, method, rows, {"max_length": 64}, **own)


def grpo(shop: Workshop, method: str, **settings: Any) -> Trainer:
    from trl import GRPOConfig, GRPOTrainer

    rows, rewards = shop.rows(prompt=text), settings.pop("reward_funcs", by_length)
    own = {
        "reward_funcs": rewards,
        "reward_processing_classes": shop.tokenizer if isinstance(rewards, str) else None,
    }
    return _of_trl(GRPOTrainer, GRPOConfig, shop, method, rows, GENERATION | settings, **own)


def rloo(shop: Workshop, method: str, **settings: Any) -> Trainer:
    from trl import RLOOConfig, RLOOTrainer

    rows, own = shop.rows(prompt=text), {"reward_funcs": by_length}
    return _of_trl(RLOOTrainer, RLOOConfig, shop, method, rows, GENERATION | settings, **own)


def distillation(shop: Workshop, method: str) -> Trainer:
    from trl import DistillationConfig, DistillationTrainer

    rows, own = shop.rows(prompt=text), {"teacher_model": shop.policy("teacher")}
    settings = {"max_completion_length": 8}
    return _of_trl(DistillationTrainer, DistillationConfig, shop, method, rows, settings, **own)


def gkd(shop: Workshop, method: str) -> Trainer:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    def messages(i: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": text(i)},
            {"role": "assistant", "content": text(i + 5, 4)},
        ]

    rows, own = shop.rows(messages=messages), {"teacher_model": shop.policy("teacher")}
    settings = {"max_length": 64, "max_new_tokens": 8}
    return _of_trl(GKDTrainer, GKDConfig, shop, method, rows, settings, **own)


def _adapted(model: Any, method: str, task: str | None = None) -> Any:
    wanted = adapters(method, task)
    return model if wanted is None else get_peft_model(model, wanted)


def classification(shop: Workshop, method: str) -> Trainer:
    rows = shop.rows(
        **{
            "input_ids": lambda i: shop.tokenizer(text(i))["input_ids"],
            "labels": lambda i: i % 3,
        }
    )
    return Trainer(
        model=_adapted(shop.classifier(3), method, "SEQ_CLS"),
        args=TrainingArguments(str(shop.folder), **COMMON),
        train_dataset=rows,
        processing_class=shop.tokenizer,
    )


def seq2seq(shop: Workshop, method: str) -> Trainer:
    torch.manual_seed(0)
    config = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=len(shop.tokenizer),
        pad_token_id=shop.tokenizer.pad_token_id,    )  # fmt: skip
    config.decoder_start_token_id = 0
    model = _adapted(T5ForConditionalGeneration(config), method, "SEQ_2_SEQ_LM")
    rows = shop.rows(
        **{
            "input_ids": lambda i: shop.tokenizer(text(i))["input_ids"],
            "labels": lambda i: shop.tokenizer(text(i + 5, 4))["input_ids"],
        }
    )
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(shop.folder), **COMMON),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(shop.tokenizer, model),
        processing_class=shop.tokenizer,
    )


def _plain(model: Any, rows: Any, shop: Workshop, method: str, **kwargs: Any) -> Trainer:
    args = TrainingArguments(str(shop.folder), **COMMON)
    return Trainer(model=_adapted(model, method), args=args, train_dataset=rows, **kwargs)


def vision(shop: Workshop, method: str) -> Trainer:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=3,
    )  # fmt: skip
    rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 3} for i in range(16)]
    return _plain(ViTForImageClassification(config), rows, shop, method)


def speech(shop: Workshop, method: str) -> Trainer:
    """Recognition with a connectionist loss; the convolutions before the encoder train, too."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(32, 32, 32), conv_kernel=(10, 3, 2), conv_stride=(5, 2, 2),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        vocab_size=32, mask_time_prob=0.0, layerdrop=0.0, ctc_zero_infinity=True,
    )  # fmt: skip
    rows = [
        {"input_values": torch.randn(1600), "labels": torch.randint(1, 32, (12,))}
        for _ in range(16)
    ]
    return _plain(Wav2Vec2ForCTC(config), rows, shop, method)


def speech_seq2seq(shop: Workshop, method: str) -> Trainer:
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16,
        max_source_positions=32, max_target_positions=32, vocab_size=len(shop.tokenizer),
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    rows = [
        {"input_features": torch.randn(16, 64), "labels": torch.randint(3, 500, (12,))}
        for _ in range(16)
    ]
    args = Seq2SeqTrainingArguments(str(shop.folder), **COMMON)
    model = _adapted(WhisperForConditionalGeneration(config), method)
    return Seq2SeqTrainer(model=model, args=args, train_dataset=rows)


TRAINERS: dict[str, Make] = {
    "SFT": sft,
    "SFT, images": sft_images,
    "DPO": dpo,
    "DPO, reference given": lambda shop, method: dpo(shop, method, given=True),
    "DPO, precomputed": lambda shop, method: dpo(shop, method, precompute_ref_log_probs=True),
    "DPO, synchronized": lambda shop, method: dpo(
        shop, method, sync_ref_model=True, ref_model_sync_steps=2
    ),
    "KTO": kto,
    "KTO, reference given": lambda shop, method: kto(shop, method, given=True),
    "Reward": reward,
    "GRPO": grpo,
    "GRPO, beta 0.1": lambda shop, method: grpo(shop, method, beta=0.1),
    "GRPO, reward model": lambda shop, method: grpo(
        shop, method, reward_funcs=str(shop.folder / "reward")
    ),
    "RLOO": rloo,
    "RLOO, beta 0": lambda shop, method: rloo(shop, method, beta=0.0),
    "Distillation": distillation,
    "GKD": gkd,
    "Trainer, classification": classification,
    "Trainer, seq2seq (T5)": seq2seq,
    "Trainer, vision (ViT)": vision,
    "Trainer, speech (Wav2Vec2)": speech,
    "Trainer, speech (Whisper)": speech_seq2seq,
}
