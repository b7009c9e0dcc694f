"""What libtpu says, in the process that holds the chips, to others on the machine: memory and duty cycle by gRPC.

The messages are tpu-info's. Its own client (0.14.2) has no deadline, asks one port, goes through a proxy that is set
for the network, and fails where a metric is known of some devices only.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PORT = 8431
# libtpu's own variable: a port for each process where several share the chips.
PORTS = "TPU_RUNTIME_METRICS_PORTS"
DEADLINE_S = 1.0
METRICS = {
    "hbm_used": "tpu.runtime.hbm.memory.usage.bytes",
    "hbm_limit": "tpu.runtime.hbm.memory.total.bytes",
    "duty_cycle": "tpu.runtime.tensorcore.dutycycle.percent",
}
# A proxy is for the network, not for this machine.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


class NoAnswer(RuntimeError):
    """Somebody listens and says nothing in time, or nothing that we understand; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What is known of one of JAX's devices: bytes, bytes, percent."""

    hbm_used: int | None
    hbm_limit: int | None
    duty_cycle: float | None


def ports(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Where to ask."""
    given = [int(word) for word in environ.get(PORTS, "").split(",") if word.strip().isdigit()]
    return given or [PORT]


def usage(asked: Iterable[int], deadline_s: float = DEADLINE_S) -> list[Usage]:
    """Every device that the services at these ports know, by libtpu's ids, which may begin anywhere. Empty where nobody
    listens: as a rule no process holds the chips. Raises `NoAnswer`, and ImportError without tpu-info. Takes
    `deadline_s` in all.
    """
    until = time.monotonic() + deadline_s
    found = {}
    for port in asked:
        if _is_served(port, until):
            found |= _of(port, until)
    return [found[one] for one in sorted(found)]


def _is_served(port: int, until: float) -> bool:
    """Whether anybody listens: before gRPC is imported, which most processes never need."""
    try:
        socket.create_connection(("localhost", port), timeout=_left(until)).close()
    except TimeoutError:
        raise NoAnswer(f"the metrics service at localhost:{port} does not answer") from None
    except OSError:
        return False
    return True


def _of(port: int, until: float) -> dict[tuple[int, int], Usage]:
    """The devices of one service, by their ids and its port."""
    import grpc
    from tpu_info.proto import tpu_metric_service_pb2 as messages
    from tpu_info.proto import tpu_metric_service_pb2_grpc as services

    with grpc.secure_channel(f"localhost:{port}", grpc.local_channel_credentials(), _OPTIONS) as channel:
        ask = services.RuntimeMetricServiceStub(channel).GetRuntimeMetric
        asked = [
            ask.future(messages.MetricRequest(metric_name=name), timeout=_left(until)) for name in METRICS.values()
        ]
        try:
            used, limit, duty = (_by_device(future.result()) for future in asked)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            said = "does not answer" if code == grpc.StatusCode.DEADLINE_EXCEEDED else f"answers {code}"
            raise NoAnswer(f"the metrics service at localhost:{port} {said}") from None
    ids = sorted({*used, *limit})
    # Memory is told for every device, duty cycle for every chip: that of a chip of two devices counts for both. Of idle
    # chips no duty cycle is told.
    cycles = [duty[one] for one in sorted(duty)] or [0.0] * len(ids)
    each = len(ids) // len(cycles) if cycles and len(ids) % len(cycles) == 0 else 0
    return {
        (one, port): Usage(
            hbm_used=used.get(one), hbm_limit=limit.get(one), duty_cycle=cycles[place // each] if each else None
        )
        for place, one in enumerate(ids)
    }


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())


def _by_device(answer: Any) -> dict[int, Any]:
    """The numbers of one metric by the device they are of."""
    numbers = {}
    for metric in answer.metric.metrics:
        value = metric.gauge.WhichOneof("value")
        if value in ("as_int", "as_double"):
            numbers[metric.attribute.value.int_attr] = getattr(metric.gauge, value)
    return numbers
