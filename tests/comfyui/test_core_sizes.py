"""What is known of ComfyUI's nodes before they run is what its own classes return."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.nodes.graphs import core_calls, image_headers
from comfyui_tpu.nodes.graphs.interpreter import Interpreter
from comfyui_tpu.nodes.graphs.known import UNKNOWN, Conditioning, ImageSize, Known, LatentSize, LoaderOutput
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.comfyui.test_core_expected import node
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from PIL import Image as Pillow

pytestmark = needs_comfyui
Nodes = dict[str, dict[str, Any]]

# Modules of ComfyUI's further nodes, and their classes where these have other names.
_MODULES = {
    "nodes_math": {"ComfyMathExpression": "MathExpressionNode"},
    "nodes_logic": {f"Comfy{kind}": kind for kind in ("SwitchNode", "SoftSwitchNode", "NotNode")},
    "nodes_primitive": {"PrimitiveInt": "Int", "PrimitiveFloat": "Float", "PrimitiveBoolean": "Boolean"},
    "nodes_resolution": {"ResolutionSelector": ""},
    "nodes_images": dict.fromkeys(
        "GetImageSize ImageScaleToMaxDimension ImageCrop ImageRotate RepeatImageBatch ImageFromBatch".split(), ""
    ),
    "nodes_post_processing": {"ImageScaleToTotalPixels": "", "ResizeImageMaskNode": "", "BatchImagesNode": ""},
    "nodes_mask": {"MaskToImage": "", "ImageToMask": "", "ImageCompositeMasked": ""},
    "nodes_flux": {"FluxKontextImageScale": "", "EmptyFlux2LatentImage": ""},
    "nodes_sd3": {"EmptySD3LatentImage": ""},
    "nodes_hunyuan": {"EmptyHunyuanLatentVideo": "", "EmptyHunyuanVideo15Latent": "", "HunyuanVideo15ImageToVideo": ""},
    "nodes_wan": {"WanImageToVideo": "", "WanFirstLastFrameToVideo": "", "Wan22ImageToVideoLatent": ""},
    "nodes_edit_model": {"ReferenceLatent": ""},
    "nodes_qwen": {"TextEncodeQwenImageEditPlus": ""},
}  # fmt: skip
CLASSES = {kind: f"{module}:{name or kind}" for module, kinds in _MODULES.items() for kind, name in kinds.items()}
STUBS = ("kornia", "kornia.color", "kornia.filters")


class Folder:
    """Facts of the images of a folder; a VAE states its stride."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def image_size(self, name: str) -> ImageSize | None:
        return image_headers.read_size((self.folder / name).read_bytes())

    def stride(self, loaded: LoaderOutput) -> int | None:
        return int(loaded.values["stride"])  # type: ignore[arg-type]


def run_core_nodes(folder: Path, nodes: Nodes, **latents: str) -> dict[str, list[Any]]:
    job = {"nodes": nodes, "folder": str(folder), "classes": CLASSES, "stubs": STUBS, "latents": latents}
    return run_script("core_sizes.py", job, folder)


def predict_outputs(folder: Path, nodes: Nodes) -> dict[str, tuple[Known, ...]]:
    def vae(node: Any) -> Any:
        yield "stride"
        return (LoaderOutput(node_id=node.node_id, kind=node.kind, values=node.inputs, output=0),)

    rules = {**core_calls.RULES, "Vae": vae, "Clip": vae}
    interpreter = Interpreter(nodes, rules, Folder(folder))
    return {name: interpreter.evaluate(name) for name in nodes}


def describe_prediction(value: Known, shape: Any) -> Any:
    """A prediction as the script describes what a node returned: `shape`, which says how many dimensions it has."""
    if isinstance(value, ImageSize):
        return {"image": [value.batch, value.height, value.width]}
    if isinstance(value, LatentSize):
        return {"latent": latent_shape(value, shape["latent"])}
    if isinstance(value, Conditioning):
        pairs = zip(value.references, shape["references"], strict=True)
        return {"references": [latent_shape(latent, actual) for latent, actual in pairs]}
    return value


