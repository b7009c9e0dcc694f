"""The command serve: stages for ComfyUI on another machine, by the node TPURemote."""

import argparse
import logging
import os

from ..fleet.serve import LOOPBACK, Server, Stages
from ..tpu_runtime.pipeline import wire
from .verbs import model_folders


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--host", default=LOOPBACK[0], metavar="ADDRESS",
        help=f"where it listens ({LOOPBACK[0]}); others than this machine need a token in {wire.VARIABLE}",
    )  # fmt: skip
    verb.add_argument("--port", type=int, default=wire.DEFAULT_PORT, help=f"({wire.DEFAULT_PORT}); 0 is a free one")
    verb.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder that holds models, besides those of the ComfyUI of this machine; repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stages = Stages((*options.models, *model_folders()))
    with Server(options.host, options.port, stages, os.environ.get(wire.VARIABLE, "").strip()) as server:
        host, port = server.server_address[:2]
        print(f"Stages are served at {host}:{port}, the address for the node TPU Remote.", flush=True)
        server.serve_forever()
    return 0
