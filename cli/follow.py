"""`comfyui-tpu follow`: a further host of one engine; on the first host it keeps what leads running."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from ..tpu_runtime import pipeline
from ..tpu_runtime.pipeline import RESTART, Place, places, readings, snapshot, supervisor, trust

_DESCRIPTION = """\
Joins this host's chips to those of the first host, and does its part of what
runs there. When one host is gone, all start again. On a TPU of several hosts
it needs no arguments. The same command on all of them, with what leads behind
`--`, runs that on the first and follows on the others.\
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.description = _DESCRIPTION
    verb.add_argument("--coordinator", metavar="HOST:PORT", help="the first host; it listens there, and one port above")
    verb.add_argument("--process", type=int, metavar="N", help="which host this is, from 0; 0 leads")
    verb.add_argument("--of", type=int, metavar="M", help="how many hosts there are")
    verb.add_argument("--once", action="store_true", help="end when a host is gone: something else starts it again")
    verb.add_argument("leads", nargs="*", metavar="COMMAND", help="on the first host: what leads, such as ComfyUI")


def run(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    place = _place(options)
    environment = {places.VARIABLE: str(place)}
    if place.is_leader:
        if not options.leads:
            raise ValueError(
                "This host is the first of its TPU: ComfyUI or a command leads here. Give it behind `--`, such as "
                "comfyui-tpu follow -- comfyui-tpu run WORKFLOW.json."
            )
        trust.make_token(print)
        return supervisor.keep(options.leads, environment)
    trust.token()  # a sentence where there is none: waiting would bring none
    if not options.once:
        # The same command again, in a process of its own: JAX joins a slice once.
        at = sys.orig_argv.index("follow") + 1
        return supervisor.keep(
            [sys.executable, *sys.orig_argv[1:at], "--once", *sys.orig_argv[at:]], environment, always=True
        )
    try:
        pipeline.follow(place, _chips())
    except pipeline.Refused as error:
        print(f"comfyui-tpu: {error}", file=sys.stderr, flush=True)
        return RESTART  # it may fit after an update
    return 0


def _chips() -> Callable[[Any], list[dict[str, Any]]]:
    """What the monitor shows of this host's chips."""
    sampler = readings.Sampler()
    return lambda engine: sampler.complete(
        {"platform": engine.devices[0].platform, "chips": snapshot.own_chips(engine)}
    )["chips"]


def _place(options: argparse.Namespace) -> Place:
    """By the options, else the environment, else the TPU's own machines."""
    given = (options.coordinator, options.process, options.of)
    if all(one is not None for one in given):
        return places.parse(f"{options.process}/{options.of}@{options.coordinator}")
    if any(one is not None for one in given):
        raise ValueError("--coordinator, --process and --of go together; a TPU of several hosts needs none of them.")
    return places.parse(os.environ.get(places.VARIABLE, places.AUTO))
