"""Downloads from the Hugging Face Hub: the newest commit of a model, and of it only the requested files.

Every failure ends in a `HubError`, a sentence that says what to do and holds no token.
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

from ..files import FULL, CheckpointError, read_json
from ..progress import Progress
from ..redact import SafeError, guard_logs, redact
from ..units import GIB, MIB, readable
from . import weight_files

INDEX = "model_index.json"
_ELSEWHERE = "set HF_HOME to a folder on a larger disk"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class HubError(SafeError):
    """A download that cannot work, in a sentence with the command that fixes it."""


class _Cause(Exception):
    """What a library said, without secrets, in place of its own error, whose text and address may hold some."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(redact(f"{type(error).__name__}: {error}"))


def is_hub_id(model_id: str) -> bool:
    return re.fullmatch(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*/[\w.-]+", model_id) is not None


def cache_folder() -> Path:
    """Where the Hub's client keeps what it downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached(model_id: str) -> Path | None:
    """The folder of the newest commit on this machine, if its index is there; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_id, INDEX)
    return Path(found).parent if isinstance(found, str) else None


def downloaded() -> list[tuple[str, Mapping[str, Any]]]:
    """The ids of the models in diffusers layout in the Hub's cache, and the index of each."""
    found = []
    for folder in sorted(cache_folder().glob("models--*")):
        model_id = folder.name.removeprefix("models--").replace("--", "/")
        if is_hub_id(model_id) and (root := cached(model_id)) is not None:
            with contextlib.suppress(CheckpointError):
                found.append((model_id, read_json(root / INDEX)))
    return found


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A commit of a model, and the folder of its files: in the Hub's cache, or `is_own`, one that the user chose."""

    model_id: str
    commit: str
    root: Path
    is_own: bool = False

    def weights(self, names: Sequence[str], title: str) -> list[weight_files.WeightFile]:
        """What is known of weight files without reading them, for a download in short `title`."""
        with _sentences(self.model_id, title, self.place):
            return weight_files.find(self.model_id, self.commit, names, self._target, self._is_here)

    @property
    def place(self) -> Path:
        """The folder that takes the bytes."""
        return self.root if self.is_own else cache_folder()

    def _target(self, name: str, etag: str) -> Path:
        return self.root / name if self.is_own else self.root.parents[1] / "blobs" / etag

    def _is_here(self, name: str) -> bool:
        return (self.root / name).is_file()


def snapshot(model_id: str, progress: Progress, to: Path | None = None) -> Snapshot:
    """A model's newest commit, with its index in the local folder; without a network, the newest known one.

    With `to` its files go there, into a folder of their own, and not into the Hub's cache.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with _sentences(model_id, INDEX, to or cache_folder()):
        progress.text(f"Looking for {model_id}")
        if to is not None:
            commit = HfApi().model_info(model_id).sha or ""
            _claim(to, model_id)
            hf_hub_download(model_id, INDEX, revision=commit, local_dir=to)
            return Snapshot(model_id=model_id, commit=commit, root=to, is_own=True)
        if cached(model_id) is None:
            # Fails at once, where a request for a file would be repeated for half a minute.
            HfApi().model_info(model_id)
        root = Path(hf_hub_download(model_id, INDEX)).parent
        return Snapshot(model_id=model_id, commit=root.name, root=root)


def _claim(folder: Path, model_id: str) -> None:
    """Marks a folder as that of a model; HubError where something else is in it."""
    mark = folder / ".cache" / "comfyui-tpu.txt"
    if folder.exists() and not folder.is_dir():
        raise HubError(f"{folder} is a file. Choose a folder for {model_id}, such as {folder}-model.")
    if folder.is_dir() and any(folder.iterdir()) and not (mark.is_file() and mark.read_text().strip() == model_id):
        name = model_id.partition("/")[2]
        raise HubError(
            f"{folder} is not empty, and what is in it was not begun by a download of {model_id}. Choose a folder of "
            f"its own, such as {folder / name}."
        )
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(model_id + "\n")


def fetch(found: Snapshot, names: Sequence[str], progress: Progress, title: str) -> None:
    """Downloads files of a commit. Names may be patterns, such as `vae/*.json`.

    Raises `HubError` where a file that is named, not matched, is not there afterwards.
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
            # As in `snapshot`. With a part of the model here, what follows would also pass over what the Hub answers.
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
    """The bytes of weight files; `snapshot_download` then finds them, checks those in a user's folder, and links."""
    files = found.weights(names, title)
    check_room(files, found.place, f"{title} of {found.model_id}")
    weight_files.download(files, progress)


