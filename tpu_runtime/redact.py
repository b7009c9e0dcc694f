"""Keeps secrets out of what users and logs get to see: access tokens, passwords in addresses, signatures of links."""

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
        super().__init__(redact(sentence))


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
