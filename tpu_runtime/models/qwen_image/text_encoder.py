"""The text encoding of Qwen-Image: the states of Qwen2.5-VL 7B for a prompt in a template. Edit adds the input images.

The network is in `common/qwen25.py`. The states are those after its last layer and norm, `[rows, 1024, 3584]`, without
the template's first tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...messages import compose
from ...model_spec import TextEncoding
from ..common import qwen25

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

PROMPT = "A cat holding a sign that says hello world"
# The negative prompt of the published example for Qwen-Image-2512, without its full stop.
NEGATIVE_PROMPT = (
    "低分辨率，低画质，肢体畸形，手指畸形，画面过饱和，蜡像感，"
    "人脸无细节，过度光滑，画面具有AI感。构图混乱。文字模糊，扭曲"
)
# Tokens of a prompt, and of the template's prefix, whose states upstream removes: `tokenizer_max_length` and
# `prompt_template_encode_start_idx` of diffusers' `QwenImagePipeline`.
MAX_TOKENS, PREFIX = 1024, 34
# `QwenImagePipeline.prompt_template_encode`.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_TOKENS
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids `[rows, 34 + length]` of the filled template, and the mask `[rows, length]` after its prefix.

    tokenizer: Qwen2's. prompts: one per row. length: tokens that a prompt is padded or truncated to.
    """
    return _tokenize(tokenizer, [TEMPLATE.format(prompt) for prompt in prompts], PREFIX, length)


# --- with images ------------------------------------------------------------------------------------------------------

EDIT_PROMPT = "Make it night, with a full moon over the water"
EDIT_PREFIX = 64
# `QwenImageEditPlusPipeline.prompt_template_encode`, and its text for an image.
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
IMAGE_PAD = "<|image_pad|>"
IMAGE_TEMPLATE = "Picture {}: <|vision_start|>{}<|vision_end|>"


def tokenize_edit(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_TOKENS
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids `[rows, 64 + length]` of the filled template, and the mask `[rows, length]` after its prefix.

    tokenizer: Qwen2's. prompts: one per row. length: tokens that a prompt is padded or truncated to.
    """
    return _tokenize(tokenizer, [EDIT_TEMPLATE.format(prompt) for prompt in prompts], EDIT_PREFIX, length)


def tokenize_with_images(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], image_tokens: "Sequence[torch.Tensor]"
) -> "tuple[np.ndarray, ...]":
    """Return ids and mask as `tokenize_edit` does, and the arguments of `qwen25.encode_text` for images.

    tokenizer: Qwen2's. prompts: one per row. image_tokens: the images' tokens `[1, rows, columns, dim]` each, which
    precede every prompt. Raises ValueError if prompt and images have more than `MAX_TOKENS` tokens.
    """
    grids, texts = [image.shape[1:3] for image in image_tokens], []
    longest = sum(rows * columns for rows, columns in grids)
    if longest <= MAX_TOKENS:
        image_texts = "".join(
            IMAGE_TEMPLATE.format(n + 1, IMAGE_PAD * rows * columns) for n, (rows, columns) in enumerate(grids)
        )
        texts = [EDIT_TEMPLATE.format(image_texts + prompt) for prompt in prompts]
        longest = max(len(tokenizer(text)["input_ids"]) for text in texts) - EDIT_PREFIX
    if longest > MAX_TOKENS:
        number = f"{len(grids)} images" if len(grids) > 1 else "an image"
        raise ValueError(
            compose("model.prompt_and_images_too_long", number=number, longest=longest, max_tokens=MAX_TOKENS)
        )
    ids, mask = _tokenize(tokenizer, texts, EDIT_PREFIX, MAX_TOKENS)
    return ids, mask, *place_image_tokens(ids == tokenizer.convert_tokens_to_ids(IMAGE_PAD), image_tokens)


def place_image_tokens(is_image: "np.ndarray", image_tokens: "Sequence[torch.Tensor]") -> "tuple[np.ndarray, ...]":
    """Return positions `[3, rows, length]`, indices of image tokens `[rows, length]`, and these tokens.

    is_image: `[rows, length]`, true for image tokens; indices elsewhere are -1. image_tokens: the images' tokens
    `[1, rows, columns, dim]` each, which are concatenated to `[1, number, dim]`.
    """
    import numpy as np

    grids = [image.shape[1:3] for image in image_tokens]
    indices = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
    positions = np.stack([rope_positions(row, grids) for row in is_image], axis=1)
    tokens = np.concatenate([image.flatten(1, 2).numpy() for image in image_tokens], axis=1)
    return positions, indices, tokens


def rope_positions(is_image: "np.ndarray", grids: "Sequence[Sequence[int]]") -> "np.ndarray":
    """Return `Qwen2_5_VLModel.get_rope_index`'s positions `[3, tokens]`: time, row and column.

    is_image: `[tokens]`, true for image tokens. grids: (rows, columns) of each image's tokens. A word is one further
    than its predecessor on all axes. An image has one time, and spans as many positions as its longer side.
    """
    import numpy as np

    positions, index, start, rest = [], 0, 0, list(grids)
    while index < len(is_image):
        if is_image[index]:
            rows, columns = rest.pop(0)
            cells = np.indices((1, rows, columns)).reshape(3, -1)
            positions.append(start + cells)
            start, index = start + max(rows, columns), index + rows * columns
        else:
            length = int(np.argmax(is_image[index:])) or len(is_image) - index
            positions.append(np.tile(start + np.arange(length), (3, 1)))
            start, index = start + length, index + length
    return np.concatenate(positions, axis=1).astype(np.int32)


def _tokenize(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], prefix: int, length: int
) -> "tuple[np.ndarray, np.ndarray]":
    import numpy as np

    encoding = tokenizer(
        list(texts), max_length=prefix + length, padding="max_length", padding_side="right", truncation=True
    )
    ids, mask = (np.array(encoding[name], np.int32) for name in ("input_ids", "attention_mask"))
    return ids, mask[:, prefix:]


TEXT_ENCODER = qwen25.make_encoder()
TEXT = TextEncoding(
    tokenizer_class="Qwen2Tokenizer",
    max_length=MAX_TOKENS,
    prefix=PREFIX,
    width_key="joint_attention_dim",
    tokenize=tokenize,
    encode=qwen25.encode_text,
    write_tokenizer=qwen25.make_tokenizer_writer(TEMPLATE, PROMPT),
)
EDIT_TEXT = replace(
    TEXT,
    prefix=EDIT_PREFIX,
    tokenize=tokenize_edit,
    tokenize_beside=tokenize_with_images,
    place_beside=place_image_tokens,
    write_tokenizer=qwen25.make_tokenizer_writer(
        EDIT_TEMPLATE, EDIT_PROMPT, special=("<|vision_start|>", "<|vision_end|>", IMAGE_PAD)
    ),
)
