"""Make the tiny Llama that the toolkit's examples and tests fine-tune.

Run as ``python -m tests.asset_makers.make_tiny_llama``. The script writes a plain-English corpus
(``corpus.py``), trains a byte-level BPE tokenizer on it, trains a Llama of about 1.4 million
parameters in float32 on one CPU core, and saves both as a Hugging Face folder in bfloat16.

The shapes are small but not odd: every linear layer's dimensions are multiples of 64, the heads are
grouped (GQA), and the embeddings are untied. So the paths a real checkpoint takes through FP8 and
LoRA code are taken here too.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import ASSETS
from tests.asset_makers import corpus

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

PAD = "<|pad|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

VOCAB_SIZE = 1536
CONTEXT = 512
"""The most positions the model takes. Training rows are shorter, see ``ROW_LENGTH``."""

ROW_LENGTH = 128
ROWS_PER_BATCH = 16
STEPS = 2200
PEAK_LR = 3e-3
WARMUP_STEPS = 60
TOKENIZER_DOCUMENTS = 6000

CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "    {%- if message['role'] == 'assistant' %}\n"
    # The end-of-turn token is inside the markers: a model trained on assistant tokens only has to
    # learn to stop.
    "        {%- generation %}\n"
    "            {{- message['content'] + '<|im_end|>' }}\n"
    "        {%- endgeneration %}\n"
    "        {{- '\\n' }}\n"
    "    {%- else %}\n"
    "        {{- message['content'] + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)


def train_tokenizer(seed: int) -> Any:
    """Return a byte-level BPE tokenizer trained on a sample of the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(seed), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"the corpus fills {tokenizer.get_vocab_size()} of {VOCAB_SIZE} tokens: make it larger"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=IM_END,
        model_max_length=CONTEXT,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _plain_texts(seed: int) -> Iterator[str]:
    """Yield the text of the corpus without chat markup, for the tokenizer's merges."""
    yield "user\nassistant\nsystem\n"
    for document in corpus.documents(seed, TOKENIZER_DOCUMENTS):
        if isinstance(document, str):
            yield document
        else:
            for message in document:
                yield message["content"]


def packed_rows(tokenizer: Any, rows: int, length: int, seed: int) -> "torch.Tensor":
    """Return ``rows`` rows of ``length`` token ids, corpus documents laid end to end."""
    import torch

    wanted = rows * length
    ids: list[int] = []
    chunk = 1000
    rng = random.Random(seed)
    while len(ids) < wanted:
        for document in corpus.documents(rng.randrange(2**31), chunk):
            if isinstance(document, str):
                ids.extend(tokenizer.encode(document))
                ids.append(tokenizer.eos_token_id)
            else:
                ids.extend(
                    tokenizer.apply_chat_template(document, tokenize=True, return_dict=False)
                )
    return torch.tensor(ids[:wanted]).view(rows, length)


def build_model(tokenizer: Any) -> "LlamaForCausalLM":
    """Return a freshly initialised float32 model for the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(model: "LlamaForCausalLM", rows: "torch.Tensor", steps: int) -> float:
    """Train the model on the rows, one batch a step, and return the mean of the last losses.

    AdamW with a linear warm-up and a cosine down to a tenth of the peak learning rate.
    """
    import torch
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05
    )
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, min(WARMUP_STEPS, steps // 5), steps, min_lr_rate=0.1
    )
    model.train()
    losses: list[float] = []
    started = time.perf_counter()
    for step, batch in enumerate(rows.split(ROWS_PER_BATCH), start=1):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            recent = losses[-100:]
            print(
                f"step {step}/{steps}  loss {sum(recent) / len(recent):.4f}  "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
    recent = losses[-50:]
    return sum(recent) / len(recent)


def save(model: "LlamaForCausalLM", tokenizer: Any, out: Path) -> None:
    """Write the model in bfloat16, the tokenizer and a greedy generation config to ``out``."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.bfloat16()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Transformers 5 names its own backend class, which version 4 and other readers of the folder
    # do not know; the older name is understood by both.
    config_path = out / "tokenizer_config.json"
    tokenizer_config = json.loads(config_path.read_text(encoding="utf-8"))
    tokenizer_config["tokenizer_class"] = Any
    config_path.write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Make the tokenizer and the model and save them."""
    parser = argparse.ArgumentParser(description="Make the tiny Llama the toolkit ships with.")
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny_llama")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    import torch

    # One thread: the sums come out in the same order on any machine with the same kernels, and a
    # model this small gains little from more.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    tokenizer = train_tokenizer(args.seed)
    rows = packed_rows(tokenizer, args.steps * ROWS_PER_BATCH, ROW_LENGTH, args.seed)
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {rows.numel():,} training tokens", flush=True)
    loss = train(model, rows, args.steps)
    save(model, tokenizer, args.out)
    print(f"final loss {loss:.4f}, saved to {args.out}")


if __name__ == "__main__":
    main()
