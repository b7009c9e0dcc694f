"""What libtpu says, in the process that holds the chips, to others on the machine: memory and duty cycle by gRPC.

The messages are tpu-info's. Its own client waits for ever, and reads one port only.
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


class NotServed(RuntimeError):
    """Nobody listens: as a rule, because no process holds the chips."""


class NoAnswer(RuntimeError):
    """Somebody listens and says nothing in time, or nothing that we understand; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What is known of one of JAX's devices: bytes, bytes, percent. `device_id` is libtpu's, and may begin anywhere."""

    device_id: int
    hbm_used: int | None
    hbm_limit: int | None
    duty_cycle: float | None


def ports(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Where to ask."""
    given = [int(word) for word in environ.get(PORTS, "").split(",") if word.strip().isdigit()]
    return given or [PORT]


def usage(asked: Iterable[int], deadline_s: float = DEADLINE_S) -> list[Usage]:
    """Every device that the services at these ports know, by id. Raises `NotServed` and `NoAnswer`, and ImportError
    without tpu-info. Takes `deadline_s` in all."""
    until = time.monotonic() + deadline_s
    found, reason = [], None
    for port in asked:
        try:
            found += _of(port, until)
        except NotServed as missing:
            reason = missing
    if reason and not found:
        raise reason
    return sorted(found, key=lambda each: each.device_id)


def _of(port: int, until: float) -> list[Usage]:
    try:
        # Before gRPC is imported, which most processes never need: does anybody listen?
        socket.create_connection(("localhost", port), timeout=_left(until)).close()
    except TimeoutError:
        raise NoAnswer(f"the metrics service at localhost:{port} does not answer") from None
    except OSError:
        raise NotServed(f"no metrics service at localhost:{port}") from None
    import grpc
    from tpu_info.proto import tpu_metric_service_pb2 as messages
    from tpu_info.proto import tpu_metric_service_pb2_grpc as services

    with grpc.secure_channel(f"localhost:{port}", grpc.local_channel_credentials(), _OPTIONS) as channel:
        ask = services.RuntimeMetricServiceStub(channel).GetRuntimeMetric
        asked = {
            field: ask.future(messages.MetricRequest(metric_name=name), timeout=_left(until))
            for field, name in METRICS.items()
        }
        try:
            answers = {field: _by_device(future.result()) for field, future in asked.items()}
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            said = "does not answer" if code == grpc.StatusCode.DEADLINE_EXCEEDED else f"answers {code}"
            raise NoAnswer(f"the metrics service at localhost:{port} {said}") from None
    return _usages(answers)


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())


def _by_device(answer: Any) -> dict[int, float]:
    """The numbers of one metric by the device they are of."""
    numbers = {}
    for metric in answer.metric.metrics:
        value = metric.gauge.WhichOneof("value")
        if value in ("as_int", "as_double"):
            numbers[metric.attribute.value.int_attr] = getattr(metric.gauge, value)
    return numbers


def _usages(answers: Mapping[str, Mapping[int, float]]) -> list[Usage]:
    """Memory is told for every device, duty cycle for every chip: that of a chip of two devices counts for both."""
    ids = sorted({*answers["hbm_used"], *answers["hbm_limit"]})
    duty = [answers["duty_cycle"][one] for one in sorted(answers["duty_cycle"])]
    each = len(ids) // len(duty) if duty and len(ids) % len(duty) == 0 else 0
    used, limit = answers["hbm_used"], answers["hbm_limit"]
    return [
        Usage(
            device_id=one,
            hbm_used=int(used[one]) if one in used else None,
            hbm_limit=int(limit[one]) if one in limit else None,
            duty_cycle=duty[place // each] if each else None,
        )
        for place, one in enumerate(ids)
    ]
