"""Secrets that were written where a file of a run would keep them: refused, or left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from finetune.errors import ConfigError

TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b|\bxox[bp]-[\w-]{10,}"
)
"""Tokens of the hub, of OpenAI, GitHub, GitLab, AWS and Slack, by how they begin."""
IN_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,20}://[^/\s@]{0,256}?:[^/\s@]{1,512}@", re.IGNORECASE)
"""A URL with user and password; of bounded parts, since a value may be a megabyte long."""
NAMES = re.compile(
    r"(?i)^(.*[-_])?(auth_?token|access_?token|hub_token|api_?token|api_?key|secret(_?key)?|password"
    r"|passwd|credentials?)$|^token$"
)
"""Names of keys whose value is a secret; `eos_token` and `pad_token` are none."""
HIDDEN = "***"


def check_secrets(data: Any, at: tuple[str, ...] = ()) -> None:
    """Raise `ConfigError` for a recipe that holds a secret: names the key, not the secret."""
    if isinstance(data, dict):
        for key, value in data.items():
            # A key may be the secret itself: `data.path` maps sources to weights.
            safe = at if is_secret(str(key)) else (*at, str(key))
            if is_secret(str(key)) or (NAMES.match(str(key)) and isinstance(value, str) and value):
                raise _refused(safe)
            check_secrets(value, safe)
    elif isinstance(data, list | tuple):
        for part in data:
            check_secrets(part, at)
    elif isinstance(data, str) and is_secret(data):
        raise _refused(at)


def is_secret(text: str) -> bool:
    """True of a text with a token of a known form, or with a URL that holds a password."""
    return bool(TOKENS.search(text) or IN_URL.search(text))


def scrubbed(text: str) -> str:
    """A text to show, with `***` for each secret of a known form."""
    return IN_URL.sub(f"{HIDDEN}@", TOKENS.sub(HIDDEN, text))


def redacted(words: Sequence[str]) -> list[str]:
    """A command line to keep, with `***` for what is a secret by its form or by its option."""
    found: list[str] = []
    hide = False
    for word in words:
        name, separator, value = word.partition("=")
        option = NAMES.match(name.lstrip("-").rpartition(".")[2].replace("-", "_"))
        # `--token VALUE`: the word behind an option that names a secret is one, whatever it looks
        # like.
        if hide or (is_secret(word) and not separator):
            found.append(HIDDEN)
        elif separator and (option or is_secret(value) or is_secret(name)):
            found.append(f"{HIDDEN if is_secret(name) else name}={HIDDEN}")
        else:
            found.append(word)
        hide = bool(option) and word.startswith("-") and not separator
    return found


def _refused(at: tuple[str, ...]) -> ConfigError:
    key = ".".join(at)
    return ConfigError(
        f"{key} holds a secret, and every file of a run may be shared",
        where=key,
        why="recipes, receipts and checkpoints are stored in plain text",
        fix=f"~{key}, and set the secret in the environment (HF_TOKEN, WANDB_API_KEY) or "
        "`hf auth login`; give paths and URLs without user and password",
    )
