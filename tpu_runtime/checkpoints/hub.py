"""What is taken from the Hugging Face Hub: the newest commit of a model, and of it only the files that are asked for.

Everything that can go wrong ends in a `HubError`, a sentence that says what to do and holds no token.
"""

import contextlib
import email.utils
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..progress import Progress
from ..redact import guard_logs, redact
from ..units import GIB, MIB

INDEX = "model_index.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class HubError(ValueError):
    """A download that cannot work, in a sentence with the command that mends it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


class _Cause(Exception):
    """What a library said, without secrets: in place of its own error, whose text and address may hold some."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(redact(f"{type(error).__name__}: {error}"))


def is_hub_id(model_id: str) -> bool:
    return re.fullmatch(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*/[\w.-]+", model_id) is not None


def cached(model_id: str) -> Path | None:
    """The folder of the newest commit on this machine, if its index is there; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_id, INDEX)
    return Path(found).parent if isinstance(found, str) else None


def snapshot(model_id: str, parts: Sequence[str], progress: Progress) -> Path:
    """The local folder of a model's newest commit, with its index in it; without a network, of the newest known one.

    `parts` are the folders that will be wanted, for the command that an error names.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with _sentences(model_id, INDEX, [INDEX, *(f"{part}/*" for part in parts)]):
        progress.text(f"Looking for {model_id}")
        if cached(model_id) is None:
            # Says at once what is wrong, where asking for a file would be tried again for half a minute.
            HfApi().model_info(model_id)
        return Path(hf_hub_download(model_id, INDEX)).parent


def fetch(
    model_id: str, root: Path, names: Sequence[str], progress: Progress, title: str, parts: Sequence[str] = ()
) -> None:
    """Makes files of the commit whose folder is `root` local. Names may be patterns, such as `vae/*.json`.

    Raises `HubError` where a file that is named, not matched, is not there afterwards; its command names whole `parts`,
    if given.
    """
    from huggingface_hub import HfApi, snapshot_download

    exact = [name for name in names if "*" not in name]
    missing = _missing(root, exact)
    if not missing and len(exact) == len(names):
        return
    with _sentences(model_id, title, [f"{part}/*" for part in parts] or names):
        progress.check_cancelled()
        if missing:
            # As in `snapshot`. With a part of the model here, what follows would also pass over what the Hub answers.
            HfApi().model_info(model_id, revision=root.name)
        snapshot_download(
            model_id,
            revision=root.name,
            allow_patterns=list(names),
            tqdm_class=_bar(progress, f"Downloading {title} of {model_id}"),
        )
    if missing := _missing(root, exact):
        hint = " Weights are read from safetensors files alone." if missing[0].endswith(".safetensors") else ""
        raise HubError(
            f"{model_id} has no {', '.join(missing)} on the Hugging Face Hub.{hint} Choose another repository, or set "
            "model_id to a local folder."
        )


def _missing(root: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not (root / name).is_file()]


@contextlib.contextmanager
def _sentences(model_id: str, title: str, names: Sequence[str]) -> Iterator[None]:
    """Turns what goes wrong in a download of `names`, in short `title`, into a `HubError`."""
    from huggingface_hub import errors

    guard_logs()
    # Errors of connections come as they are raised, by `requests` (an OSError) or `httpx` (this HTTPError); those of
    # hf_xet, which is not written in Python, as RuntimeError.
    known = (OSError, RuntimeError, errors.HTTPError)  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except known as error:
        sentence = (
            _disk_sentence(error, model_id, title)
            or _answer_sentence(error, model_id, title)
            or _lost_sentence(error, model_id, title, names)
        )
        raise HubError(sentence) from _Cause(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _disk_sentence(error: BaseException, model_id: str, title: str) -> str | None:
    """For a disk that takes no more, or no file of this user."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    for link in _chain(error):
        number = _os_error_number(link)
        if number in _FULL:
            return (
                f"The disk is full: {title} of {model_id} does not fit into {cache}{_free(cache)}. Make room there, or "
                "set HF_HOME to a folder on a larger disk."
            )
        path = getattr(link, "filename", None)
        if number in _DENIED or (number is not None and path is not None):
            return (
                f"{path or cache} cannot be written ({os.strerror(number)}): {title} of {model_id} was not downloaded. "
                "Give this user the right to write there, or set HF_HOME to a folder of their own."
            )
    return None


def _os_error_number(error: BaseException) -> int | None:
    """The `errno` of an error, also where hf_xet has it in its text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found.group(1)) if found else None


def _free(folder: Path) -> str:
    try:
        return f", which has {shutil.disk_usage(folder).free / GIB:.1f} GiB left"
    except OSError:
        return ""


def _answer_sentence(error: BaseException, model_id: str, title: str) -> str | None:
    """For what the Hub answered; None if it did not."""
    from huggingface_hub import errors

    for link in _chain(error):
        if isinstance(link, errors.GatedRepoError):
            return (
                f"{model_id} is gated on the Hugging Face Hub. Accept its terms at https://huggingface.co/{model_id}, "
                "then run: hf auth login (or set HF_TOKEN)."
            )
        if isinstance(link, errors.RepositoryNotFoundError):
            return (
                f"{model_id} was not found on the Hugging Face Hub, or it is private. Check the spelling; for a "
                "private model run: hf auth login (or set HF_TOKEN)."
            )
        if isinstance(link, errors.EntryNotFoundError) and not isinstance(link, errors.LocalEntryNotFoundError):
            return (
                f"{model_id} has no {title} on the Hugging Face Hub; it is not a model in diffusers layout. Choose one "
                "that is: the names of many end in -Diffusers."
            )
        if (response := getattr(link, "response", None)) is not None:
            return _status_sentence(response.status_code, response.headers, model_id, title)
    return None


def _status_sentence(status: int, headers: Mapping[str, str], model_id: str, title: str) -> str:
    if status == 429:
        return (
            f"The Hugging Face Hub takes no more requests for now (429): {title} of {model_id} was not downloaded. Try "
            f"again {_retry_time(headers)}; with a token more are allowed (hf auth login, or set HF_TOKEN)."
        )
    if status in (401, 403):
        return (
            f"The Hugging Face Hub refuses {title} of {model_id} ({status}). Check that the token is valid and may "
            "read it: hf auth login (or set HF_TOKEN)."
        )
    when = "The trouble is the Hub's: try again later" if status >= 500 else "Try again"
    return (
        f"The Hugging Face Hub answered {status} for {title} of {model_id}. {when}, or set model_id to a local folder."
    )


def _retry_time(headers: Mapping[str, str]) -> str:
    """When the Hub says that it will answer again: seconds or a date, or seconds in its own header."""
    said = headers.get("Retry-After", "").strip()
    if seconds := re.fullmatch(r"\d{1,9}", said) or re.search(r"(?<=\bt=)\d{1,9}", headers.get("RateLimit", "")):
        return f"in {int(seconds.group())} seconds"
    with contextlib.suppress(ValueError):
        return f"after {email.utils.parsedate_to_datetime(said):%Y-%m-%d %H:%M:%S %Z}"
    return "in a few minutes"


def _lost_sentence(error: BaseException, model_id: str, title: str, names: Sequence[str]) -> str:
    """For a Hub that cannot be reached, or that is lost on the way."""
    if isinstance(error, RuntimeError):
        return (
            f"The download of {title} of {model_id} broke off. Run it again: files that are complete are kept. If it "
            "breaks off each time, set HF_HUB_DISABLE_XET=1."
        )
    include = " ".join(f'"{name}"' for name in names)
    what = model_id if title == INDEX else f"{title} of {model_id}"
    return (
        f"{what} is not on this machine and the Hugging Face Hub cannot be reached. With a network, run: hf download "
        f"{model_id} --include {include}; or set model_id to a local folder."
    )


def _bar(progress: Progress, title: str) -> type:
    """A tqdm class that shows the bytes of a download in the host and stops when the user cancels."""
    from tqdm import tqdm

    class HostBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})
            if self.unit == "B":
                progress.text(title)

        def update(self, n: float | None = 1) -> bool | None:
            progress.check_cancelled()
            shown = super().update(n)
            if self.unit == "B" and self.total:
                progress.step(int(self.n // MIB), max(1, int(self.total // MIB)), "MiB")
            return shown

    return HostBar


class _Nowhere:
    """The terminal that a bar writes to when the host shows it instead."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
