"""The text of Qwen-Image: a prompt in a description's place, by Qwen2.5-VL."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...model_spec import TextEncoding
from . import qwen25

if TYPE_CHECKING:
    import numpy as np

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
    import numpy as np

    texts = [TEMPLATE.format(prompt) for prompt in prompts]
    found = tokenizer(texts, max_length=PREFIX + length, padding="max_length", padding_side="right", truncation=True)
    ids, mask = (np.array(found[name], np.int32) for name in ("input_ids", "attention_mask"))
    return ids, mask[:, PREFIX:]


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
