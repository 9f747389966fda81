"""Secrets stay out of recipes, which every run stores and every report shows: refused by their form, never repeated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

CREDENTIALS = re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/\s?#@]*@")
"""The user (and password) of a URL."""
SIGNED = re.compile(r"(?i)[?&][\w-]*(?:token|password|secret|signature|sig|api_?key|credential)=")
"""A URL that carries its own right of access."""
TOKEN = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|AKIA)[A-Za-z0-9_-]{16,}")
"""How common services begin their tokens."""
SECRET_NAME = re.compile(r"(?i)(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_KEY|NODE_KEY)(?:_ID)?$")
SHORTEST = 12
"""A variable's value of fewer characters may be part of any text."""


def refuse_secrets(data: Mapping[str, Any], origin: str) -> None:
    """ValueError that names the field, and not its value, where plain recipe data holds what looks like a secret."""
    known = {value: name for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}
    for field, text in _texts(data, ""):
        kind = next((f"the value of {name}" for value, name in known.items() if value in text), None)
        if CREDENTIALS.search(text):
            kind = "a URL with a user or password"
        elif SIGNED.search(text):
            kind = "a URL with a key in it"
        elif TOKEN.search(text):
            kind = "an access token"
        if kind:
            raise ValueError(
                f"recipe {without_credentials(origin)}: {field} holds {kind}, and every run stores its recipe: take it out; "
                f"libraries find tokens in the environment (HF_TOKEN, WANDB_API_KEY) or where their login put them"
            )


def without_credentials(text: str) -> str:
    """The text with ``***`` for the user and password of any URL in it."""
    return CREDENTIALS.sub(r"\1***@", text)


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """(dotted field, text) of every string, keys of tables included."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield field or "a section", str(name)
            yield from _texts(inner, f"{field}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{field}.{number}")
