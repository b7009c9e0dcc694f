"""Workflows as the separate TPU packs saved them: their nodes, sockets and values in the order of their widgets.

After the example files in yangwhale/gpu-tpu-pedia, `tpu/ComfyUI/custom_nodes/*/examples`, with other prompts; some of
these were saved without what the page adds behind a seed, or with a value that no widget takes. With a checkout of that
repository in PUBLISHED_WORKFLOWS the tests take the files themselves.
"""

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Id, type, values, sockets as (name, type), outputs as (name, type).
Row = tuple[int, str, list[Any], Sequence[tuple[str, str]], Sequence[tuple[str, str]]]
Link = tuple[int, int, int, int, int]  # id, origin, slot, target, slot
WAN21, WAN22 = "Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
FLUX2, COGVIDEOX = "black-forest-labs/FLUX.2-dev", "zai-org/CogVideoX1.5-5B"
EMBEDS = [("prompt_embeds", "TENSOR"), ("negative_prompt_embeds", "TENSOR")]
LATENTS = ("latents", "LATENT")
FRAMES = [("frames", "IMAGE"), ("fps", "INT")]
PICTURE = "wan_i2v_input.JPG"


def document(rows: Sequence[Row], links: Sequence[Link]) -> dict[str, Any]:
    """A workflow in the page's format."""
    types = {(row[0], slot): kind for row in rows for slot, (_, kind) in enumerate(row[4])}
    nodes = []
    for place, (node_id, kind, values, sockets, outputs) in enumerate(rows):
        incoming = {link[4]: link[0] for link in links if link[3] == node_id}
        outgoing = [[link[0] for link in links if link[1:3] == (node_id, slot)] for slot in range(len(outputs))]
        nodes.append({
            "id": node_id, "type": kind, "pos": [60 + 420 * place, 120], "size": [380, 220], "flags": {}, "mode": 0,
            "order": place, "properties": {"Node name for S&R": kind}, "widgets_values": values,
            "inputs": [{"name": n, "type": t, "link": incoming.get(i)} for i, (n, t) in enumerate(sockets)],
            "outputs": [
                {"name": n, "type": t, "links": outgoing[i] or None, "slot_index": i}
                for i, (n, t) in enumerate(outputs)
            ],
        })  # fmt: skip
    return {
        "last_node_id": max(row[0] for row in rows), "last_link_id": max(link[0] for link in links),
        "nodes": nodes, "links": [[*link, types[link[1:3]]] for link in links],
        "groups": [], "config": {}, "extra": {"ds": {"scale": 0.5, "offset": [0, 0]}}, "version": 0.4,
    }  # fmt: skip


def video_nodes(node_id: int, prefix: list[Any]) -> list[Row]:
    """ComfyUI's own behind a decoder; one file was written without the page."""
    is_by_hand = len(prefix) == 1
    sockets = [("images", "IMAGE"), *([] if is_by_hand else [("audio", "AUDIO")])]
    return [
        (node_id, "CreateVideo", [16], sockets, [("video" if is_by_hand else "VIDEO", "VIDEO")]),
        (node_id + 1, "SaveVideo", prefix, [("video", "VIDEO")], []),
    ]


def flux2() -> dict[str, Any]:
    sampler = [1024, 1024, 50, 4.0, 719528488, "randomize", FLUX2]
    rows: list[Row] = [
        (1, "Flux2TextEncoder", ["a dog in a classroom", FLUX2], [], EMBEDS[:1]),
        (2, "Flux2TPUSampler", sampler, EMBEDS[:1], [("LATENT", "LATENT")]),
        (3, "Flux2TPUVAEDecoder", [1024, 1024, FLUX2], [LATENTS], [("IMAGE", "IMAGE")]),
        (4, "PreviewImage", [], [("images", "IMAGE")], []),
    ]
    return document(rows, [(1, 1, 0, 2, 0), (2, 2, 0, 3, 0), (3, 3, 0, 4, 0)])


