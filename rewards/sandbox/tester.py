"""Inside: runs a problem's own test against a program in another process. Started by path.

The test's text and its expected values never enter the program's process, which is only asked for plain values.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from channel import Channel, decode, encode
from lockdown import lock

sys.path.pop(0)


class NotPassable(TypeError):
    """The test hands the program something that cannot travel (a function, an object of the test's own)."""


class Remote:
    """Stands for a function, class or object of the program."""

    def __init__(self, channel: Channel, reference: dict) -> None:
        self._channel, self._reference = channel, reference

    def _ask(self, what: str, *arguments: Any, **keywords: Any) -> Any:
        self._channel.send({
            "what": what, "on": self._reference, "arguments": encode(list(arguments), _reference_of),
            "keywords": encode(keywords, _reference_of),
        })  # fmt: skip
        answer = self._channel.receive()
        if "error" in answer:
            raise _rebuilt(*answer["error"])
        for index, value in answer.get("changed", {}).items():
            _assign(arguments[int(index)], self._decoded(value))
        return self._decoded(answer["value"])

    def _decoded(self, data: Any) -> Any:
        return decode(data, lambda reference: Remote(self._channel, {"object": int(reference["object"])}))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __len__(self) -> int:
        return self._ask("length")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("items"))

    def __str__(self) -> str:
        return self._ask("text")


def _reference_of(value: Any) -> dict:
    if isinstance(value, Remote):
        return value._reference
    raise NotPassable(f"a {type(value).__name__} cannot be handed to the program")


def _assign(target: Any, value: Any) -> None:
    """Make the test's list, dictionary or set what the program made of its copy."""
    target.clear()
    target.extend(value) if isinstance(target, list) else target.update(value)


def _rebuilt(name: str, message: str) -> Exception:
    """The program's exception as the test may expect it; never one that would end this process."""
    kind = getattr(builtins, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {message}")
    try:
        return kind(message)
    except Exception:  # UnicodeDecodeError and its like take more than a message
        return RuntimeError(f"{name}: {message}")


def free_names(source: str) -> set[str]:
    """Names that the test uses and neither binds itself nor finds among the built-in ones."""
    used: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def run_test(source: str, channel: Channel) -> tuple[str, str]:
    """("passed", ""), ("failed", why), or ("error", why) for a test that says nothing about the program."""
    try:
        code, names = compile(source, "test.py", "exec"), free_names(source)
    except (SyntaxError, ValueError) as error:
        return "error", f"the test does not compile: {error}"
    namespace: dict[str, Any] = {name: Remote(channel, {"name": name}) for name in names}
    namespace["__name__"] = "test"
    try:
        ready = channel.receive()
        if "error" in ready:
            return "failed", ": ".join(ready["error"])
        exec(code, namespace)
    except NotPassable as error:
        return "error", str(error)
    except EOFError:
        return "failed", "the program ended"
    except BaseException as error:  # whatever a test raises, it has not passed
        return "failed", f"{type(error).__name__}: {error}"[:300]
    return "passed", ""


def main() -> None:
    """``argv[1]`` is the settings as JSON, ``argv[2]`` and ``argv[3]`` the descriptors of the pipes to the program."""
    settings = json.loads(sys.argv[1])
    with open(settings["test"], encoding="utf-8") as file:
        source = file.read()
    channel, answers = Channel(int(sys.argv[2]), int(sys.argv[3])), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.chdir(settings["folder"])
    lock(settings)
    os.write(answers, json.dumps(run_test(source, channel)).encode())


if __name__ == "__main__":
    main()
