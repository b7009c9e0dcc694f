"""Errors in the form of ComfyUI's page.

Each is one sentence, at the input that it is about, under an exception name without a path.
"""

import functools
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import execution
from comfy.model_management import InterruptProcessingException

from ..declare import Json, with_display_names

_PACKAGE = __name__.removesuffix(".nodes.comfyui.errors")
_REFUSED = "custom_validation_failed"
# One error of a node, as `execution.validate_prompt` returns it.
Error = dict[str, Json]


def install_error_merging(node_ids: Collection[str]) -> None:
    """Make ComfyUI report each refusal of these nodes at queue time once.

    ComfyUI repeats the sentence of a node's check on every input that the check reads.
    """
    validate = execution.validate_prompt

    @functools.wraps(validate)
    async def validate_prompt(*args: object, **kwargs: object) -> Json:
        answer = await validate(*args, **kwargs)
        for node in dict(answer[3]).values():  # an empty list if ComfyUI refused the prompt before checking nodes
            if node.get("class_type") in node_ids:
                node["errors"] = merge_errors(node["errors"])
        return answer

    execution.validate_prompt = validate_prompt


def merge_errors(errors: list[Error]) -> list[Error]:
    """Keep one of several errors with the same sentence: that of the input which the sentence names first.

    Names of inputs are replaced by those on the page.
    """
    chosen: dict[str, tuple[int, Error]] = {}
    for error in errors:
        name = str(error["extra_info"].get("input_name", ""))
        sentence = error["details"].removeprefix(f"{name} - ") if error["type"] == _REFUSED else repr(error)
        match = re.search(rf"\b{re.escape(name)}\b", sentence)
        position = match.start() if match else len(sentence)
        if sentence not in chosen or position < chosen[sentence][0]:
            chosen[sentence] = (position, error)
    return [{**error, "details": with_display_names(error["details"])} for _, error in chosen.values()]


@contextmanager
def shorten_error_names() -> Iterator[None]:
    """Give our exceptions a short module name; ComfyUI's page shows it, and it would contain this folder's path.

    A `BaseException` such as a panic of Rust code in a library becomes a RuntimeError: otherwise it would end ComfyUI's
    thread of prompts, and no prompt would run any more.
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
            "that names the file. Try another file instead of the one that this node reads."
        ) from error
