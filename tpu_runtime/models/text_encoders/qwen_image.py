"""The text of Qwen-Image: a prompt in a description's place, by Qwen2.5-VL; of Edit with pictures that it is about."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...model_spec import TextEncoding
from . import qwen25

if TYPE_CHECKING:
    import numpy as np
    import torch

PROMPT = "A cat holding a sign that says hello world"
# The makers' own.
NEGATIVE_PROMPT = (
    "低分辨率，低画质，肢体畸形，手指畸形，画面过饱和，蜡像感，"
    "人脸无细节，过度光滑，画面具有AI感。构图混乱。文字模糊，扭曲"
)
# Tokens of a prompt, and of what is before it, which upstream cuts off the states.
MAX_TOKENS, PREFIX = 1024, 34
# `QwenImagePipeline.prompt_template_encode`.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int = MAX_TOKENS) -> "tuple[np.ndarray, np.ndarray]":
    """Ids `[rows, 34 + length]` of the template with each prompt; the mask `[rows, length]` of what follows 34."""
    return _tokenized(tokenizer, [TEMPLATE.format(prompt) for prompt in prompts], PREFIX, length)


# --- with pictures ----------------------------------------------------------------------------------------------------

EDIT_PROMPT = "Make it night, with a full moon over the water"
EDIT_PREFIX = 64
# `QwenImageEditPlusPipeline.prompt_template_encode`, and what it writes for a picture.
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
SEEN = "<|image_pad|>"
PICTURE = "Picture {}: <|vision_start|>{}<|vision_end|>"


def tokenize_edit(tokenizer: Any, prompts: Sequence[str], length: int = MAX_TOKENS) -> "tuple[np.ndarray, np.ndarray]":
    """Ids `[rows, 64 + length]` of the template with each prompt; the mask `[rows, length]` of what follows 64."""
    return _tokenized(tokenizer, [EDIT_TEMPLATE.format(prompt) for prompt in prompts], EDIT_PREFIX, length)


def tokenize_beside(tokenizer: Any, prompts: Sequence[str], seen: "Sequence[torch.Tensor]") -> "tuple[np.ndarray, ...]":
    """Ids and mask as `tokenize_edit` gives them, of prompts behind pictures, and what `qwen25.encode_text` takes more:
    `seen` are the pictures' tokens, `[1, rows, columns, dim]` each. `ValueError` where all that is too long.
    """
    grids, texts = [each.shape[1:3] for each in seen], []
    longest = sum(rows * columns for rows, columns in grids)
    if longest <= MAX_TOKENS:
        pictures = "".join(PICTURE.format(n + 1, SEEN * rows * columns) for n, (rows, columns) in enumerate(grids))
        texts = [EDIT_TEMPLATE.format(pictures + prompt) for prompt in prompts]
        longest = max(len(tokenizer(text)["input_ids"]) for text in texts) - EDIT_PREFIX
    if longest > MAX_TOKENS:
        number = f"{len(grids)} pictures" if len(grids) > 1 else "a picture"
        raise ValueError(
            f"Qwen-Image Edit: the prompt and {number} have {longest} tokens or more, and the text encoder takes "
            f"{MAX_TOKENS}. Shorten the prompt, or take fewer pictures."
        )
    ids, mask = _tokenized(tokenizer, texts, EDIT_PREFIX, MAX_TOKENS)
    return ids, mask, *place_beside(ids == tokenizer.convert_tokens_to_ids(SEEN), seen)


def place_beside(is_seen: "np.ndarray", seen: "Sequence[torch.Tensor]") -> "tuple[np.ndarray, ...]":
    """Positions `[3, rows, length]`, places `[rows, length]` in the pictures' tokens, and these, `[1, number, dim]`."""
    import numpy as np

    grids = [each.shape[1:3] for each in seen]
    places = np.where(is_seen, np.cumsum(is_seen, axis=1) - 1, -1).astype(np.int32)
    positions = np.stack([positions_of(row, grids) for row in is_seen], axis=1)
    tokens = np.concatenate([each.flatten(1, 2).numpy() for each in seen], axis=1)
    return positions, places, tokens


def positions_of(is_seen: "np.ndarray", grids: "Sequence[Sequence[int]]") -> "np.ndarray":
    """`Qwen2_5_VLModel.get_rope_index`: `[3, tokens]`, time, row and column. A word is one further on than what is
    before it on all three; a picture is at one time, and as long as its longer side.
    """
    import numpy as np

    found, at, start, rest = [], 0, 0, list(grids)
    while at < len(is_seen):
        if is_seen[at]:
            rows, columns = rest.pop(0)
            cells = np.indices((1, rows, columns)).reshape(3, -1)
            found.append(start + cells)
            start, at = start + max(rows, columns), at + rows * columns
        else:
            length = int(np.argmax(is_seen[at:])) or len(is_seen) - at
            found.append(np.tile(start + np.arange(length), (3, 1)))
            start, at = start + length, at + length
    return np.concatenate(found, axis=1).astype(np.int32)


def _tokenized(tokenizer: Any, texts: Sequence[str], prefix: int, length: int) -> "tuple[np.ndarray, np.ndarray]":
    import numpy as np

    found = tokenizer(texts, max_length=prefix + length, padding="max_length", padding_side="right", truncation=True)
    ids, mask = (np.array(found[name], np.int32) for name in ("input_ids", "attention_mask"))
    return ids, mask[:, prefix:]


TEXT_ENCODER = qwen25.encoder()
TEXT = TextEncoding(
    tokenizer_class="Qwen2Tokenizer",
    max_length=MAX_TOKENS,
    prefix=PREFIX,
    width_key="joint_attention_dim",
    tokenize=tokenize,
    encode=qwen25.encode_text,
    write_tokenizer=qwen25.tokenizer_writer(TEMPLATE, PROMPT),
)
EDIT_TEXT = replace(
    TEXT,
    prefix=EDIT_PREFIX,
    tokenize=tokenize_edit,
    tokenize_beside=tokenize_beside,
    place_beside=place_beside,
    write_tokenizer=qwen25.tokenizer_writer(
        EDIT_TEMPLATE, EDIT_PROMPT, special=("<|vision_start|>", "<|vision_end|>", SEEN)
    ),
)
