"""Rehearsal of answers that a model writes in training, before the micro-batches that learn them.

TRL's trainers call `generate` once for the rows of several micro-batches. Two of its forwards are
rehearsed, by Transformers' own code: one of all prompts, and one of the last token, which reads
the longest cache. Between them the cache is lengthened. The ids that come out have no values, so
answers of full length stand for them, and TRL's bookkeeping goes on with these: it pads, and
computes the log-probabilities of the old policy and of the reference where its settings ask for
them. Rewards are a constant; reward models are not there.

    mark      what follows
    prompts   forward of all prompts of a generation, phase `prompt`
    answers   forward of the last token, phase `token`
    forward   what else is done once for a generation
    written   the micro-batch that trains
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from finetune.config.methods import Method, arguments
from finetune.config.train_keys import TrainerArguments
from finetune.estimator.trace.fake_cuda import replaced
from finetune.estimator.trace.trace import Recorder
from finetune.precision.model.layers import without_adapters

TOKEN = 3
"""Id of all tokens: one that ends nothing, in the tokenizer of rehearsals."""
LARGE = 2**25
"""Most ids of a generation: 8,192 rows of 4,096 tokens."""
PROMPT = {"prompt": ""}
"""A row of data; its ids are `WritingTrainer.prompts`."""


def settle(train: dict[str, Any], method: Method, micro_batches: int) -> None:
    """Say in settings of one micro-batch how many of them a generation is for."""
    train.pop("max_length", None)
    if "steps_per_generation" in arguments(method) and "generation_batch_size" not in train:
        train.setdefault("steps_per_generation", micro_batches)


def nothing(prompts: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [0.0] * len(prompts)


def writing(trainer: type[Any]) -> type[Any]:
    """The class of a trainer of rehearsals whose rows are written."""
    from finetune.data.pairs import AccountedPairs

    class WritingTrainer(trainer):
        """Trainer that starts with a generation.

        Attributes:
            prompts: ids of the prompts of a generation.
            answer: tokens of an answer.
            rows: prompts of a micro-batch.
            shown: what a model takes of their images; nothing: they have none.
        """

        prompts: list[list[int]]
        answer: int
        rows: int
        shown: dict[str, Tensor]

        def begin(self, length: int, answer: int, *, padded: bool) -> None:
            """Set prompts and answers of rows with `length` tokens at most."""
            self.answer, self.shown = max(1, min(answer, length - 1)), {}
            prompt = [TOKEN] * max(1, length - self.answer)
            # Of one token nothing can be left out.
            shorter = prompt[padded:] or prompt
            args = TrainerArguments(self.args)
            self.rows = rows = args.per_device_train_batch_size
            self.tokens = rows * (len(prompt) + self.answer)
            self.every = args.steps_per_generation or self.micro_batches
            self.generations = self.micro_batches / self.every
            # GRPO trains on the same answers so many times before it writes new ones.
            self.generations /= args.num_iterations or 1
            rows *= self.every
            self.prompts = [prompt, *[shorter] * (rows - 1)]
            self.batches = [[PROMPT] * rows]
            reads = {"__call__": lambda *_, **__: {"input_ids": self.prompts}}
            tokenizer: Any = self.processing_class
            # Python looks `__call__` up on the class, so an attribute of the object would not be
            # found.
            tokenizer.__class__ = type("Tokenizer", (type(tokenizer),), reads)

        def show(
            self,
            arrays: dict[str, Tensor],
            where: list[list[bool]],
            marks: set[str],
            *,
            beside: bool,
        ) -> None:
            """Put images of a micro-batch into the prompts of all.

            Args:
                where: of the first tokens of each row, which are an image's.
                marks: inputs of the model that mark such tokens by 1.
                beside: they are before what a prompt has; else in its place.
            """
            own = [[self.of_image if on else TOKEN for on in row] for row in where]
            at = 0 if beside else len(own[0])
            self.prompts = [own[n % self.rows] + row[at:] for n, row in enumerate(self.prompts)]
            self.tokens += sum(map(len, own)) * beside
            self.shown, self.marks = arrays, marks
            for model in filter(None, (self.model, getattr(self, "ref_model", None))):
                inner = without_adapters(model)
                inner.register_forward_pre_hook(self.as_shown, with_kwargs=True)

        @property
        def of_image(self) -> int:
            """Id of the token of images."""
            return self.model.config.image_token_id

        def images_of(self, input_ids: Tensor) -> dict[str, Any]:
            """What a model takes of the images of rows; none without images."""
            if not self.shown:
                return {}
            times = len(input_ids) // self.rows
            found = {name: torch.cat([one] * times) for name, one in self.shown.items()}
            return found | {name: input_ids.eq(self.of_image).long() for name in self.marks}

        def as_shown(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            """Forward pre-hook: what TRL would hand over of the images of rows."""
            if "pixel_values" in kwargs or kwargs.get("past_key_values") is not None:
                return None  # to write answers, they are handed to `generate`
            return args, kwargs | self.images_of(kwargs["input_ids"])

        compute_loss_context_manager = AccountedPairs.compute_loss_context_manager

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            """Write the rows; a generation for whole steps comes before there are gradients."""
            with_gradient = [p for p in self.model.parameters() if p.grad is not None]
            emptied = with_gradient if self.every % self.micro_batches == 0 else []
            for p in emptied:
                p.grad = None
            write = _generate(self.model.generate, self.recorder, self.answer, self.images_of)
            # Of the run's micro-batches the rehearsal makes one, and TRL counts them.
            name = TrainerArguments.gradient_accumulation_steps.name_in(self.args)
            counted = self.args, name, self.micro_batches
            # Ids of all rows are real; a micro-batch has few of them.
            small = self.recorder, "small", LARGE
            judged = len(self.prompts) * len(getattr(self, "reward_funcs", ()))
            real = self.recorder, "rewards", judged
            with replaced([(self.model, "generate", write), counted, small, real]):
                inputs = super()._prepare_inputs(generation_batch)
            for p in emptied:
                p.grad = torch.empty_like(p)
            self.recorder.sort_gradients()
            self.recorder.mark("written")
            return inputs

    return WritingTrainer


def _generate(
    generate: Callable[..., Any],
    recorder: Recorder,
    answer: int,
    images_of: Callable[[Tensor], dict[str, Any]],
) -> Callable[..., Any]:
    """`model.generate` as it begins and as it ends; returns ids [rows, prompt + answer]."""

    def rehearsed(
        *, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig
    ) -> Tensor:
        (rows, prompt), config = input_ids.shape, deepcopy(generation_config)
        # With the cache in the result, which the last token is to read.
        config.update(max_new_tokens=1, return_dict_in_generate=True)
        once = {"generation_config": config}
        recorder.mark("prompts")
        with recorder.during("prompt"):
            asked = {"input_ids": input_ids, "attention_mask": attention_mask}
            made = generate(**asked, **images_of(input_ids), **once)
            recorder.sort_cache(_states(cache := made.past_key_values))
        recorder.mark("answers")
        if answer > 1:
            with recorder.during("other"):
                # The last token is only written, by the pass over the one before it, which adds its
                # own keys.
                _lengthen(cache, answer - 2)
                recorder.sort_cache(_states(cache))
                ids = _tokens(rows, prompt + answer - 1)
                seen = torch.cat([attention_mask, _tokens(rows, answer - 1)], dim=1)
            with recorder.during("token"):
                generate(input_ids=ids, attention_mask=seen, past_key_values=cache, **once)
        recorder.sort_cache(_states(cache))
        del made, cache
        recorder.mark("forward")
        return _tokens(rows, prompt + answer)

    return rehearsed


def _tokens(rows: int, length: int) -> Tensor:
    return torch.full((rows, length), TOKEN, dtype=torch.long)


def _states(cache: Any) -> Iterator[Tensor]:
    """Tensors that a cache has of each layer."""
    found = (value for layer in cache.layers for value in vars(layer).values())
    return (value for value in found if isinstance(value, Tensor))


def _lengthen(cache: Any, tokens: int) -> None:
    """Add keys and values of so many tokens to the layers that keep them; others keep a state."""
    for number, layer in enumerate(cache.layers):
        if isinstance(getattr(layer, "keys", None), Tensor):
            more = [
                x.new_empty((*x.shape[:2], tokens, x.shape[3])) for x in (layer.keys, layer.values)
            ]
            cache.update(*more, number)
