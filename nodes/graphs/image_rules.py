"""Rules of ComfyUI's nodes for numbers, switches, images and latents: the sizes of their outputs (ComfyUI 0.33)."""

import math
from collections.abc import Mapping

from .expressions import evaluate
from .interpreter import Rule, RunningNode, Steps, check_side
from .known import ImageSize, LatentSize, NotKnown, Outputs

# --- numbers and switches ---------------------------------------------------------------------------------------------


def _int(node: RunningNode) -> Steps[Outputs]:
    return ((yield from node.integer("value")),)


def _float(node: RunningNode) -> Steps[Outputs]:
    return (float((yield from node.number("value"))),)


def _boolean(node: RunningNode) -> Steps[Outputs]:
    return ((yield from node.get("value", bool)),)


def _text(node: RunningNode) -> Steps[Outputs]:
    return ((yield from node.get("value", str)),)


def _choice(node: RunningNode) -> Steps[Outputs]:
    return (yield from node.get("choice", str)), (yield from node.integer("index", 0))


def chosen_input(node: RunningNode) -> Steps[str]:
    """Return the name of the input that a switch passes on."""
    names = ("on_true", "on_false")
    present = [name for name in names if node.inputs.get(name) is not None]
    if len(present) == 1 and node.kind == "ComfySoftSwitchNode":
        return present[0]
    return "on_true" if (yield from node.get("switch", bool)) else "on_false"


def _switch(node: RunningNode) -> Steps[Outputs]:
    return ((yield (yield from chosen_input(node))),)


def _not(node: RunningNode) -> Steps[Outputs]:
    value = yield "value"
    if not isinstance(value, bool | int | float | str):
        raise NotKnown
    return (not value,)


def _expression(node: RunningNode) -> Steps[Outputs]:
    expression, values = (yield from node.get("expression", str)), {}
    for name in node.inputs:
        group, _, letter = name.partition(".")
        if group == "values" and letter:
            value = yield name
            if not isinstance(value, bool | int | float):
                raise NotKnown
            values[letter] = value
    return evaluate(expression, values)


# Sides of the aspect ratios that ResolutionSelector offers.
_RATIOS = {
    "1:1 (Square)": (1, 1), "2:3 (Portrait Photo)": (2, 3), "3:2 (Photo)": (3, 2), "3:4 (Portrait Standard)": (3, 4),
    "4:3 (Standard)": (4, 3), "9:16 (Portrait Widescreen)": (9, 16), "16:9 (Widescreen)": (16, 9),
    "21:9 (Ultrawide)": (21, 9),
}  # fmt: skip


def _resolution(node: RunningNode) -> Steps[Outputs]:
    width, height = _RATIOS[(yield from node.get("aspect_ratio", str))]
    megapixels, multiple = (yield from node.number("megapixels")), (yield from node.integer("multiple", 8))
    scale = math.sqrt(megapixels * 1024 * 1024 / (width * height))
    return round(width * scale / multiple) * multiple, round(height * scale / multiple) * multiple


# --- images -----------------------------------------------------------------------------------------------------------


def resize(image: ImageSize, width: float, height: float, batch: int | None = None) -> ImageSize:
    """Return an image of another size and the same batch, or another one."""
    return ImageSize(height=check_side(height), width=check_side(width), batch=check_side(batch or image.batch))


def _load_image(node: RunningNode) -> Steps[Outputs]:
    image = node.facts.image_size((yield from node.get("image", str)))
    if image is None:
        raise NotKnown
    return (image,)


def _empty_image(node: RunningNode) -> Steps[Outputs]:
    width, height = (yield from node.side("width")), (yield from node.side("height"))
    return (ImageSize(height=height, width=width, batch=(yield from node.side("batch_size", 1))),)


def _same(name: str) -> Rule:
    """Return the rule of a node whose first output has the size of its input `name`."""

    def rule(node: RunningNode) -> Steps[Outputs]:
        return ((yield from node.get(name, ImageSize)),)

    return rule


def _image_size(node: RunningNode) -> Steps[Outputs]:
    image = yield from node.get("image", ImageSize)
    return image.width, image.height, image.batch


def _scale(node: RunningNode) -> Steps[Outputs]:
    image = yield from node.get("image", ImageSize)
    width, height = (yield from node.integer("width")), (yield from node.integer("height"))
    return (_to_dimensions(image, width, height),)


def _to_dimensions(image: ImageSize, width: int, height: int) -> ImageSize:
    """Return the image in a size of which a side of 0 follows from the other."""
    if width == 0 and height == 0:
        return image
    if width == 0:
        width = max(1, round(image.width * height / image.height))
    elif height == 0:
        height = max(1, round(image.height * width / image.width))
    return resize(image, width, height)


def _multiply(image: ImageSize, factor: float) -> ImageSize:
    return resize(image, round(image.width * factor), round(image.height * factor))


def _scale_by_factor(node: RunningNode) -> Steps[Outputs]:
    return (_multiply((yield from node.get("image", ImageSize)), (yield from node.number("scale_by"))),)


