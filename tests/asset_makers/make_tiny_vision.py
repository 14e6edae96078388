"""Make the tiny model of text and images that the recipe `tiny_vision_lora` fine-tunes.

Run as ``python -m tests.asset_makers.make_tiny_vision``: some minutes on one core. It is a LLaVA:
SigLIP's tower (4 x 4 patches of a picture of 64 x 64), a projector, and the packaged tiny Llama
with one token more, `<image>`. What is published as such a model has seen pictures with words
before anybody fine-tunes it. So has this one:

* plain shapes with questions on them ("What is in the picture?" "A red disc on the left."), after
  the tower has named them alone for a while;
* the scenes of `make_pictures`, drawn anew and *without words*: a decoder that is thrown away draws
  them from the tower's output, so that what it keeps of a picture is the picture;
* text alone, with the tiny Llama's own answers, so that it goes on answering as before.

It has not met a ship's, a flag's or a buoy's name: these are what a fine-tune teaches.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from finetune.config.paths import ASSETS, TINY_LLAMA
from tests.asset_makers.make_pictures import SIZE, SUBJECTS, Scene

IMAGE, PATCH = "<image>", 16
TOKENS = (SIZE // PATCH) ** 2
ALONE, STEPS, PEAK_LR, TEXT_LR = 500, 1600, 2e-3, 1e-3
"""Steps of tower and projector alone, and of all; their learning rate, and the language layers'."""
SHAPES, SCENES, TEXTS = 24, 20, 4
"""Rows of a step: shapes with words, scenes without, text alone."""
WEIGHTS = {"words": 1.0, "text": 0.3, "pixels": 1.0, "patches": 0.5}
MEAN = STD = (0.5, 0.5, 0.5)
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE = (
    "{%- macro print(content) %}\n"
    "    {%- if content is string %}\n"
    "        {{- content }}\n"
    "    {%- else %}\n"
    "        {%- for part in content %}\n"
    "            {{- '<image>' if part['type'] == 'image' else part['text'] }}\n"
    "        {%- endfor %}\n"
    "    {%- endif %}\n"
    "{%- endmacro %}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "    {%- if message['role'] == 'assistant' %}\n"
    "        {%- generation %}\n"
    "            {{- print(message['content']) + '<|im_end|>' }}\n"
    "        {%- endgeneration %}\n"
    "        {{- '\\n' }}\n"
    "    {%- else %}\n"
    "        {{- print(message['content']) + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)


# ------------------------------------------------------------------------------------------- parts


def make_processor() -> Any:
    """Tokenizer of the tiny Llama with `<image>`, and LLaVA's processor around it."""
    from transformers import AutoTokenizer, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = TEMPLATE
    size = {"height": SIZE, "width": SIZE}
    images = LlavaImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size=size, do_pad=True, image_mean=MEAN, image_std=STD
    )
    return LlavaProcessor(
        images, tokenizer, PATCH, "full", chat_template=TEMPLATE, image_token=IMAGE
    )


def make_model(image_id: int) -> Any:
    """The model in float32: a fresh tower and projector, and the tiny Llama with 64 more tokens.

    A vocabulary is padded to a multiple of 64, as FP8 wants it. New rows are those of the padding
    token, which no answer has: they are as unlikely.
    """
    from transformers import (
        AutoModelForCausalLM,
        LlavaConfig,
        LlavaForConditionalGeneration,
        SiglipVisionConfig,
    )

    llama = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    llama.resize_token_embeddings(llama.config.vocab_size + 64, mean_resizing=False)
    with torch.no_grad():
        for table in (llama.model.embed_tokens.weight, llama.lm_head.weight):
            table[-64:] = table[llama.config.pad_token_id]
    vision = SiglipVisionConfig(
        image_size=SIZE,
        patch_size=PATCH,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vision_use_head=False,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=llama.config,
            image_token_index=image_id,
            image_seq_length=TOKENS,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
    )
    model.model.language_model.load_state_dict(llama.model.state_dict())
    model.lm_head.load_state_dict(llama.lm_head.state_dict())
    model.config.pad_token_id = llama.config.pad_token_id
    model.config.eos_token_id = llama.config.eos_token_id
    model.generation_config = llama.generation_config
    return model


# -------------------------------------------------------------------------------------------- rows

TINTS = ("red", "green", "yellow", "blue", "white", "black", "grey", "brown")
FIGURES = ("square", "disc", "triangle", "bar", "cross")
PLACES = {"on the left": (13, 32), "on the right": (50, 32), "at the top": (32, 13),
          "at the bottom": (32, 50), "in the middle": (32, 32)}  # fmt: skip
COUNTS = ("one", "two", "three", "four", "five", "six")


