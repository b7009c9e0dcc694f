"""Reading a checkpoint's JSON files; what is wrong with a checkpoint as a sentence."""

import json
from pathlib import Path
from typing import Any

from .redact import redact


class CheckpointError(ValueError):
    """A model id that cannot be used, in a sentence for the user."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `CheckpointError` for anything else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a JSON {type(found).__name__}; it must be an object. Download it again.")
    return found
