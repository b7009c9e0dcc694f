"""Files that are no network of their own, by their names and tensors: a sentence says what they are and what to do."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ..files import CheckpointError

# How Hugging Face's libraries and llama.cpp's gguf-split name the parts of a checkpoint.
_SHARD = re.compile(r"(?P<base>.+?)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.(?P<kind>\w+)")
# Where gguf-split writes how many parts there are, and which of them this is, from 0 on.
SPLIT = _COUNT, _NUMBER = "split.count", "split.no"
# llama.cpp's own names in a file that a language model sees with.
_SIGHT = ("v.blk.", "mm.", "v.patch_embd")


def check_whole(path: Path, metadata: Mapping[str, str]) -> None:
    """Raises `CheckpointError` for one part of a checkpoint of several files; `metadata` is what the file says."""
    found = _SHARD.fullmatch(path.name)
    number, total = (int(found["number"]), int(found["total"])) if found else (1, 1)
    if (said := metadata.get(_COUNT, "")).isdecimal() and int(said) > 1:
        number, total = int(metadata.get(_NUMBER, "0")) + 1, int(said)
    if total < 2:
        return
    if path.suffix == ".gguf":
        way = "Join them with llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and choose the whole file."
    else:
        way = (
            "Choose the folder in diffusers layout that has all parts and their index, or a file that holds the whole "
            "network."
        )
    raise CheckpointError(
        f"{path} is part {number} of {total} of a checkpoint; a file must hold a whole network. {way}"
    )


def check_known(path: Path, names: Collection[str]) -> None:
    """Raises `CheckpointError` for a file that holds no whole network, where its tensors' `names` say what it is."""
    if any(name.startswith(_SIGHT) for name in names):
        raise CheckpointError(
            f"{path} is what a language model sees with, as llama.cpp has it (mmproj), and pictures are read by a text "
            "encoder that holds `visual.` too. Choose one such as qwen_2.5_vl_7b.safetensors in its place."
        )
    has_decoder = any(name.startswith("decoder.conv_in.") for name in names)
    if has_decoder and not any(name.startswith("encoder.") for name in names):
        raise CheckpointError(
            f"{path} holds the decoder of a VAE alone, and a VAE is an encoder and a decoder. Choose a file that has "
            "both, such as full_encoder_small_decoder.safetensors for FLUX.2's small decoder."
        )
