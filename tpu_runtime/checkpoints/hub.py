"""Downloads from the Hugging Face Hub: the newest commit of a model, and only the requested files of it.

Every failure raises a `HubError`, a sentence with a remedy and without tokens.
"""

import contextlib
import email.utils
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import DISK_FULL_ERRNOS, CheckpointError, read_json
from ..model_spec import Json
from ..progress import Progress
from ..redact import SafeError, guard_logs, redact
from ..units import GIB, MIB, format_size
from . import downloads

INDEX = "model_index.json"
_ELSEWHERE = "set HF_HOME to a folder on a larger disk"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class HubError(SafeError):
    """A download that cannot work, in a sentence with the command that fixes it."""


class _RedactedCause(Exception):
    """A library's error message without secrets; replaces the error itself, whose text and address may hold some."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(redact(f"{type(error).__name__}: {error}"))


def is_hub_id(model_id: str) -> bool:
    """Return whether an id has the form owner/name of the Hub."""
    return re.fullmatch(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*/[\w.-]+", model_id) is not None


def cache_folder() -> Path:
    """Return the folder of the Hub client's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_cached(model_id: str) -> Path | None:
    """Return the folder of the newest commit on this machine if its index is there, else None. Makes no request."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model_id, INDEX)
    return Path(path).parent if isinstance(path, str) else None


def list_cached_models() -> list[tuple[str, Json]]:
    """Return id and index of the models in diffusers layout in the Hub's cache."""
    models = []
    for folder in sorted(cache_folder().glob("models--*")):
        model_id = folder.name.removeprefix("models--").replace("--", "/")
        if is_hub_id(model_id) and (root := find_cached(model_id)) is not None:
            with contextlib.suppress(CheckpointError):
                models.append((model_id, read_json(root / INDEX)))
    return models


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A commit of a model, and the folder of its files."""

    model_id: str
    commit: str
    root: Path  # in the Hub's cache, or a folder of the user's
    is_own: bool = False  # whether it is a folder of the user's

    def weights(self, names: Sequence[str], title: str) -> list[downloads.WeightFile]:
        """Return sizes and local bytes of weight files without reading them. `title` names the download in messages."""
        with _sentences(self.model_id, title, self.place):
            return downloads.list_hub_files(self.model_id, self.commit, names, self._target, self._is_here)

    @property
    def place(self) -> Path:
        """Folder that receives the bytes."""
        return self.root if self.is_own else cache_folder()

    def _target(self, name: str, etag: str) -> Path:
        return self.root / name if self.is_own else self.root.parents[1] / "blobs" / etag

    def _is_here(self, name: str) -> bool:
        return (self.root / name).is_file()


def resolve_snapshot(model_id: str, progress: Progress, to: Path | None = None) -> Snapshot:
    """Return a model's newest commit after downloading its index; offline, the newest local one.

    model_id, progress: the repository, and where to report.
    to: a folder of its own for the files; None for the Hub's cache.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with _sentences(model_id, INDEX, to or cache_folder()):
        progress.text(f"Looking for {model_id}")
        if to is not None:
            commit = HfApi().model_info(model_id).sha or ""
            _claim(to, model_id)
            hf_hub_download(model_id, INDEX, revision=commit, local_dir=to)
            return Snapshot(model_id=model_id, commit=commit, root=to, is_own=True)
        if find_cached(model_id) is None:
            # Fails at once, while a request for a file would be repeated for half a minute.
            HfApi().model_info(model_id)
        root = Path(hf_hub_download(model_id, INDEX)).parent
        return Snapshot(model_id=model_id, commit=root.name, root=root)


def _claim(folder: Path, model_id: str) -> None:
    """Mark a folder as that of a model. Raises `HubError` if it has other files."""
    mark = folder / ".cache" / "comfyui-tpu.txt"
    if folder.exists() and not folder.is_dir():
        raise HubError(f"{folder} is a file. Choose a folder for {model_id}, such as {folder}-model.")
    if folder.is_dir() and any(folder.iterdir()) and not (mark.is_file() and mark.read_text().strip() == model_id):
        name = model_id.partition("/")[2]
        raise HubError(
            f"{folder} is not empty, and its files are not from a download of {model_id}. Choose a folder of "
            f"its own, such as {folder / name}."
        )
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(model_id + "\n")


