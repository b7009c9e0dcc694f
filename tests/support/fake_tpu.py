"""A machine with chips that is none: a bus, device files and processes as folders, and libtpu's metrics service."""

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from comfyui_tpu.tpu_runtime.monitor.metrics_service import METRICS
from tpu_info.proto import tpu_metric_service_pb2 as messages
from tpu_info.proto import tpu_metric_service_pb2_grpc as services

GIB = 2**30
# Vendor, device and subsystem of the PCI bus, and functions a chip.
IDS = {
    "v4": ("0x005e", "0x0050", 1),
    "v5e": ("0x0063", "0x0051", 1),
    "v5p": ("0x0062", "0x0052", 1),
    "v6e": ("0x006f", "0x0053", 1),
    "TPU7x": ("0x0076", "0x0054", 2),
}
VIRTUAL_NETWORK = ("0x0042", "0x0058", 1)


def plug(root: Path, kind: str, num_chips: int, *, files: bool = True) -> Path:
    """Chips on the bus below `root`, beside the network card that Google makes too and a disk of another maker's."""
    _device(root, "0000:00:01", "0x1ae0", *VIRTUAL_NETWORK)
    _device(root, "0000:00:02", "0x8086", *IDS["v6e"])
    (root / "sys/bus/pci/devices/0000:00:09.0").mkdir()  # nothing to be read
    for index in range(num_chips):
        _device(root, f"0000:{index:02x}:05", "0x1ae0", *IDS[kind])
        file = root / (f"dev/accel{index}" if kind == "v4" else f"dev/vfio/{index}")
        if files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return root


def _device(root: Path, slot: str, vendor: str, device: str, subsystem: str, num_functions: int) -> None:
    for function in range(num_functions):
        folder = root / f"sys/bus/pci/devices/{slot}.{function}"
        folder.mkdir(parents=True)
        for name, text in {"vendor": vendor, "device": device, "subsystem_device": subsystem}.items():
            (folder / name).write_text(f"{text}\n")


def process(
    root: Path,
    pid: int,
    *arguments: str,
    opens: Sequence[str] = (),
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """A process below `root` that has these files open."""
    own = root / f"proc/{pid}"
    (own / "fd").mkdir(parents=True)
    (own / "cmdline").write_text("".join(f"{each}\0" for each in arguments))
    (own / "environ").write_text("".join(f"{name}={text}\0" for name, text in (environ or {}).items()))
    (own / "cwd").symlink_to(folder or root)
    for number, target in enumerate(opens):
        (own / f"fd/{number}").symlink_to(target)


class Service(services.RuntimeMetricServiceServicer):
    """`num_devices` devices, the first with 1 GiB in use, the second with 2, of 31; ids begin at 8, as on a v6e."""

    def __init__(self, num_devices: int, num_chips: int) -> None:
        self.counts = {"hbm_used": num_devices, "hbm_limit": num_devices, "duty_cycle": num_chips}

    def GetRuntimeMetric(self, request: Any, context: Any) -> Any:
        (field,) = (field for field, name in METRICS.items() if name == request.metric_name)
        found = []
        for index in reversed(range(self.counts[field])):
            number = {"hbm_used": (index + 1) * GIB, "hbm_limit": 31 * GIB, "duty_cycle": 10.0 * index}[field]
            gauge = messages.Gauge(as_int=number) if isinstance(number, int) else messages.Gauge(as_double=number)
            attribute = messages.Attribute(key="device-id", value=messages.AttrValue(int_attr=8 + index))
            found.append(messages.Metric(attribute=attribute, gauge=gauge))
        return messages.MetricResponse(metric=messages.TPUMetric(name=request.metric_name, metrics=found))


@contextlib.contextmanager
def serving(num_devices: int, num_chips: int | None = None) -> Iterator[int]:
    """A metrics service; gives its port."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=3))
    chips = num_devices if num_chips is None else num_chips
    services.add_RuntimeMetricServiceServicer_to_server(Service(num_devices, chips), server)
    port = server.add_secure_port("localhost:0", grpc.local_server_credentials())
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port that accepts and never says a word."""
    with socket.create_server(("localhost", 0)) as listening:
        yield listening.getsockname()[1]


def closed() -> int:
    """A port where nobody listens, nor will: it stays bound."""
    bound = socket.socket()
    bound.bind(("localhost", 0))
    _BOUND.append(bound)
    return bound.getsockname()[1]


_BOUND: list[socket.socket] = []
