"""A client of libtpu's metrics service: memory and duty cycle by gRPC from the process that holds the chips.

The messages are tpu-info's. Its own client (0.14.2) has no deadline, asks one port, uses the network's proxy, and fails
if a metric is known for some devices only.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PORT = 8431
# libtpu's own variable: a port for each process where several share the chips.
PORTS_VARIABLE = "TPU_RUNTIME_METRICS_PORTS"
DEADLINE_S = 1.0
METRICS = {
    "hbm_used": "tpu.runtime.hbm.memory.usage.bytes",
    "hbm_limit": "tpu.runtime.hbm.memory.total.bytes",
    "duty_cycle": "tpu.runtime.tensorcore.dutycycle.percent",
}
# Do not connect to this machine through the network's proxy.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


class MetricsUnavailable(RuntimeError):
    """A service listens but does not answer in time, or in an unknown format; the message says which."""


@dataclass(frozen=True, kw_only=True)
class DeviceUsage:
    """The usage of one JAX device; None where unknown."""

    hbm_used: int | None  # bytes
    hbm_limit: int | None  # bytes
    duty_cycle: float | None  # percent


def metrics_ports(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ports of the metrics services on this machine."""
    numbers = [int(word) for word in environ.get(PORTS_VARIABLE, "").split(",") if word.strip().isdigit()]
    return numbers or [PORT]


def read_usage(asked: Iterable[int], deadline_s: float = DEADLINE_S) -> list[DeviceUsage]:
    """Return the usage of every device of the services at the ports `asked`, sorted by libtpu's ids.

    The ids may start anywhere. Empty if nothing listens, which usually means that no process holds the chips. Raises
    NoAnswer, and ImportError without tpu-info. Takes at most `deadline_s` seconds in total.
    """
    until = time.monotonic() + deadline_s
    usages = {}
    for port in asked:
        if _is_served(port, until):
            usages |= _read_service(port, until)
    return [usages[device] for device in sorted(usages)]


def _is_served(port: int, until: float) -> bool:
    """Return whether anything listens at `port`, without importing gRPC, which most processes never need."""
    try:
        socket.create_connection(("localhost", port), timeout=_left(until)).close()
    except TimeoutError:
        raise MetricsUnavailable(f"the metrics service at localhost:{port} does not answer") from None
    except OSError:
        return False
    return True


def _read_service(port: int, until: float) -> dict[tuple[int, int], DeviceUsage]:
    """Return the devices of one service, by id and port."""
    import grpc
    from tpu_info.proto import tpu_metric_service_pb2 as messages
    from tpu_info.proto import tpu_metric_service_pb2_grpc as services

    with grpc.secure_channel(f"localhost:{port}", grpc.local_channel_credentials(), _OPTIONS) as channel:
        ask = services.RuntimeMetricServiceStub(channel).GetRuntimeMetric
        replies = [
            ask.future(messages.MetricRequest(metric_name=name), timeout=_left(until)) for name in METRICS.values()
        ]
        try:
            used, limit, duty = (_by_device(future.result()) for future in replies)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            problem = "does not answer" if code == grpc.StatusCode.DEADLINE_EXCEEDED else f"answers {code}"
            raise MetricsUnavailable(f"the metrics service at localhost:{port} {problem}") from None
    ids = sorted({*used, *limit})
    # Memory is reported per device, duty cycle per chip: a chip's value counts for each of its devices. Idle chips
    # report no duty cycle.
    cycles = [duty[chip] for chip in sorted(duty)] or [0.0] * len(ids)
    per_chip = len(ids) // len(cycles) if cycles and len(ids) % len(cycles) == 0 else 0
    return {
        (id, port): DeviceUsage(
            hbm_used=used.get(id), hbm_limit=limit.get(id), duty_cycle=cycles[place // per_chip] if per_chip else None
        )
        for place, id in enumerate(ids)
    }


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())


def _by_device(answer: Any) -> dict[int, Any]:
    """Return the values of one metric by device id."""
    numbers = {}
    for metric in answer.metric.metrics:
        value = metric.gauge.WhichOneof("value")
        if value in ("as_int", "as_double"):
            numbers[metric.attribute.value.int_attr] = getattr(metric.gauge, value)
    return numbers