def fetch(found: Snapshot, names: Sequence[str], progress: Progress, title: str) -> None:
    """Download files of a commit.

    progress: of the download, which it may cancel.
    found: the commit.
    names: files, or patterns such as `vae/*.json`.
    title: names the download in messages.
    Raises `HubError` if a file that is named, not matched, is missing afterwards.
    """
    from huggingface_hub import HfApi, snapshot_download

    exact = [name for name in names if "*" not in name]
    missing = _missing(found.root, exact)
    # In a folder of the user's own, files may be of another commit.
    if not missing and len(exact) == len(names) and not found.is_own:
        return
    with _sentences(found.model_id, title, found.place):
        progress.check_cancelled()
        if missing:
            # As in `snapshot`. With some files here, the calls below would also ignore errors of the Hub.
            HfApi().model_info(found.model_id, revision=found.commit)
        progress.text(f"Downloading {title} of {found.model_id}")
        if weights := [name for name in missing if name.endswith(".safetensors")]:
            _fetch_weights(found, weights, progress, title)
        snapshot_download(
            found.model_id,
            revision=found.commit,
            allow_patterns=list(names),
            local_dir=found.root if found.is_own else None,
            tqdm_class=_bar(progress),
        )
    if missing := _missing(found.root, exact):
        hint = " Weights are read from safetensors files alone." if missing[0].endswith(".safetensors") else ""
        raise HubError(
            f"{found.model_id} has no {', '.join(missing)} on the Hugging Face Hub.{hint} Choose another repository, "
            "or set model_id to a local folder."
        )


def _fetch_weights(found: Snapshot, names: Sequence[str], progress: Progress, title: str) -> None:
    """Download the bytes of weight files.

    `snapshot_download` then finds them, checks those in a user's folder, and links.
    """
    files = found.weights(names, title)
    check_free_space(files, found.place, f"{title} of {found.model_id}")
    downloads.download(files, progress)


def find_single_files(
    model_id: str, targets: Mapping[str, Path], progress: Progress, place: Path
) -> list[downloads.WeightFile]:
    """Return files of a repository's newest commit by name.

    model_id, progress: the repository, and where to report.
    targets: local path of each file, by its name in the repository.
    place: folder of the targets, for messages.
    Raises `HubError` if the repository lacks one.
    """
    from huggingface_hub import HfApi

    with _sentences(model_id, "files", place):
        progress.text(f"Looking for {model_id}")
        commit = HfApi().model_info(model_id).sha or ""
        names = list(targets)
        files = downloads.list_hub_files(
            model_id, commit, names, lambda name, _: targets[name], lambda name: targets[name].is_file()
        )
    if missing := set(names) - {file.name for file in files}:
        raise HubError(f"{model_id} has no {', '.join(sorted(missing))} on the Hugging Face Hub any more.")
    return files


def fetch_single_files(files: Sequence[downloads.WeightFile], progress: Progress, place: Path) -> None:
    """Complete files of `find_single_files`. `place` is their folder, for messages.

    progress: of the download, which it may cancel.
    """
    with _sentences(files[0].model_id, "files", place):
        downloads.download(files, progress)


def check_free_space(files: Sequence[downloads.WeightFile], place: Path, what: str) -> None:
    """Raise `HubError` if the missing bytes of `files` do not fit into the folder `place`; `what` names them."""
    needed = sum(file.size_bytes - file.local_bytes for file in files)
    free = free_bytes(place)
    if free is not None and needed > free:
        raise HubError(
            f"The disk is too full: {what} needs {format_size(needed)} more, and {place} has {format_size(free)} "
            f"free. Make room for {format_size(needed - free)}, or {_ELSEWHERE}."
        )


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the disk of a folder, which need not exist; None if unknown."""
    for existing in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return None


def _missing(root: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not (root / name).is_file()]


@contextlib.contextmanager
def _sentences(model_id: str, title: str, place: Path) -> Iterator[None]:
    """Raise errors of a download to `place` as `HubError`; `title` names the download."""
    from huggingface_hub import errors

    guard_logs()
    # Errors of connections come as they are raised, by `requests` (an OSError) or `httpx` (this HTTPError); those of
    # hf_xet, which is not written in Python, as RuntimeError.
    known = (OSError, RuntimeError, errors.HTTPError)  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except known as error:
        sentence = (
            _disk_sentence(error, model_id, title, place)
            or _answer_sentence(error, model_id, title)
            or _lost_sentence(error, model_id, title)
        )
        raise HubError(sentence) from _RedactedCause(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _disk_sentence(error: BaseException, model_id: str, title: str, place: Path) -> str | None:
    """Return the message for a disk that is full or not writable, else None."""
    for link in _chain(error):
        number = _os_error_number(link)
        if number in DISK_FULL_ERRNOS:
            return (
                f"The disk is full: {title} of {model_id} does not fit into {place}{_free(place)}. Make room there, or "
                f"{_ELSEWHERE}."
            )
        path = getattr(link, "filename", None)
        if number in _DENIED or (number is not None and path is not None):
            return (
                f"{path or place} cannot be written ({os.strerror(number)}): {title} of {model_id} was not downloaded. "
                "Give this user the right to write there, or set HF_HOME to a folder of their own."
            )
    return None


def _os_error_number(error: BaseException) -> int | None:
    """Return the `errno` of an error; hf_xet has it only in its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match.group(1)) if match else None


