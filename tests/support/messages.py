"""Assertions on messages: type, key and parameters, so that a sentence can be worded anew without changing a test.

`tests/golden/` has the sentences themselves.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from comfyui_tpu.tpu_runtime.messages import Message, compose_term


class Expected:
    """A message with this key and, among its parameters, these.

    parameters: of each, its text; a pattern that is searched for in it; for a nested message its key or another
    `Expected`, or the message itself; for a list of `compose_list` a list of these.
    """

    def __init__(self, key: str, /, **parameters: object) -> None:
        self.key, self.parameters = key, parameters

    def __repr__(self) -> str:
        return ", ".join([self.key, *(f"{name}={value!r}" for name, value in self.parameters.items())])

    def find_differences(self, text: object, where: str = "the message") -> list[str]:
        """Return one line for each difference of a message, nested ones included."""
        if not isinstance(text, Message) or not text.key:
            return [f"{where} has no key, {self.key!r} is expected: {str(text)!r}"]
        if text.key != self.key:
            return [f"{where} has the key {text.key!r}, not {self.key!r}: {str(text)!r}, {dict(text.parameters)!r}"]
        return [
            line
            for name, expected in self.parameters.items()
            for line in _compare(expected, text.parameters, name, f"{name} of {self.key}")
        ]


def _compare(expected: object, parameters: Mapping[str, str], name: str, where: str) -> list[str]:
    if name not in parameters:
        return [f"{where} is not a parameter; there are {', '.join(parameters) or 'none'}"]
    actual = parameters[name]
    if isinstance(expected, Expected):
        return expected.find_differences(actual, where)
    if isinstance(expected, re.Pattern):
        return [] if expected.search(actual) else [f"{where} is {actual!r}, without {expected.pattern!r}"]
    if isinstance(expected, list):
        return _compare_list(expected, actual, where)
    if isinstance(expected, Message):
        return Expected(expected.key, **expected.parameters).find_differences(actual, where)
    if isinstance(actual, Message):
        return Expected(str(expected)).find_differences(actual, where)
    return [] if actual == str(expected) else [f"{where} is {actual!r}, not {str(expected)!r}"]


def _compare_list(expected: list[object], actual: object, where: str) -> list[str]:
    if not isinstance(actual, Message) or not actual.key.startswith("separator."):
        return [f"{where} is not a list of messages: {str(actual)!r}"]
    if len(actual.parameters) != len(expected):
        return [f"{where} has {len(actual.parameters)} items, not {len(expected)}: {str(actual)!r}"]
    lines = (_compare(each, actual.parameters, str(n), f"{where}, item {n}") for n, each in enumerate(expected))
    return [line for found in lines for line in found]


def assert_message(text: object, expected: str | Expected | list[object], /, **parameters: object) -> None:
    """Assert the key of a text or an error, and the parameters that are named; `Expected` says how each is compared."""
    actual = str(text) if isinstance(text, BaseException) else text
    if isinstance(expected, list):
        differences = _compare_list(expected, actual, "the message")
    else:
        whole = expected if isinstance(expected, Expected) else Expected(expected, **parameters)
        differences = whole.find_differences(actual)
    if differences:
        pytest.fail("\n".join(differences))


def describe_error(error: BaseException) -> Any:
    """Return an error's message as JSON for a test in another process, which reads it with `read_message`."""
    text = str(error)
    return text.describe() if isinstance(text, Message) else {"text": text, "key": "", "parameters": {}}


@contextlib.contextmanager
def raises_message(
    error_type: type[BaseException] | tuple[type[BaseException], ...],
    expected: str | Expected | list[object],
    /,
    **parameters: object,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Assert that the block raises an error of a type, whose message `assert_message` accepts."""
    with pytest.raises(error_type) as caught:
        yield caught
    assert_message(caught.value, expected, **parameters)


def refused_input(name: str, key: str, /, title: str | None = None, **parameters: object) -> Expected:
    """Return the message about an input of a node whose value is refused: `key` and `parameters` name the problem."""
    named = {} if title is None else {"title": title}
    return Expected("settings.input", name=compose_term("input", name), problem=Expected(key, **parameters), **named)
