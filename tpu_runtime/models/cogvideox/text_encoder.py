"""The text encoding of CogVideoX: the encoder of T5 v1.1 XXL (https://arxiv.org/abs/1910.10683) without a mask.

It is transformers' `T5EncoderModel`: states `[rows, 226, 4096]` after 24 layers and the final norm.
"""

from functools import partial

from ...model_spec import TextEncoding
from ..common import t5

PROMPT = (
    "A panda, dressed in a small, red jacket and a tiny hat, sits on a wooden stool in a serene bamboo forest. The "
    "panda's fluffy paws strum a miniature acoustic guitar, producing soft, melodic tunes. Nearby, a few other pandas "
    "gather, watching curiously and some clapping in rhythm. Sunlight filters through the tall bamboo, casting a "
    "gentle glow on the scene. The panda's face is expressive, showing concentration and joy as it plays. The "
    "background includes a small, flowing stream and vibrant green foliage, enhancing the peaceful and magical "
    "atmosphere of this unique musical performance."
)

# Tokens of a text, padding included: all are attended to. `max_text_seq_length` of the denoiser's config.
MAX_TOKENS = 226

TEXT_ENCODER = t5.make_encoder(
    config={"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 32128},
    tiny={"d_ff": 72, "d_kv": 8, "d_model": 40, "num_heads": 5, "num_layers": 3, "vocab_size": 210},
    blocks=("encoder.block",),
    aliases={
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (
            "encoder.relative_attention_bias.weight"
        )
    },
    trim=t5.move_position_bias,
)

TEXT = TextEncoding(
    tokenizer_class="T5Tokenizer",
    max_length=MAX_TOKENS,
    width_key="text_embed_dim",
    tokenize=partial(t5.tokenize, length=MAX_TOKENS),
    encode=t5.encode_unmasked,
    depth_key="num_layers",
    write_tokenizer=partial(t5.write_t5_tokenizer, texts=(PROMPT,)),
)
