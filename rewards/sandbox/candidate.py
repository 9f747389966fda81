"""Inside: runs a program, as a script or as a set of functions that another process calls. Started by path."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from channel import Channel, decode, encode
from lockdown import lock

sys.path.pop(0)

MOST_ITEMS = 100_000
"""Items taken of an iterator."""


def main() -> None:
    """``argv[1]`` is the settings as JSON; the program is read before the process locks itself in."""
    settings = json.loads(sys.argv[1])
    with open(settings["program"], encoding="utf-8") as file:
        source = file.read()
    os.chdir(settings["folder"])
    channel = None
    if settings["functions"]:
        channel = Channel(os.dup(0), os.dup(1))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nowhere, descriptor)  # what the program prints or reads cannot disturb the calls
    sys.argv = ["program.py"]
    lock(settings)
    namespace: dict[str, Any] = {"__name__": "program" if channel else "__main__", "__builtins__": __builtins__}
    if channel is None:
        exec(compile(source, "program.py", "exec"), namespace)
        return
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except BaseException as error:  # SystemExit too: a program that ends has no functions to test
        channel.send({"error": _described(error)})
        return
    channel.send({"value": None})
    serve(channel, namespace)


def serve(channel: Channel, namespace: dict[str, Any]) -> None:
    """Answer one request after the other, until the tester closes the pipe."""
    kept: list[Any] = []

    def reference(value: Any) -> dict:
        kept.append(value)
        return {"object": len(kept) - 1}

    def dereference(data: dict) -> Any:
        return kept[data["object"]] if "object" in data else namespace[data["name"]]

    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        try:
            arguments = decode(request["arguments"], dereference)
            before = [json.dumps(encode(argument, id)) for argument in arguments]
            value = _perform(request["what"], decode(request["on"], dereference), arguments, request, dereference)
            changed = {
                str(index): encode(argument, reference)
                for index, argument in enumerate(arguments)
                if isinstance(argument, (list, dict, set)) and json.dumps(encode(argument, id)) != before[index]
            }
            channel.send({"value": encode(value, reference), "changed": changed})
        except Exception as error:
            channel.send({"error": _described(error)})


def _perform(what: str, target: Any, arguments: list, request: dict, dereference: Any) -> Any:
    if what == "call":
        return target(*arguments, **decode(request["keywords"], dereference))
    if what == "attribute":
        return getattr(target, arguments[0])
    if what == "item":
        return target[arguments[0]]
    if what == "length":
        return len(target)
    if what == "items":
        return [item for item, _ in zip(target, range(MOST_ITEMS))]  # noqa: B905 (the shorter one ends it)
    return str(target)


def _described(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)[:300]]


if __name__ == "__main__":
    main()
