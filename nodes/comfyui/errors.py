"""Errors in the form of ComfyUI's page.

Each is one sentence, at the input that it is about, under an exception name without a path.
"""

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import execution
from comfy.model_management import InterruptProcessingException

from ...tpu_runtime.messages import compose, compose_term, find_messages, transform
from ..declare import Json, with_display_names
from . import host

_PACKAGE = __name__.removesuffix(".nodes.comfyui.errors")
_REFUSED = "custom_validation_failed"
# One error of a node, as `execution.validate_prompt` returns it.
Error = dict[str, Json]
# Refusals of the checks of the prompt that is being validated.
_refusals: ContextVar[list[str]] = ContextVar("refusals")


def install_error_merging(node_ids: Collection[str]) -> None:
    """Make ComfyUI report each refusal of these nodes at queue time once.

    ComfyUI repeats the sentence of a node's check on every input that the check reads.
    """
    validate = execution.validate_prompt

    @functools.wraps(validate)
    async def validate_prompt(*args: object, **kwargs: object) -> Json:
        _refusals.set(refusals := [])
        answer = await validate(*args, **kwargs)
        for node in dict(answer[3]).values():  # an empty list if ComfyUI refused the prompt before checking nodes
            if node.get("class_type") in node_ids:
                node["errors"] = merge_errors(node["errors"], refusals)
        return answer

    execution.validate_prompt = validate_prompt


def keep_refusal(answer: bool | str) -> bool | str:
    """Return the answer of a node's check, and keep a refusal for `merge_errors`: ComfyUI takes its text alone."""
    if isinstance(answer, str):
        _refusals.get([]).append(answer)
    return answer


def install_error_messages() -> None:
    """Send key and parameters of an error's message to the page; ComfyUI sends its text alone."""
    handle = execution.PromptExecutor.handle_execution_error

    @functools.wraps(handle)
    def handle_execution_error(*args: object, **kwargs: object) -> None:
        errors = [str(value) for value in (*args, *kwargs.values()) if isinstance(value, Exception)]
        host.send_messages(errors, host.PromptServer.instance.client_id)
        handle(*args, **kwargs)

    execution.PromptExecutor.handle_execution_error = handle_execution_error


def merge_errors(errors: list[Error], refusals: Iterable[str] = ()) -> list[Error]:
    """Keep one of several errors with the same sentence: that of the input which the sentence names first.

    Names of inputs are replaced by those on the page.
    refusals: sentences of the errors, which may be messages.
    """
    messages = [transform(sentence, with_display_names) for sentence in refusals]
    chosen: dict[str, tuple[int, Error]] = {}
    for error in errors:
        name = str(error["extra_info"].get("input_name", ""))
        sentence = error["details"].removeprefix(f"{name} - ") if error["type"] == _REFUSED else repr(error)
        match = re.search(rf"\b{re.escape(name)}\b", sentence)
        position = match.start() if match else len(sentence)
        if sentence not in chosen or position < chosen[sentence][0]:
            chosen[sentence] = (position, error)
    return [_describe(error, messages) for _, error in chosen.values()]


def _describe(error: Error, messages: Iterable[str]) -> Error:
    details = with_display_names(error["details"])
    name = transform(compose_term("input", str(error["extra_info"].get("input_name", ""))), with_display_names)
    refusals = [compose("comfyui.refusal", name=name, sentence=sentence) for sentence in messages]
    found = find_messages([refusal for refusal in refusals if refusal == details])
    extra_info = {**error["extra_info"], **({"messages": found} if found else {})}
    return {**error, "details": details, "extra_info": extra_info}


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
            compose("comfyui.library_failed", error_type=type(error).__name__, error=str(error)[:200])
        ) from error
