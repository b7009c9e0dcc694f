"""Keeps out of what users and logs get to see: access tokens, passwords in addresses, signatures of links; and what
names from anyone's file would do there, such as further lines and escapes of a terminal.
"""

import logging
import os
import re

HIDDEN = "***"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "COMFYUI_TPU_TOKEN")
# What libraries log: the addresses that they ask (`httpx` at INFO), those of downloads that break off, and answers.
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


# What moves a cursor, turns the direction of a line, or is no character: escapes of a terminal begin with one of these.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile(r"[\t\n]")


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` with what does not print as Python's literals have it, `\\x1b`; of `one_line` line breaks too."""
    text = _UNPRINTABLE.sub(_escaped, text)
    return _LINES.sub(_escaped, text) if one_line else text


# ComfyUI's page shows a text as HTML, and makes links of addresses in it.
_TAGS = str.maketrans("<>", "\u2039\u203a")
_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)


def for_page(text: str) -> str:
    """`text` as ComfyUI's page may show it: `printable`, with no tags and no links in what names of files say."""
    return _ADDRESS.sub("\N{WORD JOINER}", printable(text).translate(_TAGS))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def hide_tokens(text: str) -> str:
    """`text` without the access tokens of this process's environment; everything else stays as it is."""
    for variable in VARIABLES:
        if len(token := os.environ.get(variable, "").strip()) > 4:
            text = text.replace(token, HIDDEN)
    return text


def redact(text: str) -> str:
    """`text` without access tokens: those of this process's environment, and whatever looks like one."""
    text = hide_tokens(text)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


class SafeError(ValueError):
    """An error in a sentence for the user, without secrets."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(redact(sentence)))


class Redacted(logging.Filter):
    """Takes secrets out of log records, their tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (clean := redact(message)) != message:
            record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


_FILTER = Redacted()


def guard_logs() -> None:
    """Lets no secret into the log lines of the libraries that download, which must be imported.

    A logger filters its own records alone, not those of its children.
    """
    for name in (*LIBRARIES, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in LIBRARIES:
            logging.getLogger(name).addFilter(_FILTER)


class _Printable(logging.Handler):
    """A handler of the pack's own logger, before all others: a record's values become one line each, without escapes.

    What libraries raise may hold names of anyone's file, so tracebacks are cleaned too, but for their lines.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            record.args = tuple(_cleaned(value) for value in record.args)
        record.msg = printable(str(record.msg))
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(redact(logging.Formatter().formatException(record.exc_info)))
        # A logger with a handler is no longer one of which Python writes warnings where the process has no log.
        if not logging.root.handlers and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


def _cleaned(value: object) -> object:
    return value if isinstance(value, int | float) else printable(str(value), one_line=True)


logging.getLogger(__name__.rsplit(".", 2)[0]).addHandler(_Printable())
