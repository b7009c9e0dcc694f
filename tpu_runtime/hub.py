"""Downloads from the Hugging Face Hub: one part of a model at a time, with a bar, errors as sentences."""

import re
from pathlib import Path
from typing import Any

from .progress import Progress
from .redact import guard_logs, redact
from .sizes import MIB


class HubError(ValueError):
    """A download that cannot work, in a sentence with the command that mends it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


class _Cause(Exception):
    """What a library said, without secrets: in place of its own error, whose text and address may hold some."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(redact(f"{type(error).__name__}: {error}"))


def is_hub_id(model_id: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model_id) is not None


def download(model_id: str, part: str, progress: Progress) -> Path:
    """Makes the files of one folder of a Hub model local, and returns the model's local root.

    Raises `HubError` for a gated or missing repository and where there is no network.
    """
    import huggingface_hub
    from huggingface_hub import errors

    guard_logs()
    patterns = [f"{part}/*", "model_index.json"]
    try:
        progress.text(f"Looking for {part} of {model_id}")
        return Path(
            huggingface_hub.snapshot_download(
                model_id, allow_patterns=patterns, tqdm_class=_bar(progress, f"Downloading {part} of {model_id}")
            )
        )
    except errors.GatedRepoError as error:
        raise HubError(
            f"{model_id} is gated on the Hugging Face Hub. Accept its terms at https://huggingface.co/{model_id}, then "
            "run: hf auth login (or set HF_TOKEN)."
        ) from _Cause(error)
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{model_id} was not found on the Hugging Face Hub, or it is private. Check the spelling; for a private "
            "model run: hf auth login (or set HF_TOKEN)."
        ) from _Cause(error)
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise HubError(
            f"{part} of {model_id} is not on this machine and the Hugging Face Hub cannot be reached. With a network, "
            f'run: hf download {model_id} --include "{part}/*" "model_index.json"; or set model_id to a local folder.'
        ) from _Cause(error)


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
