"""Messages for files that hold only part of a network, recognised by their names and tensors."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ..files import CheckpointError
from ..messages import compose

# File names of shards by Hugging Face's libraries and llama.cpp's gguf-split.
_SHARD = re.compile(r"(?P<base>.+?)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.(?P<kind>\w+)")
# Fields of gguf-split: the number of shards, and the index of this one.
SPLIT = _COUNT, _NUMBER = "split.count", "split.no"
# llama.cpp's names in the file of a vision tower.
_SIGHT = ("v.blk.", "mm.", "v.patch_embd")


def check_not_sharded(path: Path, metadata: Mapping[str, str]) -> None:
    """Raise `CheckpointError` for a shard of a checkpoint; `metadata` is the file's."""
    match = _SHARD.fullmatch(path.name)
    number, total = (int(match["number"]), int(match["total"])) if match else (1, 1)
    if (count := metadata.get(_COUNT, "")).isdecimal() and int(count) > 1:
        number, total = int(metadata.get(_NUMBER, "0")) + 1, int(count)
    if total < 2:
        return
    if path.suffix == ".gguf":
        way = compose("file.join_gguf_parts")
    else:
        way = compose("file.choose_whole_folder_or_file")
    raise CheckpointError(compose("file.part_of_checkpoint", path=path, number=number, total=total, way=way))


def check_not_partial(path: Path, names: Collection[str]) -> None:
    """Raise `CheckpointError` for a file with an incomplete network that its tensors' `names` identify."""
    if any(name.startswith(_SIGHT) for name in names):
        raise CheckpointError(compose("file.vision_tower_only", path=path))
    has_decoder = any(name.startswith("decoder.conv_in.") for name in names)
    if has_decoder and not any(name.startswith("encoder.") for name in names):
        raise CheckpointError(compose("file.vae_decoder_only", path=path))
