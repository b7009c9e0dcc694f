"""Runs one workflow in several qualities and shows the results side by side."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...tpu_runtime import media
from ...tpu_runtime.model_spec import COMMON_QUALITIES, QUALITIES
from ...tpu_runtime.models import spec_for_family
from ..declare import Folders, Value
from ..graphs.graph import Workflow, list_models
from .runner import HEADLESS_NODES, TerminalContext, run_workflow

QUALITY = "quality"
DEFAULT = ",".join(COMMON_QUALITIES)  # every model has these
MAX_PSNR_DB = 99.0


@dataclass(frozen=True, kw_only=True)
class QualityResult:
    """The results of one quality."""

    quality: str
    frames: Mapping[str, Value]  # [number, height, width, 3] in 0..1, by the node that saves them
    rates: Mapping[str, Value]  # frames per second of those that are videos, by the same nodes
    seconds: float  # of the samplers, compilation included


@dataclass(frozen=True, kw_only=True)
class PsnrComparison:
    """The difference of one result from that of the first quality."""

    node_id: str
    quality: str
    psnr: float  # dB, over all frames
    least_psnr: float  # dB, of the frame with the largest difference


def parse_qualities(text: str) -> tuple[str, ...]:
    """Return the comma-separated qualities of a command.

    Raises ValueError for fewer than two, or an unknown one.
    """
    qualities = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for quality in qualities:
        if quality not in QUALITIES:
            raise ValueError(f"--quality is {quality!r}; it must be one of {', '.join(QUALITIES)}.")
    if len(qualities) < 2:
        raise ValueError(f"--quality is {text!r}; name two or more to compare, such as {DEFAULT}.")
    return qualities


def set_quality(workflow: Workflow, quality: str) -> Workflow:
    """Return a copy of a workflow in which every sampler and loader has this quality.

    Raises ValueError if it has no sampler, or one does not support the quality.
    """
    changed = copy.deepcopy(workflow)
    known = {
        node_id: HEADLESS_NODES[node["class_type"]]
        for node_id, node in changed.items()
        if node["class_type"] in HEADLESS_NODES
    }
    nodes = [node_id for node_id, node in known.items() if any(i.name == QUALITY for i in node.inputs)]
    if not any(known[node_id].family for node_id in nodes):
        raise ValueError("The workflow has no TPU sampler or pipeline, whose quality could be compared.")
    for node_id in nodes:
        if family := known[node_id].family:
            spec_for_family(family).check_input(QUALITY, quality)
        changed[node_id]["inputs"][QUALITY] = quality
    return changed


def render_qualities(workflow: Workflow, qualities: Sequence[str], folders: Folders) -> Iterator[QualityResult]:
    """Run the workflow in each quality; each writes its files into a subfolder.

    workflow: in API format.
    qualities: the first is the reference.
    folders: where models and inputs are, and where results go.
    """
    copies = [set_quality(workflow, quality) for quality in qualities]
    for quality, copied in zip(qualities, copies, strict=True):  # models of a family may have different qualities
        for model in list_models(copied, folders, HEADLESS_NODES):
            model.spec.check_input(QUALITY, quality)
    for quality, copied in zip(qualities, copies, strict=True):
        host = TerminalContext(replace(folders, output=folders.output / quality))
        outputs_by_node = run_workflow(copied, host)
        first = {node_id: outputs[0] for node_id, outputs in outputs_by_node.items() if outputs}
        videos = {node_id: value for node_id, value in first.items() if isinstance(value, media.Video)}
        pictures = {node_id: value for node_id, value in first.items() if getattr(value, "ndim", 0) == 4}
        yield QualityResult(
            quality=quality,
            frames={**pictures, **{node_id: video.frames for node_id, video in videos.items()}},
            rates={node_id: video.frame_rate for node_id, video in videos.items()},
            seconds=sum(timing.elapsed_s for timing in host.timings if "Sampler" in timing.title),
        )


def compare_psnr(rendered: Sequence[QualityResult]) -> Iterator[PsnrComparison]:
    """Yield each result's difference from that of the first quality."""
    reference, *others = rendered
    for other in others:
        for node_id, expected in reference.frames.items():
            errors = [_error(*pair) for pair in zip(other.frames[node_id], expected, strict=True)]
            whole, least = _decibels(sum(errors) / len(errors)), _decibels(max(errors))
            yield PsnrComparison(node_id=node_id, quality=other.quality, psnr=whole, least_psnr=least)


def psnr(one: Value, other: Value) -> float:
    """Return the peak signal-to-noise ratio of two images `[..., 3]` in 0..1 in dB, at most 99."""
    return _decibels(_error(one, other))


def _error(one: Value, other: Value) -> float:
    return float(np.mean(np.square(np.asarray(one, np.float64) - np.asarray(other, np.float64))))


def _decibels(error: float) -> float:
    return min(MAX_PSNR_DB, -10 * math.log10(max(error, 1e-12)))


def save_side_by_side(rendered: Sequence[QualityResult], folder: Path) -> list[Path]:
    """Save every result with all qualities next to each other, labelled: as a video, or as one image per frame."""
    paths, names = [], [result.quality for result in rendered]
    for node_id in rendered[0].frames:
        joined = media.side_by_side([result.frames[node_id] for result in rendered], names)
        rate = rendered[0].rates.get(node_id)
        stem = f"compared_{node_id}" if len(rendered[0].frames) > 1 else "compared"
        if rate is not None:
            paths.append(media.free_path(folder, stem, ".mp4"))
            media.save_video(paths[-1], media.Video(frames=joined, frame_rate=rate))
            continue
        for picture in joined:
            paths.append(media.free_path(folder, stem, ".png"))
            media.save_image(paths[-1], picture)
    return paths
