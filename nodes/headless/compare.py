"""One workflow in several qualities, its results side by side: what a quality costs, on one's own prompt."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...tpu_runtime.pipeline import QUALITIES, media, spec_for_family
from ..declare import Folders
from ..graphs.graph import Workflow, models
from .runner import HEADLESS, TerminalHost, run_workflow

QUALITY = "quality"
DEFAULT = ",".join(QUALITIES[:2])  # which every model has
MOST_DB = 99.0


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The results of one quality: frames `[number, height, width, 3]` in 0..1 by the node that saves them, and with
    their rate where they are a video. `seconds` are the samplers', with what they compiled.
    """

    quality: str
    frames: Mapping[str, Any]
    rates: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one result from the first quality's: PSNR in dB over all frames, and of the frame that is least alike."""

    node_id: str
    quality: str
    psnr: float
    least_psnr: float


def check_qualities(text: str) -> tuple[str, ...]:
    """The qualities that a command names, with commas between; ValueError for fewer than two, or an unknown one."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for quality in found:
        if quality not in QUALITIES:
            raise ValueError(f"--quality is {quality!r}; it must be one of {', '.join(QUALITIES)}.")
    if len(found) < 2:
        raise ValueError(f"--quality is {text!r}; name two or more to compare, such as {DEFAULT}.")
    return found


def with_quality(workflow: Workflow, quality: str) -> Workflow:
    """A copy in which every sampler and loader has this quality; ValueError where no sampler is, or one lacks it."""
    changed = copy.deepcopy(workflow)
    known = {
        node_id: HEADLESS[node["class_type"]] for node_id, node in changed.items() if node["class_type"] in HEADLESS
    }
    asked = [node_id for node_id, node in known.items() if any(i.name == QUALITY for i in node.inputs)]
    if not any(known[node_id].family for node_id in asked):
        raise ValueError("The workflow has no TPU sampler or pipeline, whose quality could be compared.")
    for node_id in asked:
        if family := known[node_id].family:
            spec_for_family(family).check_input(QUALITY, quality)
        changed[node_id]["inputs"][QUALITY] = quality
    return changed


def render(workflow: Workflow, qualities: Sequence[str], folders: Folders) -> Iterator[Rendered]:
    """The workflow's results in each quality; files of single results go into a folder of each."""
    copies = [with_quality(workflow, quality) for quality in qualities]
    for quality, copied in zip(qualities, copies, strict=True):  # a family's models do not all have the same
        for model in models(copied, folders, HEADLESS):
            model.spec.check_input(QUALITY, quality)
    for quality, copied in zip(qualities, copies, strict=True):
        host = TerminalHost(replace(folders, output=folders.output / quality))
        found = run_workflow(copied, host)
        first = {node_id: outputs[0] for node_id, outputs in found.items() if outputs}
        videos = {node_id: one for node_id, one in first.items() if isinstance(one, media.Video)}
        pictures = {node_id: one for node_id, one in first.items() if getattr(one, "ndim", 0) == 4}
        yield Rendered(
            quality=quality,
            frames={**pictures, **{node_id: video.frames for node_id, video in videos.items()}},
            rates={node_id: video.frame_rate for node_id, video in videos.items()},
            seconds=sum(timing.elapsed_s for timing in host.timings if "Sampler" in timing.title),
        )


def differences(rendered: Sequence[Rendered]) -> Iterator[Difference]:
    """Each result's distance from the first quality's."""
    reference, *others = rendered
    for other in others:
        for node_id, wanted in reference.frames.items():
            errors = [_error(*pair) for pair in zip(other.frames[node_id], wanted, strict=True)]
            whole, least = _decibels(sum(errors) / len(errors)), _decibels(max(errors))
            yield Difference(node_id=node_id, quality=other.quality, psnr=whole, least_psnr=least)


def psnr(one: Any, other: Any) -> float:
    """Of pictures in 0..1, arrays or tensors, in dB; at most 99."""
    return _decibels(_error(one, other))


def _error(one: Any, other: Any) -> float:
    return float(np.mean(np.square(np.asarray(one, np.float64) - np.asarray(other, np.float64))))


def _decibels(error: float) -> float:
    return min(MOST_DB, -10 * math.log10(max(error, 1e-12)))


def save_side_by_side(rendered: Sequence[Rendered], folder: Path) -> list[Path]:
    """Every result of all qualities beside each other, under their names: a video, or a picture for each."""
    paths, names = [], [one.quality for one in rendered]
    for node_id in rendered[0].frames:
        joined = media.side_by_side([one.frames[node_id] for one in rendered], names)
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
