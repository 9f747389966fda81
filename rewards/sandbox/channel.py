"""Plain values over a pipe, between the process that runs a program and the one that tests it.

Numbers, text, lists, tuples, sets and dictionaries travel as values; anything else stays where it is and travels as a
number that stands for it. So nothing that arrives can carry code, or an ``__eq__`` that is always true. Standard library
only: it is loaded by path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

LONGEST = 8 << 20
"""Bytes of one message."""


class Channel:
    """Messages of one line of JSON each, over two file descriptors."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink, self._received = source, sink, b""

    def send(self, message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        if len(data) > LONGEST:
            raise ValueError(f"a value of {len(data)} bytes; at most {LONGEST} can be passed")
        while data:
            data = data[os.write(self._sink, data) :]

    def receive(self) -> Any:
        """The next message; EOFError at the end, ValueError for one that is too long or not JSON."""
        while b"\n" not in self._received:
            chunk = os.read(self._source, 1 << 16)
            if not chunk:
                raise EOFError("the other process ended")
            self._received += chunk
            if len(self._received) > LONGEST:
                raise ValueError(f"a message of more than {LONGEST} bytes")
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """JSON for a value; ``reference`` gives what stands for anything that is not plain."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(name for name, type_ in KINDS.items() if isinstance(value, type_))
        return {kind: [encode(item, reference) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, reference), encode(item, reference)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    for plain in (bool, int, float, str):
        if isinstance(value, plain):  # a subclass: its plain value
            return plain(value)
    return reference(value)


KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def decode(data: Any, dereference: Callable[[dict], Any]) -> Any:
    """The value of ``encode``'s JSON; ``dereference`` gives what a reference stands for."""
    if not isinstance(data, dict):
        return data
    kind, content = next(iter(data.items()))
    if kind in KINDS:
        return KINDS[kind](decode(item, dereference) for item in content)
    if kind == "dict":
        return {decode(key, dereference): decode(item, dereference) for key, item in content}
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    return dereference(data)
