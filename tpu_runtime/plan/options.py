"""The options of `comfyui-tpu plan`. Imports no JAX, so that the command line starts at once."""

import argparse
from pathlib import Path

from .. import models
from ..model_spec import QUALITIES, STAGES
from ..precision import CHOICES

DEFAULT_TOPOLOGY = "v6e:2x4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `comfyui-tpu plan`."""
    model = parser.add_mutually_exclusive_group(required=True)
    text = f"{models.NAME_HELP}; or a file of the denoiser"
    model.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)
    model.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help="the same")
    parser.add_argument(
        "--models", action="append", default=[], metavar="DIR", help="where the file is looked for; repeatable"
    )
    parser.add_argument(
        "--topology", default=DEFAULT_TOPOLOGY, metavar="NAME",
        help=f"the TPU: generation and mesh of chips, or their number (v6e-8); default: {DEFAULT_TOPOLOGY}",
    )  # fmt: skip
    for name, kind, what in (
        ("height", int, "pixels"), ("width", int, "pixels"), ("num-frames", int, "frames of the video"),
        ("steps", int, "denoising steps"), ("guidance", float, "how strongly the prompt is followed"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"{what}; default: the model's")
    parser.add_argument(
        "--guidance-2",
        type=float,
        metavar="N",
        help="guidance of the second expert; default: --guidance, or the model's",
    )
    parser.add_argument("--step-cache", action="store_true", help="with steps that start from what others kept")
    parser.add_argument(
        "--cache-threshold", type=float, metavar="N",
        help="how much error may add up before a step runs whole (MagCache); 0: DeepCache; default: the model's",
    )  # fmt: skip
    parser.add_argument("--quality", choices=QUALITIES, help=f"how exact the denoiser is; default: {QUALITIES[0]}")
    parser.add_argument(
        "--precision",
        choices=CHOICES[1:],
        default="bfloat16",
        help="number format; mixed: pictures in float32; default: bfloat16",
    )
    parser.add_argument(
        "--mesh",
        metavar="DP,SP,TP",
        help="chips by guidance, sequence and heads in the denoiser; default: what the runtime chooses",
    )
    parser.add_argument(
        "--stages", default=",".join(STAGES), metavar="A,B", help=f"which parts to compile; default: {','.join(STAGES)}"
    )
    parser.add_argument(
        "--explain", action="store_true", help="list the operations that take longest, and where they come from"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