def latent_shape(latent: LatentSize, actual: list[int], stride: int = 0) -> list[int]:
    frames = [(latent.num_frames - 1) // 4 + 1] if len(actual) == 5 else []
    batch = latent.batch * max(latent.images, 1)
    return [batch, actual[1], *frames, *latent.size(stride or latent.stride)]


def resize_node(kind: str, **more: Any) -> dict[str, Any]:
    inputs = {f"resize_type.{name}": value for name, value in more.items()}
    return node("ResizeImageMaskNode", input=["image", 0], resize_type=kind, scale_method="area", **inputs)


def scale_node(kind: str, **more: Any) -> dict[str, Any]:
    return node(kind, image=["image", 0], upscale_method="bilinear", **more)


def images(width: int, height: int) -> Nodes:
    """Nodes on an image, and on what others make of it."""
    texts = {"positive": ["text", 0], "negative": ["text", 0]}
    size = {"width": ["size", 0], "height": ["size", 1]}
    video = {**texts, **size, "vae": ["vae", 0], "batch_size": 2, "length": 9}
    return {
        "image": node("LoadImage", image=f"{width}x{height}.png"),
        "vae": node("Vae", stride=8), "vae of 16": node("Vae", stride=16), "clip": node("Clip", stride=0),
        "size": node("GetImageSize", image=["image", 0]),
        "to width": node("ImageScale", image=["image", 0], upscale_method="area", width=50, height=0, crop="disabled"),
        "to height": node("ImageScale", image=["image", 0], upscale_method="area", width=0, height=31, crop="center"),
        "to both": node("ImageScale", image=["image", 0], upscale_method="area", width=9, height=31, crop="center"),
        "as it is": node("ImageScale", image=["image", 0], upscale_method="area", width=0, height=0, crop="center"),
        "by": scale_node("ImageScaleBy", scale_by=0.7),
        "total": scale_node("ImageScaleToTotalPixels", megapixels=0.01, resolution_steps=1),
        "total in steps": scale_node("ImageScaleToTotalPixels", megapixels=0.03, resolution_steps=16),
        "largest": scale_node("ImageScaleToMaxDimension", largest_size=77),
        "kontext": node("FluxKontextImageScale", image=["image", 0]),
        "multiplier": resize_node("scale by multiplier", multiplier=1.37),
        "dimensions": resize_node("scale dimensions", width=0, height=40, crop="center"),
        "longer": resize_node("scale longer dimension", longer_size=90), "of width": resize_node("scale width",
            width=33),
        "shorter": resize_node("scale shorter dimension", shorter_size=21), "of height": resize_node("scale height",
            height=35),
        "pixels": resize_node("scale total pixels", megapixels=0.01), "multiple": resize_node("scale to multiple",
            multiple=8),
        "match": resize_node("match size", match=["largest", 0], crop="disabled"),
        "padded": node("ImagePadForOutpaint", image=["image", 0], left=8, top=0, right=16, bottom=24, feathering=0),
        "cropped": node("ImageCrop", image=["image", 0], width=20, height=200, x=25, y=13),
        "turned": node("ImageRotate", image=["image", 0], rotation="270 degrees"),
        "upside down": node("ImageRotate", image=["image", 0], rotation="180 degrees"),
        "three": node("RepeatImageBatch", image=["image", 0], amount=3),
        "last": node("ImageFromBatch", image=["three", 0], batch_index=-1, length=4),
        "batch": node("BatchImagesNode", **{"images.image0": ["turned", 0], "images.image1": ["three", 0]}),
        "batch of two": node("ImageBatch", image1=["three", 0], image2=["largest", 0]),
        "mask": node("ImageToMask", image=["image", 0], channel="red"), "seen": node("MaskToImage", mask=["mask", 0]),
        "empty image": node("EmptyImage", width=21, height=["size", 1], batch_size=2, color=0),
        "encoded": node("VAEEncode", pixels=["largest", 0], vae=["vae", 0]),
        "encoded by 16": node("VAEEncode", pixels=["largest", 0], vae=["vae of 16", 0]),
        "larger": node("LatentUpscaleBy", samples=["encoded", 0], upscale_method="bilinear", scale_by=1.5),
        "of a size": node(
            "LatentUpscale", samples=["encoded", 0], upscale_method="area", width=100, height=8, crop="disabled"
        ),
        "repeated": node("RepeatLatentBatch", samples=["encoded", 0], amount=3),
        "text": node("CLIPTextEncode", clip=["clip", 0], text=""),
        "reference": node("ReferenceLatent", conditioning=["text", 0], latent=["encoded", 0]),
        "two references": node("ReferenceLatent", conditioning=["reference", 0], latent=["encoded by 16", 0]),
        "edit": node(
            "TextEncodeQwenImageEditPlus", clip=["clip", 0], vae=["vae", 0], prompt="", image1=["image", 0],
            image3=["kontext", 0],
        ),
        "edit of text": node("TextEncodeQwenImageEditPlus", clip=["clip", 0], prompt="", image1=["image", 0]),
        "empty": node("EmptyLatentImage", width=["size", 0], height=47, batch_size=1),
        "sd3": node("EmptySD3LatentImage", **size, batch_size=3),
        "flux2": node("EmptyFlux2LatentImage", width=100, height=72, batch_size=1),
        "hunyuan": node("EmptyHunyuanLatentVideo", width=1016, height=1000, length=10, batch_size=1),
        "hunyuan 15": node("EmptyHunyuanVideo15Latent", width=100, height=72, length=9, batch_size=1),
        "wan": node("WanImageToVideo", **video), "last frame": node("WanFirstLastFrameToVideo", **video),
        "frames of hunyuan": node("HunyuanVideo15ImageToVideo", **video),
        "ti2v": node("Wan22ImageToVideoLatent", vae=["vae of 16", 0], width=64, height=64, length=9, batch_size=2),
    }  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(37, 29), (29, 50), (48, 48)])