def to_pixels(image: ImageSize, total: float, step: float = 1) -> ImageSize:
    """Return the image scaled to a total number of pixels, with sides that are multiples of `step`."""
    scale = math.sqrt(total / (image.width * image.height))
    return resize(image, round(image.width * scale / step) * step, round(image.height * scale / step) * step)


def _scale_to_pixels(node: RunningNode) -> Steps[Outputs]:
    image, megapixels = (yield from node.get("image", ImageSize)), (yield from node.number("megapixels"))
    return (to_pixels(image, megapixels * 1024 * 1024, (yield from node.integer("resolution_steps", 1))),)


def _to_side(image: ImageSize, size: int, is_longer: bool) -> ImageSize:
    """Return the image with its longer or shorter side of `size`."""
    if image.width == image.height:
        return resize(image, size, size)
    if (image.height > image.width) is is_longer:
        return resize(image, round((image.width / image.height) * size), size)
    return resize(image, size, round((image.height / image.width) * size))


def _scale_to_side(node: RunningNode) -> Steps[Outputs]:
    image, size = (yield from node.get("image", ImageSize)), (yield from node.integer("largest_size"))
    return (_to_side(image, size, True),)


_KONTEXT_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip


def _scale_for_kontext(node: RunningNode) -> Steps[Outputs]:
    image = yield from node.get("image", ImageSize)
    ratio = image.width / image.height
    _, width, height = min((abs(ratio - width / height), width, height) for width, height in _KONTEXT_SIZES)
    return (resize(image, width, height),)


def _resize(node: RunningNode) -> Steps[Outputs]:
    image, kind = (yield from node.get("input", ImageSize)), (yield from node.get("resize_type", str))

    def number(name: str) -> Steps[float]:
        return node.number(f"resize_type.{name}")

    match kind:
        case "scale by multiplier":
            return (_multiply(image, (yield from number("multiplier"))),)
        case "scale dimensions":
            return (_to_dimensions(image, int((yield from number("width"))), int((yield from number("height")))),)
        case "scale longer dimension":
            return (_to_side(image, int((yield from number("longer_size"))), True),)
        case "scale shorter dimension":
            return (_to_side(image, int((yield from number("shorter_size"))), False),)
        case "scale width":
            return (_to_dimensions(image, int((yield from number("width"))), 0),)
        case "scale height":
            return (_to_dimensions(image, 0, int((yield from number("height")))),)
        case "scale total pixels":
            return (to_pixels(image, int((yield from number("megapixels")) * 1024 * 1024)),)
        case "match size":
            match = yield from node.get("resize_type.match", ImageSize)
            return (resize(image, match.width, match.height),)
        case "scale to multiple":
            multiple = max(1, int((yield from number("multiple"))))
            width, height = image.width // multiple * multiple, image.height // multiple * multiple
            return (resize(image, width, height) if width and height else image,)
    raise NotKnown


def _pad(node: RunningNode) -> Steps[Outputs]:
    image, more = (yield from node.get("image", ImageSize)), []
    for name in ("left", "right", "top", "bottom"):
        more.append((yield from node.integer(name)))
    return (resize(image, image.width + more[0] + more[1], image.height + more[2] + more[3]),)


def _crop(node: RunningNode) -> Steps[Outputs]:
    image, corner, size = (yield from node.get("image", ImageSize)), [], []
    for name, side in (("x", image.width), ("y", image.height)):
        corner.append(min((yield from node.integer(name)), side - 1))
    for name, start, side in (("width", corner[0], image.width), ("height", corner[1], image.height)):
        size.append(min((yield from node.side(name)), side - start))
    return (resize(image, *size),)


def _rotate(node: RunningNode) -> Steps[Outputs]:
    image, rotation = (yield from node.get("image", ImageSize)), (yield from node.get("rotation", str))
    is_turned = rotation.startswith(("90", "270"))
    return (resize(image, image.height, image.width) if is_turned else image,)


def _repeat(node: RunningNode) -> Steps[Outputs]:
    image = yield from node.get("image", ImageSize)
    return (resize(image, image.width, image.height, image.batch * (yield from node.side("amount"))),)


def _from_batch(node: RunningNode) -> Steps[Outputs]:
    image, first = (yield from node.get("image", ImageSize)), (yield from node.integer("batch_index"))
    first = max(0, min(image.batch - 1, first + image.batch if first < 0 else first))
    return (resize(image, image.width, image.height, min(image.batch - first, (yield from node.side("length")))),)


def _batch(node: RunningNode) -> Steps[Outputs]:
    """Join images of two inputs, or of a list of inputs, in the size of the first."""
    images = []
    for name in node.inputs:
        if name in ("image1", "image2") or name.startswith("images."):
            images.append((yield from node.get(name, ImageSize)))
    return (resize(images[0], images[0].width, images[0].height, sum(image.batch for image in images)),)


# --- latents ----------------------------------------------------------------------------------------------------------


def video_latent(node: RunningNode, stride: int, is_rescaled: bool = False) -> Steps[LatentSize]:
    """Return an empty latent of a node's width and height, and its length and batch if it has them."""
    width, height = (yield from node.side("width")), (yield from node.side("height"))
    length, batch = (yield from node.side("length", 1)), (yield from node.side("batch_size", 1))
    return LatentSize(
        height=height, width=width, num_frames=length, batch=batch, stride=stride, is_rescaled=is_rescaled
    )


