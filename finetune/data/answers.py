"""Answers read as turns: what a model wrote, as content and thinking, by the marks of its template.

    <|channel|>analysis<|message|>greet<|end|><|start|>assistant<|channel|>final<|message|>ahoy
        -> {"role": "assistant", "thinking": "greet", "content": "ahoy"}

Transformers parses by a tokenizer's `response_template`. Few tokenizers have one, so the marks are
otherwise read off what the chat template prints around a probe. Without them, decoding as usual
joins thinking and content where the marks are special tokens (gpt-oss), and a conversation would
hold both as the content of an earlier turn.

Limits: calls of tools stay text, unless the tokenizer's own template parses them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

from finetune.data.chat import rendered

QUESTION, CONTENT, THOUGHT = "probed question", "probed answer", "probed thinking"
NAMES = ("reasoning_content", "thinking", "reasoning")
"""Keys that templates read thinking from; Transformers hands each of them the others', too."""
UNREADABLE = (ValueError, TypeError, KeyError)
"""What Transformers' parser raises for a call of a tool that is no JSON."""
CONVENTION = ("<think>", "</think>")
"""Marks of thinking that some templates take out of earlier answers, and never print."""


@dataclass(frozen=True)
class Answers:
    """How to read what a model answers.

    Attributes:
        template: response template of Transformers; None where an answer is all content.
        hides: decoding without special tokens loses marks that the template needs.
    """

    tokenizer: Any
    template: dict[str, Any] | None
    hides: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> Answers:
        """By the tokenizer's own response template, else by the marks that a probe shows."""
        if own := getattr(tokenizer, "response_template", None):
            return cls(tokenizer, own, hides=True)
        if not tokenizer.chat_template or (found := _marks(tokenizer)) is None:
            return cls(tokenizer, None)
        anchor, name, opening, closing, content = found
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(one.content for one in added if one.special)}
        # Without an opening the prompt has begun the thinking: all before its end is thinking.
        ahead = {"open_pattern": rf"(?=[\s\S]*?{re.escape(closing)})"}
        thinking = {"close": closing, "repeats": True, "join": "\n"}
        said = {"close": sorted(special), "repeats": True, "join": ""}
        fields = {
            name: thinking | ({"open": opening} if opening else ahead),
            "content": said | ({"open": content} if content else {}),
        }
        template = {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}
        marks = opening + closing + content
        return cls(tokenizer, template, any(one in marks for one in special))

    def parser(self, prompt: Any) -> Any:
        """Transformers' parser of text as it comes, behind a prompt in tokens, [T]; or None."""
        if self.template is None:
            return None
        return self.tokenizer.get_response_parser(self.template, prefix=prompt)

    def parsed(self, ids: Any, prompt: Any) -> dict[str, Any]:
        """The turn that these tokens are, behind a prompt in tokens, [T], or as text.

        Without content where there is none, or where a call of a tool is no JSON.
        """
        if self.template is None:
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            return {"role": "assistant", "content": str(text)}
        with contextlib.suppress(*UNREADABLE):
            return self.tokenizer.parse_response(ids, self.template, prefix=prompt)
        return {}

    def read(self, ids: Any, prompt: Any) -> dict[str, Any]:
        """The turn that these tokens are, whose content is their text where no other is found.

        That is an answer cut in its thinking, or of a model that does not know the marks.
        """
        turn = self.parsed(ids, prompt)
        return turn if turn.get("content") else replace(self, template=None).parsed(ids, prompt)


def _marks(tokenizer: Any) -> tuple[str, str, str, str, str] | None:
    """What begins an answer, name of its thinking, marks around that, and mark before content.

    None where the template prints no thinking. A mark before content that an answer without
    thinking has, too, is needed (gpt-oss); an empty thinking is none (Qwen 3).
    """
    ask: Any = [{"role": "user", "content": QUESTION}]
    reply = {"role": "assistant", "content": CONTENT}
    asked, prompt = (rendered(ask, [], tokenizer, add_generation_prompt=on) for on in (False, True))
    plain = rendered([*ask, reply], [], tokenizer)
    earlier = rendered([*ask, reply, *ask], [], tokenizer)
    # A template that rewrites earlier turns cannot be read off by a prefix.
    if not all(text.startswith(asked) and CONTENT in text for text in (plain, earlier)):
        return None
    leads = [text[len(asked) :].partition(CONTENT)[0] for text in (prompt, plain, earlier)]
    # Names that the template mentions first; each costs a rendering.
    for name in sorted(NAMES, key=lambda name: name not in tokenizer.chat_template):
        text = rendered([*ask, reply | {name: THOUGHT}], [], tokenizer)
        opening, printed, rest = text[len(asked) :].partition(THOUGHT)
        if printed and CONTENT in rest:
            anchor = _begin([*leads, opening])
            closing, lead = rest.partition(CONTENT)[0].strip(), leads[1][len(anchor) :].strip()
            content = lead if closing != lead and closing.endswith(lead) else ""
            closing, opening = closing.removesuffix(content).strip(), opening[len(anchor) :].strip()
            break
    else:
        if CONVENTION[1] not in tokenizer.chat_template:
            return None
        name, (opening, closing), content = NAMES[0], CONVENTION, ""
        anchor = _begin(leads)
    anchor = anchor.strip() or asked.rpartition(QUESTION)[2].strip()
    return (anchor, name, opening, closing, content) if anchor and closing else None


def _begin(texts: list[str]) -> str:
    """What all begin with."""
    alike = itertools.takewhile(lambda chars: len({*chars}) == 1, zip(*texts, strict=False))
    return "".join(chars[0] for chars in alike)