def cogvideox() -> dict[str, Any]:
    embeddings, latents = [("embeddings", "COGVIDEOX_EMBEDS")], [("latents", "COGVIDEOX_LATENTS")]
    rows: list[Row] = [
        (1, "CogVideoXTextEncoder", ["a panda plays the guitar", "", COGVIDEOX], [], embeddings),
        (2, "CogVideoXTPUSampler", [720, 1280, 81, 50, 6.0, 42, 8], embeddings, latents),
        (3, "CogVideoXTPUVAEDecoder", [16], latents, FRAMES[:1]),
        *video_nodes(4, ["cogvideox"]),
    ]
    return document(rows, [(1, 1, 0, 2, 0), (2, 2, 0, 3, 0), (3, 3, 0, 4, 0), (4, 4, 0, 5, 0)])


def wan21() -> dict[str, Any]:
    rows: list[Row] = [
        (1, "Wan21TextEncoder", ["a cat bakes a cake", "static, blurred", WAN21], [], EMBEDS),
        (
            2, "Wan21TPUSampler", [720, 1280, 81, 50, 5, 42, "fixed", WAN21, 5], EMBEDS,
            [LATENTS, ("num_frames", "INT")],
        ),
        (3, "Wan21TPUVAEDecoder", [WAN21, 16], [LATENTS], FRAMES),
        *video_nodes(6, ["video/ComfyUI", "auto", "auto"]),
    ]  # fmt: skip
    return document(rows, [(1, 1, 0, 2, 0), (2, 1, 1, 2, 1), (3, 2, 0, 3, 0), (6, 3, 0, 6, 0), (7, 6, 0, 7, 0)])


def wan22_i2v() -> dict[str, Any]:
    condition, info = ("condition", "CONDITION"), ("latent_info", "LATENT_INFO")
    rows: list[Row] = [
        (1, "LoadImage", [PICTURE, "image"], [], [("IMAGE", "IMAGE"), ("MASK", "MASK")]),
        (2, "Wan22I2VImageEncoder", [1104, 832, 81, WAN22], [("image", "IMAGE")], [condition, info]),
        (3, "Wan22I2VTextEncoder", ["a white cat on a surfboard", "static", WAN22], [], EMBEDS),
        (
            4, "Wan22I2VTPUSampler", [40, 3.5, 5.0, 0, WAN22], [*EMBEDS, condition, info],
            [LATENTS, ("num_frames", "INT")],
        ),
        (5, "Wan22I2VTPUVAEDecoder", [WAN22, 16], [LATENTS], FRAMES),
        *video_nodes(6, ["video/wan22_i2v", "auto", "auto"]),
    ]  # fmt: skip
    links = [
        *((1, 1, 0, 2, 0), (3, 2, 0, 4, 2), (4, 2, 1, 4, 3), (5, 3, 0, 4, 0), (6, 3, 1, 4, 1)),
        *((7, 4, 0, 5, 0), (8, 5, 0, 6, 0), (9, 6, 0, 7, 0)),
    ]
    return document(rows, links)


def read_published(checkout: Path, name: str) -> dict[str, Any]:
    (path,) = checkout.glob(f"tpu/ComfyUI/custom_nodes/*/examples/{name}.json")
    return json.loads(path.read_text("utf-8"))


ALL = {"flux2": flux2, "cogvideox": cogvideox, "wan21": wan21, "wan22_i2v": wan22_i2v}
if "PUBLISHED_WORKFLOWS" in os.environ:
    FILES = {
        "flux2": "flux2_tpu_basic", "cogvideox": "cogvideox_t2v_720p", "wan21": "wan21_t2v_720p",
        "wan22_i2v": "wan22_i2v_720p",
    }  # fmt: skip
    checkout = Path(os.environ["PUBLISHED_WORKFLOWS"])
    ALL = {pack: functools.partial(read_published, checkout, name) for pack, name in FILES.items()}