def _free(folder: Path) -> str:
    free = free_bytes(folder)
    return "" if free is None else f", which has {free / GIB:.1f} GiB left"


def _answer_sentence(error: BaseException, model_id: str, title: str) -> str | None:
    """Return the message for an error response of the Hub, else None."""
    from huggingface_hub import errors

    for link in _chain(error):
        if isinstance(link, errors.GatedRepoError):
            return (
                f"{model_id} is gated on the Hugging Face Hub{_given_token(link)}. Sign in and accept its terms at "
                f"https://huggingface.co/{model_id}, make a token that may read at "
                "https://huggingface.co/settings/tokens, then run: hf auth login (or set HF_TOKEN)."
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


def _given_token(error: BaseException) -> str:
    """Return the reason for a refusal of the sent token.

    Its account has not accepted the terms, or waits for access.
    """
    response = getattr(error, "response", None)
    is_refused = response is not None and response.status_code == 403
    return ", and the account of the token that was sent has no access to it" if is_refused else ""


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
    """Return when the Hub will answer again: from seconds or a date, or seconds in its own header."""
    retry_after = headers.get("Retry-After", "").strip()
    if seconds := re.fullmatch(r"\d{1,9}", retry_after) or re.search(r"(?<=\bt=)\d{1,9}", headers.get("RateLimit", "")):
        return f"in {int(seconds.group())} seconds"
    with contextlib.suppress(ValueError):
        return f"after {email.utils.parsedate_to_datetime(retry_after):%Y-%m-%d %H:%M:%S %Z}"
    return "in a few minutes"


def _lost_sentence(error: BaseException, model_id: str, title: str) -> str:
    """Return the message for a Hub that cannot be reached, or a connection that broke."""
    if isinstance(error, downloads.DamagedError):
        return f"{title} of {model_id} came damaged ({error}), and was thrown away. Run it again; the rest is kept."
    if isinstance(error, RuntimeError):
        return (
            f"The download of {title} of {model_id} broke off. Run it again: files that are complete are kept. If it "
            "breaks off each time, set HF_HUB_DISABLE_XET=1."
        )
    what = model_id if title == INDEX else f"{title} of {model_id}"
    return (
        f"{what} is not on this machine, or not all of it, and the Hugging Face Hub cannot be reached"
        f"{_why_lost(error)}. With a network `comfyui-tpu download {model_id}` goes on where it stopped; or set "
        "model_id to a local folder."
    )


def _why_lost(error: BaseException) -> str:
    """Return the known reason in parentheses: an environment variable, or the system's error; else ""."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return " (HF_HUB_OFFLINE is set: unset it)"
    messages = [str(link) for link in _chain(error) if isinstance(link, OSError) and link.errno is not None]
    return f" ({messages[-1]})" if messages else ""


def _bar(progress: Progress) -> type:
    """Return a tqdm class that reports the bytes of a download to `progress` and stops when the user cancels."""
    from tqdm import tqdm

    class HostBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _NullStream()})

        def update(self, n: float | None = 1) -> bool | None:
            progress.check_cancelled()
            shown = super().update(n)
            if self.unit == "B" and self.total:
                progress.step(int(self.n // MIB), max(1, int(self.total // MIB)), "MiB")
            return shown

    return HostBar


class _NullStream:
    """An output stream that discards a bar's text, because progress shows it instead."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
