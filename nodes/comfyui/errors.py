"""What ComfyUI's page shows of an error: one sentence, at the widget that it is about, under a name without a path."""

import functools
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import execution
from comfy.model_management import InterruptProcessingException

from ..declare import in_words

_PACKAGE = __name__.removesuffix(".nodes.comfyui.errors")
_REFUSED = "custom_validation_failed"


def install(node_ids: Collection[str]) -> None:
    """From now on what these nodes refuse at queue time is said once.

    ComfyUI repeats the sentence of a node's check on every input that the check looks at.
    """
    validate = execution.validate_prompt

    @functools.wraps(validate)
    async def validate_prompt(*args: Any, **kwargs: Any) -> Any:
        answer = await validate(*args, **kwargs)
        for node in dict(answer[3]).values():  # a list, and empty, where ComfyUI refused it before it looked at nodes
            if node.get("class_type") in node_ids:
                node["errors"] = said_once(node["errors"])
        return answer

    execution.validate_prompt = validate_prompt


def said_once(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of errors with one sentence that of the input which the sentence names first, or the first one; in the page's
    words for inputs.
    """
    chosen: dict[str, tuple[int, dict[str, Any]]] = {}
    for error in errors:
        name = str(error["extra_info"].get("input_name", ""))
        sentence = error["details"].removeprefix(f"{name} - ") if error["type"] == _REFUSED else repr(error)
        at = re.search(rf"\b{re.escape(name)}\b", sentence)
        place = at.start() if at else len(sentence)
        if sentence not in chosen or place < chosen[sentence][0]:
            chosen[sentence] = (place, error)
    return [{**error, "details": in_words(error["details"])} for _, error in chosen.values()]


@contextmanager
def named() -> Iterator[None]:
    """ComfyUI shows an error's module before its class: of ours that would be the path of this folder.

    An exit that is no `Exception`, such as a panic of Rust's code in a library, becomes a RuntimeError: ComfyUI's
    thread of prompts would end with it, and no prompt would run any more.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(_PACKAGE):
            type(error).__module__ = "ComfyUI-TPU"
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit, InterruptProcessingException):
        raise
    except BaseException as error:
        raise RuntimeError(
            f"A library failed within the node ({type(error).__name__}: {str(error)[:200]}); it should raise an error "
            "that names the file. Try another file in the place of the one that this node reads."
        ) from error
