"""The command serve: runs stages for ComfyUI on another machine, through the node TPURemote."""

import argparse
import logging
import threading

from ..distributed.fleet.serve import Server, StageService
from ..distributed.rpc import auth
from .common_arguments import model_folders


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verb.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="address to listen at; default: 127.0.0.1; 0.0.0.0 admits other machines",
    )  # fmt: skip
    verb.add_argument(
        "--port",
        type=int,
        default=auth.DEFAULT_PORT,
        help=f"port to listen at; default: {auth.DEFAULT_PORT}; 0: a free one",
    )
    verb.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="DIR",
        help="a further folder of models, in addition to those of this machine's ComfyUI; repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    auth.ensure_token(print)
    with Server(options.host, options.port, StageService((*options.models, *model_folders()))) as server:
        address = auth.Address(host=server.host, port=server.port)
        print(f"Stages are served at {address}, the address for the node TPU Remote.", flush=True)
        threading.Event().wait()
    return 0