def single_files(
    model_id: str, targets: Mapping[str, Path], progress: Progress, place: Path
) -> list[weight_files.WeightFile]:
    """Files of a repository's newest commit by name, each with the place that it gets here, below `place`; raises
    `HubError` where the repository does not have one.
    """
    from huggingface_hub import HfApi

    with _sentences(model_id, "files", place):
        progress.text(f"Looking for {model_id}")
        commit = HfApi().model_info(model_id).sha or ""
        names = list(targets)
        found = weight_files.find(
            model_id, commit, names, lambda name, _: targets[name], lambda name: targets[name].is_file()
        )
    if missing := set(names) - {file.name for file in found}:
        raise HubError(f"{model_id} has no {', '.join(sorted(missing))} on the Hugging Face Hub any more.")
    return found


def fetch_single(files: Sequence[weight_files.WeightFile], progress: Progress, place: Path) -> None:
    """Completes files of `single_files`."""
    with _sentences(files[0].model_id, "files", place):
        weight_files.download(files, progress)


def check_room(files: Sequence[weight_files.WeightFile], place: Path, what: str) -> None:
    """HubError where what is missing of `files` does not fit into the folder."""
    needed = sum(file.size_bytes - file.here_bytes for file in files)
    free = free_bytes(place)
    if free is not None and needed > free:
        raise HubError(
            f"The disk is too full: {what} needs {readable(needed)} more, and {place} has {readable(free)} free. Make "
            f"room for {readable(needed - free)}, or {_ELSEWHERE}."
        )


def free_bytes(folder: Path) -> int | None:
    """Free disk where a folder is, or would be; None if nobody knows."""
    for existing in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return None


def _missing(root: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not (root / name).is_file()]


@contextlib.contextmanager
def _sentences(model_id: str, title: str, place: Path) -> Iterator[None]:
    """Turns what goes wrong in a download to `place`, in short `title`, into a `HubError`."""
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
        raise HubError(sentence) from _Cause(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _disk_sentence(error: BaseException, model_id: str, title: str, place: Path) -> str | None:
    """For a disk that takes no more, or no file of this user."""
    for link in _chain(error):
        number = _os_error_number(link)
        if number in FULL:
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
    """The `errno` of an error, also where hf_xet has it in its text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found.group(1)) if found else None


def _free(folder: Path) -> str:
    free = free_bytes(folder)
    return "" if free is None else f", which has {free / GIB:.1f} GiB left"


def _answer_sentence(error: BaseException, model_id: str, title: str) -> str | None:
    """For what the Hub answered; None if it did not."""
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


def _given_token(error: Any) -> str:
    """Why there may be no way in, where a token was sent: its account has not accepted, or waits to be let in."""
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
    """When the Hub says that it will answer again: seconds or a date, or seconds in its own header."""
    said = headers.get("Retry-After", "").strip()
    if seconds := re.fullmatch(r"\d{1,9}", said) or re.search(r"(?<=\bt=)\d{1,9}", headers.get("RateLimit", "")):
        return f"in {int(seconds.group())} seconds"
    with contextlib.suppress(ValueError):
        return f"after {email.utils.parsedate_to_datetime(said):%Y-%m-%d %H:%M:%S %Z}"
    return "in a few minutes"


def _lost_sentence(error: BaseException, model_id: str, title: str) -> str:
    """For a Hub that cannot be reached, or that is lost on the way."""
    if isinstance(error, weight_files.DamagedError):
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
    """In brackets, where it is known: what was set, or what the system said of the connection."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return " (HF_HUB_OFFLINE is set: unset it)"
    said = [str(link) for link in _chain(error) if isinstance(link, OSError) and link.errno is not None]
    return f" ({said[-1]})" if said else ""


def _bar(progress: Progress) -> type:
    """A tqdm class that shows the bytes of a download in the host and stops when the user cancels."""
    from tqdm import tqdm

    class HostBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

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
