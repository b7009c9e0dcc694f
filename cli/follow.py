"""`comfyui-tpu follow`: joins a further host to one engine; on the first host it keeps the leading command running."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from ..distributed.multihost import rank as places
from ..distributed.multihost import supervisor
from ..distributed.multihost.coordinator import RESTART_EXIT_CODE
from ..distributed.multihost.rank import HostRank
from ..distributed.rpc import auth
from ..tpu_runtime import api
from ..tpu_runtime.monitor import host_stats, snapshot

_DESCRIPTION = """\
Joins this host's chips to those of the first host and runs its share of the
work. If a host is lost, all hosts restart. On a TPU with several hosts it needs
no arguments. Run the same command on all hosts, with the leading command after
`--`: it runs on the first host, and the others follow.\
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verb.description = _DESCRIPTION
    verb.add_argument("--coordinator", metavar="HOST:PORT", help="the first host; it listens there, and one port above")
    verb.add_argument("--process", type=int, metavar="N", help="number of this host, from 0; 0 leads")
    verb.add_argument("--of", type=int, metavar="M", help="number of hosts")
    verb.add_argument("--once", action="store_true", help="end when a host is lost, for a supervisor that restarts it")
    verb.add_argument(
        "leads", nargs="*", metavar="COMMAND", help="on the first host: the leading command, such as ComfyUI"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from ..distributed.rpc.connection import HandshakeRejected

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    place = _place(options)
    environment = {places.VARIABLE: str(place)}
    if place.is_leader:
        if not options.leads:
            raise ValueError(
                "This host is the first of its TPU: ComfyUI or a command leads here. Give it after `--`, such as "
                "comfyui-tpu follow -- comfyui-tpu run WORKFLOW.json."
            )
        auth.ensure_token(print)
        return supervisor.supervise(options.leads, environment)
    auth.read_token()  # raises without a token: waiting would not create one
    if not options.once:
        # Each attempt needs its own process: JAX joins a slice once.
        end = sys.orig_argv.index("follow") + 1
        return supervisor.supervise(
            [sys.executable, *sys.orig_argv[1:end], "--once", *sys.orig_argv[end:]], environment, always=True
        )
    try:
        api.follow_leader(place, _chips())
    except HandshakeRejected as error:
        print(f"comfyui-tpu: {error}", file=sys.stderr, flush=True)
        return RESTART_EXIT_CODE  # it may fit after an update
    return 0


def _chips() -> Callable[[Any], list[dict[str, Any]]]:
    """Return the function that reads this host's chips for the monitor."""
    sampler = host_stats.Sampler()
    return lambda engine: sampler.complete(
        {"platform": engine.devices[0].platform, "chips": snapshot.local_chips(engine)}
    )["chips"]


def _place(options: argparse.Namespace) -> HostRank:
    """Return this host's place from the options, else the environment, else the TPU's metadata."""
    values = (options.coordinator, options.process, options.of)
    if all(value is not None for value in values):
        return places.parse_rank(f"{options.process}/{options.of}@{options.coordinator}")
    if any(value is not None for value in values):
        raise ValueError("--coordinator, --process and --of go together; a TPU of several hosts needs none of them.")
    return places.parse_rank(os.environ.get(places.VARIABLE, places.AUTO))