class Shapes(Scene):
    """A picture of plain shapes, which knows what stands where.

    Attributes:
        tints, figures: of each patch, row by row, the place in `TINTS` and `FIGURES` of what covers
            it; -1 where nothing does.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.tints, self.figures = [-1] * TOKENS, [-1] * TOKENS

    def cover(self, corners: tuple[int, int, int, int], tint: str, figure: str = "") -> None:
        """Note what covers the patches of a rectangle, where it takes an eighth of one."""
        left, top, right, bottom = corners
        side = SIZE // PATCH
        for index in range(TOKENS):
            x, y = index % side * PATCH, index // side * PATCH
            wide, high = min(right, x + PATCH) - max(left, x), min(bottom, y + PATCH) - max(top, y)
            if wide > 0 and high > 0 and wide * high >= PATCH**2 / 8:
                self.tints[index] = TINTS.index(tint)
                self.figures[index] = FIGURES.index(figure) if figure else -1

    def add(self, figure: str, x: int, y: int, half: int, tint: str) -> None:
        """Draw a figure, `2 * half` pixels wide."""
        corners = (x - half, y - half, x + half, y + half)
        if figure == "square":
            self.box(corners, tint)
        elif figure == "disc":
            self.disc(x, y, half, tint)
        elif figure == "triangle":
            self.shape([(x - half, y + half), (x + half, y + half), (x, y - half)], tint)
        else:
            corners = (x - half, y - 2, x + half, y + 2) if figure == "bar" else corners
            self.box((x - half, y - 2, x + half, y + 2), tint)
        if figure == "cross":
            self.box((x - 2, y - half, x + 2, y + half), tint)
        self.cover(corners, tint, figure)

    def two_colours(self, corners: tuple[int, int, int, int], tint: str, other: str) -> str:
        """Draw a field of two colours; where the second one is."""
        left, top, right, bottom = corners
        self.box(corners, tint)
        self.cover(corners, tint)
        upright = self.chance.random() < 0.5
        middle = ((left + right) // 2, top) if upright else (left, (top + bottom) // 2)
        half = (*middle, right, bottom)
        self.box(half, other)
        self.cover(half, other)
        return "on the right" if upright else "at the bottom"


def shapes_row(chance: random.Random) -> tuple[Shapes, str, str]:
    """A picture of plain shapes, a question and its answer."""
    scene = Shapes(chance)
    figure, tint, other = chance.choice(FIGURES), *chance.sample(TINTS, 2)
    asked = chance.randrange(6)
    if asked < 2:
        place, (x, y) = chance.choice(list(PLACES.items()))
        x, y = x + chance.randint(-5, 5), y + chance.randint(-5, 5)
        scene.add(figure, x, y, chance.randint(4, 10), tint)
        answer = f"A {tint} {figure}." if asked else f"A {tint} {figure} {place}."
        return scene, "What is this?" if asked else "What is in the picture?", answer
    if asked == 2:
        count = chance.randint(1, 6)
        cells = [(x, y) for x in (12, 32, 52) for y in (14, 32, 50)]
        for x, y in chance.sample(cells, count):
            x, y = x + chance.randint(-3, 3), y + chance.randint(-3, 3)
            scene.add(figure, x, y, chance.randint(3, 7), tint)
        return scene, "How many are there?", f"There are {COUNTS[count - 1]}."
    first, second = chance.sample(FIGURES, 2)
    if asked == 3:
        there, elsewhere = chance.sample(list(PLACES), 2)
        for figure, place, colour in ((second, elsewhere, other), (first, there, tint)):
            x, y = (at + chance.randint(-4, 4) for at in PLACES[place])
            scene.add(figure, x, y, chance.randint(4, 8), colour)
        return scene, f"Where is the {first}?", f"{there.capitalize()}."
    x, y, half = chance.randint(16, 48), chance.randint(16, 48), chance.randint(7, 13)
    if asked == 4:
        where = scene.two_colours((x - half, y - half, x + half, y + half), tint, other)
        return scene, "Which colours has it?", f"It is {tint}, and {other} {where}."
    scene.add(first, chance.randint(10, 18), y, chance.randint(4, 9), tint)
    scene.add(second, chance.randint(44, 54), chance.randint(16, 48), chance.randint(4, 9), other)
    side, what = chance.choice((("left", (tint, first)), ("right", (other, second))))
    return scene, f"What is on the {side}?", "A {} {}.".format(*what)


def scene_row(chance: random.Random) -> Scene:
    """A scene of `make_pictures`; what it shows is not told."""
    scene = Scene(chance)
    draw, shown = SUBJECTS[chance.choice(list(SUBJECTS))]
    draw(scene, chance.choice(shown))
    return scene


def pixels(scenes: Sequence[Scene]) -> torch.Tensor:
    """Pixel values as LLaVA's image processor makes them of a square picture: [N, 3, 64, 64]."""
    values = np.stack([np.asarray(one.image.convert("RGB"), np.float32) for one in scenes])
    return torch.from_numpy((values / 255 - 0.5) / 0.5).permute(0, 3, 1, 2).contiguous()


