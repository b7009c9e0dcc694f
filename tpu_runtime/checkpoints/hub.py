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
from ..messages import compose
from ..model_spec import Json
from ..progress import Progress
from ..redact import SafeError, guard_logs, redact
from ..units import GIB, MIB, format_size
from . import downloads

INDEX = "model_index.json"
_ELSEWHERE = compose("hub.set_hf_home")
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
        progress.text(compose("hub.looking_for", model_id=model_id))
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
        raise HubError(compose("hub.folder_is_a_file", folder=folder, model_id=model_id))
    if folder.is_dir() and any(folder.iterdir()) and not (mark.is_file() and mark.read_text().strip() == model_id):
        name = model_id.partition("/")[2]
        raise HubError(compose("hub.folder_not_empty", folder=folder, model_id=model_id, suggestion=folder / name))
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
        progress.text(compose("hub.downloading", title=title, model_id=found.model_id))
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
        hint = compose("hub.no_safetensors") if missing[0].endswith(".safetensors") else ""
        raise HubError(compose("hub.files_not_there", model_id=found.model_id, missing=", ".join(missing), hint=hint))


def _fetch_weights(found: Snapshot, names: Sequence[str], progress: Progress, title: str) -> None:
    """Download the bytes of weight files.

    `snapshot_download` then finds them, checks those in a user's folder, and links.
    """
    files = found.weights(names, title)
    check_free_space(files, found.place, compose("hub.file_of_model", name=title, model_id=found.model_id))
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
        progress.text(compose("hub.looking_for", model_id=model_id))
        commit = HfApi().model_info(model_id).sha or ""
        names = list(targets)
        files = downloads.list_hub_files(
            model_id, commit, names, lambda name, _: targets[name], lambda name: targets[name].is_file()
        )
    if missing := set(names) - {file.name for file in files}:
        raise HubError(compose("hub.files_not_there_any_more", model_id=model_id, missing=", ".join(sorted(missing))))
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
        raise HubError(compose(
            "hub.disk_too_full", what=what, needed=format_size(needed), place=place, free=format_size(free),
            shortfall=format_size(needed - free), elsewhere=_ELSEWHERE,
        ))  # fmt: skip


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
            return compose(
                "hub.disk_full", title=title, model_id=model_id, place=place, free=_free(place), elsewhere=_ELSEWHERE,
            )  # fmt: skip
        path = getattr(link, "filename", None)
        if number in _DENIED or (number is not None and path is not None):
            return compose(
                "hub.folder_not_writable", path=path or place, strerror=os.strerror(number), title=title,
                model_id=model_id,
            )  # fmt: skip
    return None


def _os_error_number(error: BaseException) -> int | None:
    """Return the `errno` of an error; hf_xet has it only in its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match.group(1)) if match else None


def _free(folder: Path) -> str:
    free = free_bytes(folder)
    return "" if free is None else compose("hub.space_left", free=f"{free / GIB:.1f}")


def _answer_sentence(error: BaseException, model_id: str, title: str) -> str | None:
    """Return the message for an error response of the Hub, else None."""
    from huggingface_hub import errors

    for link in _chain(error):
        if isinstance(link, errors.GatedRepoError):
            return compose("hub.gated", model_id=model_id, given_token=_given_token(link))
        if isinstance(link, errors.RepositoryNotFoundError):
            return compose("hub.not_found", model_id=model_id)
        if isinstance(link, errors.EntryNotFoundError) and not isinstance(link, errors.LocalEntryNotFoundError):
            return compose("hub.not_diffusers_layout", model_id=model_id, title=title)
        if (response := getattr(link, "response", None)) is not None:
            return _status_sentence(response.status_code, response.headers, model_id, title)
    return None


def _given_token(error: BaseException) -> str:
    """Return the reason for a refusal of the sent token.

    Its account has not accepted the terms, or waits for access.
    """
    response = getattr(error, "response", None)
    is_refused = response is not None and response.status_code == 403
    return compose("hub.account_without_access") if is_refused else ""


def _status_sentence(status: int, headers: Mapping[str, str], model_id: str, title: str) -> str:
    if status == 429:
        return compose("hub.too_many_requests", title=title, model_id=model_id, retry_time=_retry_time(headers))
    if status in (401, 403):
        return compose("hub.refused", title=title, model_id=model_id, status=status)
    when = compose("hub.hub_failed_try_later") if status >= 500 else compose("hub.try_again")
    return compose("hub.answered", status=status, title=title, model_id=model_id, when=when)


def _retry_time(headers: Mapping[str, str]) -> str:
    """Return when the Hub will answer again: from seconds or a date, or seconds in its own header."""
    retry_after = headers.get("Retry-After", "").strip()
    if seconds := re.fullmatch(r"\d{1,9}", retry_after) or re.search(r"(?<=\bt=)\d{1,9}", headers.get("RateLimit", "")):
        return compose("hub.in_seconds", seconds=int(seconds.group()))
    with contextlib.suppress(ValueError):
        return compose("hub.after_time", time=f"{email.utils.parsedate_to_datetime(retry_after):%Y-%m-%d %H:%M:%S %Z}")
    return compose("hub.in_a_few_minutes")


def _lost_sentence(error: BaseException, model_id: str, title: str) -> str:
    """Return the message for a Hub that cannot be reached, or a connection that broke."""
    if isinstance(error, downloads.DamagedError):
        return compose("hub.download_damaged", title=title, model_id=model_id, error=error)
    if isinstance(error, RuntimeError):
        return compose("hub.download_broke_off", title=title, model_id=model_id)
    what = model_id if title == INDEX else compose("hub.file_of_model", name=title, model_id=model_id)
    return compose("hub.unreachable", what=what, why_lost=_why_lost(error), model_id=model_id)


def _why_lost(error: BaseException) -> str:
    """Return the known reason in parentheses: an environment variable, or the system's error; else ""."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return compose("hub.offline_is_set")
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
