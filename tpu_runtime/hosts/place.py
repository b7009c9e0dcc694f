"""Which of several hosts a process is: told by the environment or by the TPU's own machines. Imports no JAX."""

import functools
import os
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..line.trust import Address

VARIABLE = "COMFYUI_TPU_HOSTS"
# Instead of a place: the TPU's machines say it.
AUTO = "auto"
PORT = 8476
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_DEADLINE_S = 5.0
_EXAMPLE = "0/2@10.0.0.2:8476"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Process `process` of `count`; process 0 leads, and listens at `address` and at the port behind that."""

    process: int
    count: int
    address: Address

    @property
    def is_leader(self) -> bool:
        return self.process == 0

    @property
    def jax_address(self) -> str:
        """Where `jax.distributed` has its coordinator."""
        return str(replace(self.address, port=self.address.port + 1))

    def __str__(self) -> str:
        return f"{self.process}/{self.count}@{self.address}"


def parse(text: str) -> Place:
    """`PROCESS/COUNT@HOST:PORT`, or `auto`; ValueError for anything else."""
    if text.strip() == AUTO:
        return of_tpu()
    found = re.fullmatch(r"(\d+)/(\d+)@\[?([^\s/@\]]+)\]?:(\d+)", text.strip())
    if found is None:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be {AUTO}, or PROCESS/COUNT@HOST:PORT such as {_EXAMPLE}.")
    process, count, port = (int(found[group]) for group in (1, 2, 4))
    if not process < count:
        raise ValueError(f"{VARIABLE} is {text!r}; processes of {count} are 0 to {count - 1}.")
    if not 0 < port < 65535:
        raise ValueError(f"{VARIABLE} is {text!r}; the port must be 1 to 65534.")
    return Place(process=process, count=count, address=Address(host=found[3], port=port))


def from_environment() -> Place | None:
    """The place that `COMFYUI_TPU_HOSTS` gives; None where it is not set, or there is only one host."""
    text = os.environ.get(VARIABLE, "").strip()
    place = parse(text) if text else None
    return place if place and place.count > 1 else None


def _ask_metadata(name: str) -> str:
    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        return answer.read().decode()


@functools.cache
def of_tpu(environment: Mapping[str, str] | None = None, ask: Callable[[str], str] = _ask_metadata) -> Place:
    """As a TPU's machines are told: on GKE by variables, on Compute Engine by the metadata server (as JAX does it).
    Raises ValueError where neither says it.
    """
    given = os.environ if environment is None else environment
    names = given.get("TPU_PROCESS_ADDRESSES") or given.get("TPU_WORKER_HOSTNAMES")
    if names and given.get("TPU_WORKER_ID"):
        hosts, process = names.split(","), given["TPU_WORKER_ID"]
    else:
        try:
            hosts, process = ask("worker-network-endpoints").split(","), ask("agent-worker-number")
        except OSError as error:
            raise ValueError(
                f"The TPU's hosts are not known: neither TPU_WORKER_HOSTNAMES and TPU_WORKER_ID are set, nor does the "
                f"metadata server answer ({error}). Say which host this is: --coordinator HOST:PORT --process N --of M."
            ) from None
    first = hosts[0].strip()
    parts = first.split(":")  # a name, a name with a port, or name:id:address
    address = Address(host=parts[2] if len(parts) == 3 else parts[0], port=PORT)
    return Place(process=int(process), count=len(hosts), address=address)
