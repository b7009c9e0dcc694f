"""Messages for users: an English text that carries its key and parameters, by which the page translates it.

`web/messages/en.json` has the English templates by key; the files next to it have the translations.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "web" / "messages" / "en.json"
# Limits of a message of another machine: nested messages, and characters of its JSON.
MAX_DEPTH, MAX_LENGTH = 8, 100_000
_HOLE = re.compile(r"\{(\w+)\}")


class Message(str):
    """An English text with the key of its template and the template's parameters: texts, or messages again."""

    key: str
    parameters: Mapping[str, str]

    def __new__(cls, text: str, key: str = "", parameters: Mapping[str, str] | None = None) -> "Message":
        self = super().__new__(cls, text)
        self.key, self.parameters = key, parameters or {}
        return self

    def __str__(self) -> str:
        """Return the message itself, so that the text of an exception is still one."""
        return self

    def describe(self) -> dict[str, Any]:
        """Return the message as JSON: its text, key and parameters."""
        return {"text": self[:], "key": self.key, "parameters": {name: _json(p) for name, p in self.parameters.items()}}


def _json(value: str) -> Any:
    return value.describe() if isinstance(value, Message) else value


def compose(key: str, /, **parameters: object) -> Message:
    """Return the message of a key of the table.

    parameters: the values of the template's holes. A message, or an exception with one, stays a message.
    """
    values = {name: str(value) for name, value in parameters.items()}
    return Message(_HOLE.sub(lambda hole: values[hole[1]], _templates()[key]), key, values)


def compose_list(items: Iterable[object], separator: str = "comma") -> Message:
    """Return `items` with a separator of the table between them: "comma", "semicolon", "space" or "line"."""
    values, key = [str(item) for item in items], f"separator.{separator}"
    return Message(_templates()[key].join(values), key, {str(index): value for index, value in enumerate(values)})


def compose_term(kind: str, name: str) -> str:
    """Return the message `KIND.NAME`, such as `input.height`; without one in the table, the words of `name`."""
    if (key := f"{kind}.{name}") in _templates():
        return compose(key)
    return name.replace("_", " ") if kind == "component" else name


@functools.cache
def _templates() -> dict[str, str]:
    return json.loads(TABLE.read_text("utf-8"))


def transform(text: str, change: Callable[[str], str]) -> str:
    """Return `change` of a text; of a message also of its parameters."""
    if not isinstance(text, Message):
        return change(text)
    parameters = {name: transform(value, change) for name, value in text.parameters.items()}
    return Message(change(text), text.key, parameters)


def find_messages(value: object) -> dict[str, Any]:
    """Return the messages in `value`, a tree of lists and dicts, by their text."""
    if isinstance(value, Message):
        return {value[:]: value.describe()}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {text: found for item in items for text, found in find_messages(item).items()}


def restore(text: str, described: Any) -> str:
    """Return the message of `text` in `described`, from `find_messages` of another process, or `text` itself."""
    try:
        found = read_message(described[text])
    except (KeyError, TypeError, ValueError):
        return text
    return found if found == text else text


def read_message(value: Any, depth: int = MAX_DEPTH) -> Message:
    """Return the message that another machine described. Raises ValueError for one that is damaged or too large."""
    match value:
        case {"text": str(text), "key": str(key), "parameters": dict(parameters)} if depth:
            values = {
                str(name): item if isinstance(item, str) else read_message(item, depth - 1)
                for name, item in parameters.items()
            }
            if sum(map(len, (text, key, *values, *values.values()))) <= MAX_LENGTH:
                return Message(text, key, values)
    raise ValueError(
        f"a message is {value!r:.80}; it must have text, key and parameters, {MAX_LENGTH} characters at most"
    )