def _empty(stride: int, is_rescaled: bool) -> Rule:
    def rule(node: RunningNode) -> Steps[Outputs]:
        return ((yield from video_latent(node, stride, is_rescaled)),)

    return rule


def encode_size(images: ImageSize, stride: int) -> LatentSize:
    """Return the latent of images, which loses the rest of a side; all pixels of one count if the VAE is unknown."""
    height, width = (side // (stride or 1) * (stride or 1) for side in (images.height, images.width))
    return LatentSize(height=check_side(height), width=check_side(width), images=images.batch, stride=stride)


def decode_size(latent: LatentSize, stride: int | None) -> ImageSize:
    """Return the frames of a latent; NotKnown if their size or number depends on an unknown model."""
    if latent.images > 1 or (stride is None and (latent.stride == 1 or latent.height % 16 or latent.width % 16)):
        raise NotKnown
    stride = stride or latent.stride or 1
    height, width = latent.size(stride)
    frames = (latent.num_frames - 1) // 4 * 4 + 1
    return ImageSize(
        height=check_side(height * stride), width=check_side(width * stride), batch=check_side(frames * latent.batch)
    )


def _same_latent(node: RunningNode) -> Steps[Outputs]:
    return ((yield from node.get("samples", LatentSize)),)


def _repeat_latent(node: RunningNode) -> Steps[Outputs]:
    latent, amount = (yield from node.get("samples", LatentSize)), (yield from node.side("amount"))
    if latent.images > 1:
        raise NotKnown  # whether these are frames or a batch depends on the model
    return (_resize_latent(latent, latent.width, latent.height, check_side(latent.batch * amount)),)


def _scale_latent(node: RunningNode) -> Steps[Outputs]:
    latent = yield from node.get("samples", LatentSize)
    width, height = (yield from node.integer("width")), (yield from node.integer("height"))
    if width == 0 and height == 0:
        return (latent,)
    stride = latent.stride
    if not stride or 0 in (width, height):
        raise NotKnown
    return (_resize_latent(latent, max(64, width) // 8 * stride, max(64, height) // 8 * stride),)


def _scale_latent_by_factor(node: RunningNode) -> Steps[Outputs]:
    latent, factor = (yield from node.get("samples", LatentSize)), (yield from node.number("scale_by"))
    if not (stride := latent.stride):
        raise NotKnown
    width, height = (round(side // stride * factor) * stride for side in (latent.width, latent.height))
    return (_resize_latent(latent, width, height),)


def _resize_latent(latent: LatentSize, width: int, height: int, batch: int | None = None) -> LatentSize:
    return LatentSize(
        height=check_side(height), width=check_side(width), num_frames=latent.num_frames, batch=batch or latent.batch,
        images=latent.images, stride=latent.stride, is_rescaled=latent.is_rescaled,
    )  # fmt: skip


def _rules(kinds: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(kinds.split(), rule)


RULES: Mapping[str, Rule] = {
    "PrimitiveInt": _int,
    "PrimitiveFloat": _float,
    "PrimitiveBoolean": _boolean,
    **_rules("PrimitiveString PrimitiveStringMultiline", _text),
    "CustomCombo": _choice,
    **_rules("ComfySwitchNode ComfySoftSwitchNode", _switch),
    "ComfyNotNode": _not,
    "ComfyMathExpression": _expression,
    "ResolutionSelector": _resolution,
    **_rules("LoadImage LoadImageOutput", _load_image),
    "EmptyImage": _empty_image,
    **_rules(
        "ImageInvert ImageBlur ImageSharpen ImageQuantize ImageFlip ImageAddNoise Canny ImageToMask", _same("image")
    ),
    **_rules("GrowMask InvertMask MaskToImage ThresholdMask FeatherMask", _same("mask")),
    "ImageCompositeMasked": _same("destination"),
    "GetImageSize": _image_size,
    "ImageScale": _scale,
    "ImageScaleBy": _scale_by_factor,
    "ImageScaleToTotalPixels": _scale_to_pixels,
    "ImageScaleToMaxDimension": _scale_to_side,
    "FluxKontextImageScale": _scale_for_kontext,
    "ResizeImageMaskNode": _resize,
    "ImagePadForOutpaint": _pad,
    "ImageCrop": _crop,
    "ImageRotate": _rotate,
    "RepeatImageBatch": _repeat,
    "ImageFromBatch": _from_batch,
    **_rules("BatchImagesNode ImageBatch", _batch),
    **_rules("EmptyLatentImage EmptySD3LatentImage EmptyHunyuanLatentVideo", _empty(8, True)),
    "EmptyFlux2LatentImage": _empty(16, False),
    "EmptyHunyuanVideo15Latent": _empty(16, True),
    "SetLatentNoiseMask": _same_latent,
    "RepeatLatentBatch": _repeat_latent,
    "LatentUpscale": _scale_latent,
    "LatentUpscaleBy": _scale_latent_by_factor,
}