def test_predicted_sizes_match_core_nodes(width: int, height: int, tmp_path: Path):
    Pillow.new("RGB", (width, height)).save(tmp_path / f"{width}x{height}.png")
    nodes = images(width, height)
    fixed = {"hunyuan": "HunyuanVideo15", "empty": "Wan21", "sd3": "Flux", "hunyuan 15": "Wan21"}
    actual, ours = run_core_nodes(tmp_path, nodes, **fixed), predict_outputs(tmp_path, nodes)
    checked = {name for name, node in nodes.items() if node["class_type"] not in ("Vae", "Clip")}
    for name in checked:
        assert ours[name] and UNKNOWN not in ours[name], name
        pairs = zip(ours[name], actual[name], strict=False)
        assert [describe_prediction(value, shape) for value, shape in pairs] == actual[name][: len(ours[name])], name
    for name, kind in fixed.items():
        (shape,) = actual[f"{name} for {kind}"]
        latent = ours[name][0]
        assert isinstance(latent, LatentSize)
        stride = 16 if kind == "HunyuanVideo15" else 8
        assert latent.size(stride) == tuple(shape["latent"][-2:]), (name, kind)


EXPRESSIONS = (
    "a + b", "floor (a * b + 1)", "a / b", "b // a", "-a % b", "a ** 2", "2 ** -1", "round(a * 8 / 7, 2)", "round(2.5)",
    "min(a, b, 3)", "max(values)", "sum(values)", "sum(a, b, 1)", "ceil(a / 3) * 8", "int(a / 3)", "abs(-b)",
    "a if a > b else b", "1 < a <= b", "a == b or b", "a > 100 and 1 / 0", "not a", "sqrt(b) + log2(8)", "pow(2, 10)",
    "  a  ", "1e3", "True + 1", "float(a)", "a < b < 3", "log(8, 2)",
)  # fmt: skip


