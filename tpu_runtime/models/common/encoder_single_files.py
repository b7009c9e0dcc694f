"""Single files of text and image encoders with transformers' keys, and of language models with llama.cpp's.

Recognition follows ComfyUI's `comfy/sd.py`, `detect_te_model`.
"""

from collections.abc import Iterable
from functools import partial

from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...model_spec import KeyTable
from ...model_spec.upstream import UpstreamConfig
from . import qwen3, qwen25

T5_ATTENTION = "encoder.block.0.layer.0.SelfAttention"


def t5_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a T5 from its tensors' shapes. `base`, the published config, is not needed."""
    embedding = "shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"
    vocabulary, dim = shapes.require(embedding, 2)
    heads = shapes.require(f"{T5_ATTENTION}.relative_attention_bias.weight", 2)[1]
    return {
        "d_ff": shapes.require("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 2)[0],
        "d_kv": shapes.require(f"{T5_ATTENTION}.q.weight", 2)[0] // heads,
        "d_model": dim,
        "num_heads": heads,
        "num_layers": shapes.count("encoder.block"),
        "vocab_size": vocabulary,
    }


def causal_config(shapes: TensorShapes, base: UpstreamConfig, prefix: str = "") -> Config:
    """Return the config entries that causal language models share.

    shapes: of the file's tensors. base: the published config, from which the head size is taken unless queries are
        normed.
    prefix: of the model's keys.
    """
    vocabulary, dim = shapes.require(f"{prefix}embed_tokens.weight", 2)
    attention = f"{prefix}layers.0.self_attn"
    published = base.get("head_dim") or base["hidden_size"] // base["num_attention_heads"]
    norm = f"{attention}.q_norm.weight"
    head_dim = shapes.require(norm, 1)[0] if norm in shapes else published
    return {
        "hidden_size": dim,
        "intermediate_size": shapes.require(f"{prefix}layers.0.mlp.gate_proj.weight", 2)[0],
        "num_attention_heads": shapes.require(f"{attention}.q_proj.weight", 2)[0] // head_dim,
        "num_hidden_layers": shapes.count(f"{prefix}layers"),
        "num_key_value_heads": shapes.require(f"{attention}.k_proj.weight", 2)[0] // head_dim,
        "vocab_size": vocabulary,
    } | ({"head_dim": head_dim} if "head_dim" in base else {})


def qwen3_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a Qwen3 from its tensors' shapes; `base` is the published config."""
    config = causal_config(shapes, base, "model.")
    return {**config, "max_window_layers": config["num_hidden_layers"]}


_OF_LAYERS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm", "post_attention_layernorm"),
)
# llama.cpp's, in the same order.
_LLAMA = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("ffn_gate", "ffn_up", "ffn_down"),
    *("attn_norm", "ffn_norm"),
)


def language_model_table(own: str, names: Iterable[str]) -> KeyTable:
    """Return the key table of a language model to keys that start with `own`.

    In the file it is called `model` or nothing, or is named as in llama.cpp.
    """
    table: dict[str, str] = {}
    for before in ("model.language_model.", "language_model.model.", "model.", ""):
        table |= {f"{before}layers.*.{name}": f"{own}layers.*.{name}" for name in _OF_LAYERS}
        table |= {f"{before}{name}": f"{own}{name}" for name in ("embed_tokens", "norm")}
    table |= {f"blk.*.{theirs}": f"{own}layers.*.{name}" for theirs, name in zip(_LLAMA, _OF_LAYERS, strict=True)}
    return table | {"token_embd": f"{own}embed_tokens", "output_norm": f"{own}norm"}


_T5 = {
    **{f"attn_{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm",
    "ffn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
}


def t5_llama_table(names: Iterable[str]) -> KeyTable:
    """Return the key table from llama.cpp's names to transformers'. `names` are not needed."""
    blocks = {f"enc.blk.*.{theirs}": f"encoder.block.*.{name}" for theirs, name in _T5.items()}
    return {**blocks, "token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm"}


def vision_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a CLIP or SigLIP vision model from its tensors' shapes.

    shapes: of the file's tensors. base: the published config, from which the head size is taken.
    """
    dim, _, patch, _ = shapes.require("embeddings.patch_embedding.weight", 4)
    places = shapes.require("embeddings.position_embedding.weight", 2)[0] - ("embeddings.class_embedding" in shapes)
    head_dim = base["hidden_size"] // base["num_attention_heads"]
    return {
        "hidden_size": dim,
        "image_size": round(places**0.5) * patch,
        "intermediate_size": shapes.require("encoder.layers.0.mlp.fc1.weight", 2)[0],
        "num_attention_heads": dim // head_dim or 1,
        "num_hidden_layers": shapes.count("encoder.layers"),
        "patch_size": patch,
    }


def vision_table(names: Iterable[str]) -> KeyTable:
    """Return the key table that removes the prefix `vision_model.`, as transformers 4 wrote it."""
    layer = "encoder.layers.*"
    modules = (
        *(f"{layer}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        *(f"{layer}.{name}" for name in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")),
        *("embeddings.patch_embedding", "embeddings.position_embedding", "embeddings.class_embedding"),
        *("pre_layrnorm", "post_layernorm"),
    )
    return {f"vision_model.{name}": name for name in modules}


VISION_QUERY = "encoder.layers.0.self_attn.q_proj.weight"


def list_signatures(*names: str) -> tuple[tuple[str, ...], ...]:
    """Return the signature keys of a language model's first layer, with every known prefix."""
    befores = ("model.", "model.language_model.", "language_model.model.", "")
    return tuple(
        tuple(("!" if name.startswith("!") else "") + f"{before}layers.0.{name.removeprefix('!')}" for name in names)
        for before in befores
    )


QUERY, QK_NORM, BIAS = "self_attn.q_proj.weight", "self_attn.q_norm.weight", "self_attn.k_proj.bias"
LAYOUTS = (
    FileLayout(
        class_name="T5EncoderModel",
        marks=((f"{T5_ATTENTION}.q.weight",),),
        config=t5_config,
        ignored=("spiece_model", "decoder.", "lm_head.", "logit_scale"),
    ),
    FileLayout(
        class_name="T5EncoderModel",
        marks=(("enc.blk.0.attn_q.weight",),),
        table=t5_llama_table,
        config=t5_config,
        ignored=("dec.", "output."),
    ),
    FileLayout(
        class_name="Qwen3ForCausalLM",
        marks=(*list_signatures(QUERY, QK_NORM), ("blk.0.attn_q.weight", "blk.0.attn_q_norm.weight")),
        table=partial(language_model_table, "model."),
        config=qwen3_config,
        chat_template=qwen3.CHAT_TEMPLATE,
        ignored=("visual.", "model.visual.", "lm_head.", "output."),
    ),
    FileLayout(
        class_name="Qwen2_5_VLTextModel",
        marks=(*list_signatures(QUERY, BIAS), ("blk.0.attn_q.weight", "blk.0.attn_k.bias")),
        table=partial(language_model_table, ""),
        config=causal_config,
        chat_template=qwen25.CHAT_TEMPLATE,
        # The vision tower, `visual.`, is kept: it is Qwen-Image Edit's image encoder.
        ignored=("lm_head.", "output."),
    ),
)
