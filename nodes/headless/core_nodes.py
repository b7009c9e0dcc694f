"""The few ComfyUI nodes that the examples use, for runs without ComfyUI: same names and inputs, files on disk."""

from functools import partial
from pathlib import Path
from typing import Protocol

from ...tpu_runtime import media
from ..declare import Folders, Input, Node, NodeContext, Output, Value

_IMAGES = Input(name="images", type="IMAGE", tooltip="The images.")
_VIDEO = Input(name="video", type="VIDEO", tooltip="The video.")
_WEBP_EFFORT = {"default": 4, "fastest": 0, "slowest": 6}
_EXAMPLES = Path(__file__).parents[2] / "examples"


class SavingContext(NodeContext, Protocol):
    """A host that writes `metadata` into its files."""

    metadata: dict[str, str]


def find_image(folders: Folders, image: str) -> Path:
    """Return the path of an image: in the input folder, else next to the workflow, else among the pack's examples."""
    candidates = [folder / image for folder in (folders.input, folders.workflow, _EXAMPLES)]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _load_image(host: NodeContext, *, image: str) -> tuple:
    return media.load_image(find_image(host.folders, image))


def _save_images(host: SavingContext, *, images: Value, filename_prefix: str) -> tuple:
    for image in images:
        path = media.free_path(host.folders.output, Path(filename_prefix).name, ".png")
        media.save_image(path, image, host.metadata)
        host.text(f"wrote {path}")
    return (images,)


def _save_animation(
    host: SavingContext, *, images: Value, filename_prefix: str, fps: float, lossless: bool, quality: int, method: str
) -> tuple:
    path = media.free_path(host.folders.output, Path(filename_prefix).name, ".webp")
    effort, prompt = _WEBP_EFFORT[method], host.metadata.get("prompt")
    media.save_animation(path, images, fps=fps, lossless=lossless, quality=quality, effort=effort, prompt=prompt)
    host.text(f"wrote {path}")
    return (images,)


def _create_video(host: NodeContext, *, images: Value, fps: float, bit_depth: int, audio: None) -> tuple[media.Video]:
    if bit_depth != 8:
        raise ValueError(f"CreateVideo: bit_depth is {bit_depth}; without ComfyUI it can only be 8.")
    return (media.Video(frames=images, frame_rate=media.exact_frame_rate(fps)),)


def _save_video(
    host: SavingContext, *, video: media.Video, filename_prefix: str, format: str, codec: str
) -> tuple[media.Video]:
    path = media.free_path(host.folders.output, Path(filename_prefix).name, ".mp4")
    media.save_video(path, video, metadata=host.metadata)
    host.text(f"wrote {path}")
    return (video,)


def _prefix(default: str) -> Input:
    return Input(
        name="filename_prefix", type="STRING", default=default, tooltip="Name of the file, without its ending."
    )


LOAD_IMAGE = Node(
    id="LoadImage",
    title="Load Image",
    category="image",
    description="Reads an image of the input folder.",
    inputs=(Input(name="image", type="STRING", tooltip="File in the input folder, or a path.", companion="upload"),),
    outputs=(Output(name="IMAGE", type="IMAGE"), Output(name="MASK", type="MASK")),
    run=_load_image,
)
SAVE_IMAGE = Node(
    id="SaveImage",
    title="Save Image",
    category="image",
    description="Writes each image as a PNG.",
    inputs=(_IMAGES, _prefix("ComfyUI")),
    outputs=(Output(name="images", type="IMAGE"),),
    run=_save_images,
    is_output=True,
)
PREVIEW_IMAGE = Node(
    id="PreviewImage",
    title="Preview Image",
    category="image",
    description="Writes each image as preview.png, instead of showing it on a page.",
    inputs=(_IMAGES,),
    outputs=(Output(name="images", type="IMAGE"),),
    run=partial(_save_images, filename_prefix="preview"),
    is_output=True,
)
SAVE_ANIMATION = Node(
    id="SaveAnimatedWEBP",
    title="Save Animated WEBP",
    category="image",
    description="Writes the images as one animated WebP.",
    inputs=(
        _IMAGES,
        _prefix("ComfyUI"),
        Input(name="fps", type="FLOAT", default=6.0, low=0.01, high=1000.0, tooltip="Frames per second."),
        Input(name="lossless", type="BOOLEAN", default=True, tooltip="Keep every pixel exactly."),
        Input(name="quality", type="INT", default=80, low=0, high=100, tooltip="Higher is better and larger."),
        Input(
            name="method",
            type="COMBO",
            default="default",
            options=tuple(_WEBP_EFFORT),
            tooltip="Compression effort: a slower method gives a smaller file.",
        ),
    ),
    outputs=(Output(name="images", type="IMAGE"),),
    run=_save_animation,
    is_output=True,
)
CREATE_VIDEO = Node(
    id="CreateVideo",
    title="Create Video",
    category="video",
    description="Joins images to a video.",
    inputs=(
        _IMAGES,
        Input(name="fps", type="FLOAT", default=30.0, low=1.0, high=120.0, tooltip="Frames per second."),
        Input(name="audio", type="AUDIO", optional=True, tooltip="Not supported without ComfyUI."),
        Input(
            name="bit_depth",
            type="INT",
            default=8,
            low=8,
            high=10,
            optional=True,
            tooltip="Only 8 is supported without ComfyUI.",
        ),
    ),
    outputs=(Output(name="VIDEO", type="VIDEO"),),
    run=_create_video,
)
SAVE_VIDEO = Node(
    id="SaveVideo",
    title="Save Video",
    category="video",
    description="Writes the video as H.264 in an MP4.",
    inputs=(
        _VIDEO,
        _prefix("video/ComfyUI"),
        Input(
            name="format",
            type="COMBO",
            default="auto",
            options=("auto", "mp4"),
            optional=True,
            tooltip="Only mp4 here.",
        ),
        Input(
            name="codec",
            type="COMBO",
            default="auto",
            options=("auto", "h264"),
            optional=True,
            tooltip="Only H.264 here.",
        ),
    ),
    outputs=(Output(name="video", type="VIDEO"),),
    run=_save_video,
    is_output=True,
)

NODES = (LOAD_IMAGE, SAVE_IMAGE, PREVIEW_IMAGE, SAVE_ANIMATION, CREATE_VIDEO, SAVE_VIDEO)
