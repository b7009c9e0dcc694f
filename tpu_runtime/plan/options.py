"""The options of `comfyui-tpu plan`. Imports no JAX, so that the command line starts at once."""

import argparse
from pathlib import Path

from .. import models
from ..model_spec import QUALITIES, STAGES
from ..precision import CHOICES

DEFAULT_TOPOLOGY = "v6e:2x4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `comfyui-tpu plan`."""
    names = "; ".join(spec.name for spec in models.SPECS)
    model = parser.add_mutually_exclusive_group(required=True)
    text = f"{names}; or a file of the denoiser"
    model.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)
    model.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help="the same")
    parser.add_argument("--models", action="append", default=[], metavar="DIR", help="where the file is looked for")
    parser.add_argument("--topology", default=DEFAULT_TOPOLOGY, metavar="NAME", help=f"default {DEFAULT_TOPOLOGY}")
    for name, kind in (("height", int), ("width", int), ("num-frames", int), ("steps", int), ("guidance", float)):
        parser.add_argument(f"--{name}", type=kind, help="default: the model's")
    parser.add_argument("--guidance-2", type=float, help="of the second expert; default: --guidance, or the model's")
    parser.add_argument("--step-cache", action="store_true", help="with steps that start from what others kept")
    parser.add_argument("--cache-threshold", type=float, help="MagCache's; 0: DeepCache; default: the model's")
    parser.add_argument("--quality", choices=QUALITIES, help=f"default: {QUALITIES[0]}")
    parser.add_argument("--precision", choices=CHOICES[1:], default="bfloat16", help="mixed: pictures in float32")
    parser.add_argument("--mesh", metavar="DP,SP,TP", help="the denoiser's mesh; default: what the runtime chooses")
    parser.add_argument("--stages", default=",".join(STAGES), metavar="A,B", help=f"default {','.join(STAGES)}")
    parser.add_argument("--explain", action="store_true", help="list the dearest operations and their sources")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
