"""Removal of secrets from messages and logs: access tokens, passwords in addresses, and signatures of links.

Also removes unprintable characters of untrusted names, such as line breaks and escapes of a terminal.
"""

import logging
import os
import re

from .messages import transform

HIDDEN = "***"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "COMFYUI_TPU_TOKEN")
# Libraries that log addresses of requests (`httpx` at INFO) and of failed downloads, and responses.
LIBRARIES = ("httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "urllib3")
_PATTERNS = (
    re.compile(r"()\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
    re.compile(r"(://)[^/\s@]+(?=@)"),
    re.compile(r"(\bbearer\s+)[^\s\"']+", re.IGNORECASE),
    re.compile(
        r"([?&](?:(?:access_|hf_)?token|api_key|sig|signature|policy|key-pair-id|x-amz-[a-z-]+)=)[^&\s\"']+",
        re.IGNORECASE,
    ),
)


# Control characters, direction marks and surrogates; escapes of a terminal begin with one of these.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile(r"[\t\n]")


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Return `text` with unprintable characters escaped as in Python's literals, `\\x1b`.

    With `one_line`, line breaks are escaped too.
    """
    text = _UNPRINTABLE.sub(_escape, text)
    return _LINES.sub(_escape, text) if one_line else text


# ComfyUI's page shows text as HTML, and turns addresses in it into links.
_TAGS = str.maketrans("<>", "\u2039\u203a")
_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)


def escape_for_page(text: str) -> str:
    """Return `text` for ComfyUI's page: `printable`, and without tags and links from names of files."""
    return _ADDRESS.sub("\N{WORD JOINER}", printable(text).translate(_TAGS))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def hide_tokens(text: str) -> str:
    """Return `text` without the access tokens of this process's environment."""
    for variable in TOKEN_VARIABLES:
        if len(token := os.environ.get(variable, "").strip()) > 4:
            text = text.replace(token, HIDDEN)
    return text


def redact(text: str) -> str:
    """Return `text` without access tokens: those of this process's environment, and anything that looks like one."""
    text = hide_tokens(text)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


class SafeError(ValueError):
    """An error in a sentence for the user, without secrets."""

    def __init__(self, sentence: str) -> None:
        super().__init__(transform(sentence, lambda text: printable(redact(text))))


class RedactingFilter(logging.Filter):
    """A filter that removes secrets from log records, including their tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (clean := redact(message)) != message:
            record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


_FILTER = RedactingFilter()


def guard_logs() -> None:
    """Filter secrets out of the log records of the libraries that download, which must be imported before.

    A logger filters its own records alone, not those of its children.
    """
    for name in (*LIBRARIES, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in LIBRARIES:
            logging.getLogger(name).addFilter(_FILTER)


class _Printable(logging.Handler):
    """A handler of the pack's own logger, before all others: each value of a record becomes one line without escapes.

    Errors of libraries may hold untrusted names, so tracebacks are cleaned too, except for their line breaks.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            record.args = tuple(_clean(value) for value in record.args)
        record.msg = printable(str(record.msg))
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(redact(logging.Formatter().formatException(record.exc_info)))
        # Python's last-resort handler does not write the warnings of a logger with a handler.
        if not logging.root.handlers and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


def _clean(value: object) -> object:
    return value if isinstance(value, int | float) else printable(str(value), one_line=True)


logging.getLogger(__name__.rsplit(".", 2)[0]).addHandler(_Printable())
