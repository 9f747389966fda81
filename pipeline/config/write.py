"""A recipe written out as TOML with every field, what changing it does, and its value: a file to edit."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from pipeline.config.recipe import FILLED_IN, Recipe
from pipeline.config.section import Section

WIDTH = 110


def commented_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML that ``load_recipe`` reads back to an equal one; unset fields stand commented out."""
    head = "# A grpoflow recipe. Start it with: grpoflow run --recipe THIS_FILE\n"
    return head + "\n".join(_section(recipe, "", None)) + "\n"


def _section(section: Section, path: str, description: str | None) -> list[str]:
    lines: list[str] = ["", *_comment(description), f"[{path}]"] if path else []
    inner: list[str] = []
    for name, field in type(section).model_fields.items():
        value, dotted = getattr(section, name), f"{path}.{name}".lstrip(".")
        if isinstance(value, Section):
            inner += _section(value, dotted, field.description)
        elif dotted not in FILLED_IN:
            lines += _comment(field.description)
            lines.append(f"# {name} =" if value is None else f"{name} = {_value(value)}")
    return lines + inner


def _comment(text: str | None) -> list[str]:
    return textwrap.wrap(" ".join((text or "").split()), WIDTH, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    if isinstance(value, Section):
        fields = {name: (getattr(value, name), field.default) for name, field in type(value).model_fields.items()}
        parts = [f"{n} = {_value(v)}" for n, (v, default) in fields.items() if n == "name" or (v and v != default)]
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False)