def test_predicted_expressions_match_core_nodes(tmp_path: Path):
    values = {"values.a": 5, "values.b": 16.5}
    nodes: Nodes = {text: node("ComfyMathExpression", expression=text, **values) for text in EXPRESSIONS}
    nodes |= {
        "whole": node("PrimitiveInt", value=7), "part": node("PrimitiveFloat", value=3.0),
        "yes": node("PrimitiveBoolean", value=True),
        "linked": node("ComfyMathExpression", expression="a * b - c", **{
            "values.a": ["whole", 0], "values.b": ["part", 0], "values.c": ["yes", 0],
        }),
        "switched": node("ComfySwitchNode", switch=["yes", 0], on_true=["whole", 0], on_false=["part", 0]),
        "soft": node("ComfySoftSwitchNode", switch=["yes", 0], on_false=["part", 0]),
        "not": node("ComfyNotNode", value=["yes", 0]),
        **{
            f"{ratio} {pixels} {multiple}": node(
                "ResolutionSelector", aspect_ratio=ratio, megapixels=pixels, multiple=multiple
            )
            for ratio in ("1:1 (Square)", "2:3 (Portrait Photo)", "21:9 (Ultrawide)", "9:16 (Portrait Widescreen)")
            for pixels, multiple in ((1.0, 8), (0.37, 20))
        },
    }  # fmt: skip
    actual = run_core_nodes(tmp_path, nodes)
    ours = {name: list(values) for name, values in predict_outputs(tmp_path, nodes).items()}
    assert ours == actual
    assert all(type(one) is type(other) for name in ours for one, other in zip(ours[name], actual[name], strict=True))


def test_image_size_matches_loaded_image_or_is_none(tmp_path: Path):
    """Of files that Pillow writes, some of them turned, moving or of a kind that is not read: these are left out."""
    picture = Pillow.fromarray(torch.zeros(29, 37, 3, dtype=torch.uint8).numpy())
    turned = Pillow.Exif()
    turned[0x0112] = 6
    upright = Pillow.Exif()
    upright[0x0112], upright[0x010F] = 1, "a camera"
    written: Mapping[str, Mapping[str, Any]] = {
        "plain.png": {}, "plain.jpg": {}, "progressive.jpg": {"progressive": True}, "upright.jpg": {"exif": upright},
        "profile.jpg": {"icc_profile": bytes(100_000)}, "plain.webp": {}, "lossless.webp": {"lossless": True},
        "turned.jpg": {"exif": turned}, "turned.webp": {"exif": turned}, "turned.png": {"exif": turned},
        "plain.bmp": {}, "plain.gif": {},
        "moving.png": {"save_all": True, "append_images": [picture.rotate(90, expand=True).resize((37, 29))]},
    }  # fmt: skip
    for name, options in written.items():
        picture.save(tmp_path / name, **options)
    picture.convert("RGBA").save(tmp_path / "alpha.png")
    picture.convert("P").save(tmp_path / "palette.png")
    picture.convert("L").save(tmp_path / "grey.jpg")
    picture.convert("RGBA").save(tmp_path / "alpha.webp")
    names = sorted(path.name for path in tmp_path.iterdir())
    actual = run_core_nodes(tmp_path, {name: node("LoadImage", image=name) for name in names})
    known = {name: Folder(tmp_path).image_size(name) for name in names}
    assert {name for name, size in known.items() if size is None} == {
        "turned.jpg", "turned.webp", "turned.png", "plain.bmp", "plain.gif", "moving.png",
    }  # fmt: skip
    for name, size in known.items():
        if size is not None:
            assert describe_prediction(size, None) == actual[name][0], name
    assert math.prod(actual["plain.png"][0]["image"]) == 37 * 29