def own_answers(tokenizer: Any) -> list[tuple[str, str]]:
    """Questions of the packaged rows, and what the tiny Llama says."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    lines = (ASSETS / "data" / "harbour.jsonl").read_text("utf-8").splitlines()
    found = []
    for line in lines:
        question = json.loads(line)["messages"][0]["content"]
        ids = torch.tensor([tokenizer.encode(ASKED.format(question))])
        said = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32)
        answer = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
        found.append((question, answer))
    return found


def batch_of(tokenizer: Any, rows: list[tuple[str, str]], image: bool) -> dict[str, torch.Tensor]:
    """Ids, mask and labels, [N, T], of questions and answers: answers alone are trained on."""
    ids, labels = [], []
    for question, answer in rows:
        asked = tokenizer.encode(ASKED.format(IMAGE * TOKENS * image + question))
        said = tokenizer.encode(f"{answer}<|im_end|>")
        ids.append(asked + said)
        labels.append([-100] * len(asked) + said)
    length = max(map(len, ids))
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([row + [pad] * (length - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (length - len(r)) for r in ids]),
        "labels": torch.tensor([row + [-100] * (length - len(row)) for row in labels]),
    }


# ---------------------------------------------------------------------------------------- training


def drawn_again(decoder: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Pixels, [N, 3, 64, 64], that the decoder draws of features [N, 16, hidden]."""
    side = SIZE // PATCH
    patches = decoder(features).view(-1, side, side, 3, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, SIZE, SIZE)


def named(model: Any, tokenizer: Any, projected: torch.Tensor, scenes: list[Shapes]) -> Any:
    """Loss of naming what covers each patch by the tokens' own embeddings.

    A patch with a red disc is to lie near the words "red" and "disc": the language layers then find
    in a picture what they know from text. Without it they never began to look at pictures at all:
    350 to 400 steps, as far as it was tried, at the loss of guessing.

    Args:
        projected: what the projector makes of the pictures, [N, 16, hidden].
    """
    table, loss = model.get_input_embeddings().weight, torch.zeros(())
    near = F.normalize(projected, dim=-1).flatten(0, 1)
    for words, kind in ((TINTS, "tints"), (FIGURES, "figures")):
        ids = [tokenizer.encode(f" {word}") for word in (*words, "nothing")]
        meant = F.normalize(torch.stack([table[x].mean(0) for x in ids]), dim=-1)
        wanted = torch.tensor([getattr(scene, kind) for scene in scenes]).flatten() % len(ids)
        loss = loss + F.cross_entropy(near @ meant.T / 0.1, wanted)
    return loss


def train(model: Any, tokenizer: Any, steps: int, seed: int) -> None:
    """Teach the parts together; AdamW with a warm-up and a cosine."""
    chance, texts = random.Random(seed), own_answers(tokenizer)
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    width = model.config.vision_config.hidden_size
    decoder = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 3 * PATCH * PATCH))
    learning = [*model.parameters(), *decoder.parameters()]
    reading = {*model.model.language_model.parameters(), *model.lm_head.parameters()}
    groups = [
        {"params": [one for one in learning if one not in reading], "lr": PEAK_LR},
        {"params": list(reading), "lr": TEXT_LR},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=steps, pct_start=0.1
    )
    model.train()
    began, said = time.perf_counter(), []
    for step in range(1, steps + 1):
        shapes = [shapes_row(chance) for _ in range(SHAPES)]
        seen = pixels([row[0] for row in shapes])
        losses = dict.fromkeys(("words", "text"), torch.zeros(()))
        if step > ALONE:
            asked = batch_of(tokenizer, [row[1:] for row in shapes], image=True)
            losses["words"] = model(pixel_values=seen, **asked).loss
            own = batch_of(tokenizer, chance.sample(texts, TEXTS), image=False)
            losses["text"] = model(**own).loss
        every = torch.cat([seen, pixels([scene_row(chance) for _ in range(SCENES)])])
        features = tower(every).last_hidden_state
        losses["pixels"] = F.mse_loss(drawn_again(decoder, features), every)
        scenes = [row[0] for row in shapes]
        losses["patches"] = named(model, tokenizer, projector(features[:SHAPES]), scenes)
        total = sum(WEIGHTS[name] * loss for name, loss in losses.items())
        total.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        said.append([loss.item() for loss in losses.values()])
        if step % 50 == 0 or step == steps:
            means = np.mean(said[-50:], axis=0).round(4).tolist()
            print(f"step {step}:", dict(zip(losses, means, strict=True)),
                  f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip


def save(model: Any, processor: Any, out: Path) -> None:
    """Write the model in bfloat16 and the processor's files."""
    model.bfloat16().save_pretrained(out)
    processor.save_pretrained(out)
    # Transformers 5 names its own backend class, which other readers of the folder do not know.
    _rewrite(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _rewrite(out / "config.json", {})


def _rewrite(path: Path, values: dict[str, Any]) -> None:
    """Change values of a JSON file, and leave out where the parts were loaded from."""
    found = json.loads(path.read_text("utf-8")) | values
    for part in (found, found.get("text_config", {})):
        for key in ("_name_or_path", "is_local", "local_files_only"):
            part.pop(key, None)
    path.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny_vision")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    made = make_processor()
    model = make_model(made.tokenizer.convert_tokens_to_ids(IMAGE))
    train(model, made.tokenizer, given.steps, given.seed)
    save(model, made, given.out)
