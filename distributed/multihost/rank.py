"""The rank of a process among several hosts, from the environment or from the TPU's metadata. Imports no JAX."""

import functools
import os
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...tpu_runtime.messages import compose
from ..rpc.auth import Address

VARIABLE = "COMFYUI_TPU_HOSTS"
# Instead of a rank: read it from the TPU's environment.
AUTO = "auto"
PORT = 8476
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_DEADLINE_S = 5.0
_EXAMPLE = "0/2@10.0.0.2:8476"


@dataclass(frozen=True, kw_only=True)
class HostRank:
    """The rank `process` of `count`. Process 0 is the leader; it listens at `address` and at the next port."""

    process: int
    count: int
    address: Address

    @property
    def is_leader(self) -> bool:
        return self.process == 0

    @property
    def jax_address(self) -> str:
        """Return the address of the coordinator of `jax.distributed`."""
        return str(replace(self.address, port=self.address.port + 1))

    def __str__(self) -> str:
        return f"{self.process}/{self.count}@{self.address}"


def parse_rank(text: str) -> HostRank:
    """Parse `PROCESS/COUNT@HOST:PORT`, or `auto`. Raises ValueError for anything else."""
    if text.strip() == AUTO:
        return detect_rank()
    match = re.fullmatch(r"(\d+)/(\d+)@\[?([^\s/@\]]+)\]?:(\d+)", text.strip())
    if match is None:
        raise ValueError(
            compose("multihost.rank_malformed", variable=VARIABLE, text=repr(text), auto=AUTO, example=_EXAMPLE)
        )
    process, count, port = (int(match[group]) for group in (1, 2, 4))
    if not process < count:
        raise ValueError(compose(
            "multihost.process_outside", variable=VARIABLE, text=repr(text), count=count, last_process=count - 1,
        ))  # fmt: skip
    if not 0 < port < 65535:
        raise ValueError(compose("multihost.port_outside", variable=VARIABLE, text=repr(text)))
    return HostRank(process=process, count=count, address=Address(host=match[3], port=port))


def rank_from_environment() -> HostRank | None:
    """Return the rank in `COMFYUI_TPU_HOSTS`; None if it is not set, or if there is only one host."""
    text = os.environ.get(VARIABLE, "").strip()
    place = parse_rank(text) if text else None
    return place if place and place.count > 1 else None


def _ask_metadata(name: str) -> str:
    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        return answer.read().decode()


@functools.cache
def detect_rank(environment: Mapping[str, str] | None = None, ask: Callable[[str], str] = _ask_metadata) -> HostRank:
    """Detect the rank as JAX does: on GKE from variables, on Compute Engine from the metadata server.

    environment: None: that of this process. ask: returns an attribute of the metadata server.
    Raises ValueError if neither is available.
    """
    variables = os.environ if environment is None else environment
    names = variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES")
    if names and variables.get("TPU_WORKER_ID"):
        hosts, process = names.split(","), variables["TPU_WORKER_ID"]
    else:
        try:
            hosts, process = ask("worker-network-endpoints").split(","), ask("agent-worker-number")
        except OSError as error:
            raise ValueError(compose("multihost.hosts_unknown", error=error)) from None
    first = hosts[0].strip()
    fields = first.split(":")  # a name, a name with a port, or name:id:address
    address = Address(host=fields[2] if len(fields) == 3 else fields[0], port=PORT)
    return HostRank(process=int(process), count=len(hosts), address=address)
