"""Checks of the chips: devices on the bus, the processes that hold them, and variables that hide them from JAX."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

from ...tpu_runtime.engine.memory_advice import HBM_VARIABLE as HBM
from ...tpu_runtime.machine import device_access, fallbacks, pci
from ...tpu_runtime.machine import record as machine_record
from ...tpu_runtime.model_spec import split_guidance_first
from ...tpu_runtime.monitor import metrics_service
from ...tpu_runtime.units import GIB, format_size
from .machine import Finding, Findings, HostMachine

# JAX waits for all hosts of a slice; on one it takes some ten seconds.
START_S = 300
_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
HUGEPAGES = "sys/kernel/mm/transparent_hugepage/enabled"
LOCK = "tmp/libtpu_lockfile"
# VM images with a driver, from Google's list of TPU software versions; on others chips have no device files.
VM_IMAGES = {
    "v4": "tpu-ubuntu2204-base", "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e",
}  # fmt: skip
DMA_ENTRIES = "sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
# The kernel's default of 65535 mappings was exhausted in public reports of v5e and newer.
MIN_LOCKED_BYTES, MIN_DMA_ENTRIES = 8 * GIB, 65536


def check_chips(machine: HostMachine) -> Findings:
    """Report the chips on the bus, their device files, and the mesh they would form."""
    chips, files = machine.chips, machine.device_files
    if chips is None and files:
        message = f"{len(files)} device files ({files[0].name}, ...), of unknown chips"
        yield Finding("devices", message, "pip install 'tpu-info>=0.14.2'")
        return
    if chips is None:
        counts = _SIMULATED.findall(machine.environ.get("XLA_FLAGS", ""))
        count = max(1, int(counts[-1])) if counts else 1
        yield Finding("devices", f"no TPU; programs run on the CPU, as {count} simulated chip{'s' * (count > 1)}")
    elif files:
        count = chips.num_devices
        yield Finding("devices", f"{chips}, {format_size(chips.hbm_bytes_per_chip)} each")
    else:
        count = chips.num_devices
        message = f"{chips} on the bus, but no device files (/dev/vfio/*, /dev/accel*)"
        yield Finding("devices", message, _without_files(chips.kind))
    yield Finding("mesh with guidance", str(split_guidance_first(count, 2)))
    yield Finding("mesh without guidance", str(split_guidance_first(count, 1)))


def _without_files(kind: str) -> str:
    """Name both causes of missing device files: a container without the devices, and a VM image without the driver."""
    image = f"--version={VM_IMAGES[kind]}" if kind in VM_IMAGES else "the image of its generation"
    return f"In a container: docker run --privileged ... On a VM: create it again with {image}, which has the driver"


def check_device_permissions(machine: HostMachine) -> Findings:
    """Check permissions for the device files that libtpu opens, and for its lock file in /tmp."""
    refused = " ".join(
        f"/{path.relative_to(machine.root)}" for path in machine.device_files if not machine.may_use(path)
    )
    if refused:
        yield Finding("device files", f"no permission to use {refused}", f"sudo chmod a+rw {refused}")
    lock = machine.root / LOCK
    if machine.device_files and lock.exists() and not machine.may_use(lock):
        message = f"/{LOCK} belongs to another user, so libtpu cannot lock it"
        yield Finding("libtpu's lock", message, f"sudo rm /{LOCK}")


def check_holders(machine: HostMachine) -> Findings:
    """Report the processes that hold the chips; only one at a time can."""
    if not machine.device_files:
        return
    memory, silent = "", ""
    try:
        usages = metrics_service.read_usage(metrics_service.metrics_ports(machine.environ))
        used, limit = (sum(getattr(usage, name) or 0 for usage in usages) for name in ("hbm_used", "hbm_limit"))
        memory = f", {format_size(used)} of {format_size(limit)} used" if limit else ""
    except metrics_service.MetricsUnavailable as error:
        silent = f"{error}: the process that holds the chips hangs, or is just starting"
    except ImportError:
        pass
    servers = {server.pid for server in machine.servers}
    processes = pci.find_holders(machine.root)
    for process in processes:
        label = f"{process.program}, process {process.pid}{memory}"
        if not machine.is_own(process.pid):
            # Root sees other users' processes, which this command must not end.
            yield Finding("TPU in use", f"by {label}, of another user", "Wait until it has ended, or ask its owner")
        elif process.pid in servers:
            # Not a fault, but the command line cannot use the chips meanwhile.
            yield Finding("TPU in use", f"by ComfyUI ({label}); for the command line: kill {process.pid}")
        else:
            yield Finding("TPU in use", f"by {label}", f"kill {process.pid}")
    if memory and not processes:
        remedy = "sudo lsof /dev/accel* /dev/vfio/* says which; wait until it has ended, or ask its owner"
        yield Finding("TPU in use", f"by a process of another user{memory}", remedy)
    if silent:
        yield Finding("TPU in use", silent)


def check_hugepages(machine: HostMachine) -> Findings:
    """Check the kernel's transparent huge pages, which libtpu needs."""
    pages = machine.text(HUGEPAGES)
    if machine.device_files and pages and "[always]" not in pages:
        message = "off: the TPU starts and ends slowly on v5e and newer"
        yield Finding("transparent hugepages", message, f"sudo sh -c 'echo always > /{HUGEPAGES}'", advice=True)


def check_locked_memory(machine: HostMachine) -> Findings:
    """Check the limits for pinning host memory: libtpu pins data that is transferred to and from the chips."""
    if not machine.device_files:
        return
    limit = machine.memlock_bytes()
    if limit is not None and limit < MIN_LOCKED_BYTES:
        message = f"{format_size(limit)} may be locked: large transfers to the chips may fail"
        remedy = "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1 ...)"
        yield Finding("locked memory", message, remedy, advice=True)
    entries = machine.text(DMA_ENTRIES).strip()
    if entries.isdigit() and int(entries) < MIN_DMA_ENTRIES:
        message = f"{entries} mappings for each chip: large transfers may fail"
        option = "options vfio_iommu_type1 dma_entry_limit=1000000"
        remedy = f"echo '{option}' | sudo tee /etc/modprobe.d/vfio.conf, then sudo reboot"
        yield Finding("mappings of vfio", message, remedy, advice=True)


# --- environment variables --------------------------------------------------------------------------------------------


def _excludes_tpu(machine: HostMachine, value: str) -> bool:
    return bool(machine.device_files) and "tpu" not in value


def _is_enabled(machine: HostMachine, value: str) -> bool:
    return value.lower() not in ("0", "false")


# By name: whether a value keeps a run from the TPU or breaks it, and the message.
_VARIABLES: dict[str, tuple[Callable[[HostMachine, str], object], str]] = {
    "JAX_PLATFORMS": (_excludes_tpu, "{}: the TPU is not used"),
    "JAX_PLATFORM_NAME": (_excludes_tpu, "{}: the TPU is not used"),
    "TPU_LIBRARY_PATH": (lambda machine, _: machine.device_files, "{}, instead of the tested libtpu"),
    "TPU_SKIP_MDS_QUERY": (
        lambda machine, _: machine.device_files and not machine.environ.get("TPU_ACCELERATOR_TYPE"),
        "set without TPU_ACCELERATOR_TYPE: libtpu cannot detect the slice",
    ),
    # Each of these two changes every program, and nothing was tested with it.
    "JAX_ENABLE_X64": (_is_enabled, "{}: never tested"),
    "JAX_DISABLE_JIT": (_is_enabled, "{}: never tested"),
    # With these values no network can be traced.
    "JAX_NUMPY_RANK_PROMOTION": (lambda _, value: value.lower() == "raise", "{}: JAX refuses the networks' operations"),
    "JAX_NUMPY_DTYPE_PROMOTION": (
        lambda _, value: value.lower() == "strict",
        "{}: JAX refuses the networks' operations",
    ),
}
_PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"


def check_variables(machine: HostMachine) -> Findings:
    """Report environment variables that break a run."""
    for name, (is_wrong, message) in _VARIABLES.items():
        if (value := machine.environ.get(name)) and is_wrong(machine, value):
            yield Finding(name, message.format(value), f"unset {name}")
    if precision := machine.environ.get(_PRECISION):
        effect = f"{precision}: changes products of bfloat16 programs, but for those in kernels"
        yield Finding(_PRECISION, effect, f"unset {_PRECISION}", advice=True)


def check_flags(machine: HostMachine) -> Findings:
    """Report libtpu's own flags in XLA's variable."""
    words = machine.environ.get("XLA_FLAGS", "").split()
    if libtpus := [word for word in words if word.startswith(("--xla_tpu_", "--xla_jf_", "--xla_sc_"))]:
        rest = " ".join(word for word in words if word not in libtpus)
        both = f"{machine.environ.get('LIBTPU_INIT_ARGS', '')} {' '.join(libtpus)}".strip()
        remedy = f"export XLA_FLAGS={shlex.quote(rest)} LIBTPU_INIT_ARGS={shlex.quote(both)}"
        yield Finding("XLA_FLAGS", f"{' '.join(libtpus)}: only libtpu knows these, and JAX aborts the process", remedy)


def check_memory_limit(machine: HostMachine) -> Findings:
    """Check the memory limit that the user has set."""
    if not (value := machine.environ.get(HBM)):
        return
    try:
        limit = float(value)
    except ValueError:
        yield Finding(HBM, f"{value!r} is not a number of GiB", f"unset {HBM}")
        return
    if (chips := machine.chips) and limit * GIB > (per_device := chips.hbm_bytes_per_chip // chips.devices_per_chip):
        message = f"{value} GiB, more than the {format_size(per_device)} of a {chips.kind}: runs end out of memory"
        yield Finding(HBM, message, f"unset {HBM}")


def check_fallbacks(machine: HostMachine) -> Findings:
    """Report what programs are compiled without: by the environment, and by results of earlier runs."""
    try:
        switched_off = fallbacks.fallbacks_from_environment(machine.environ)
    except ValueError as error:
        yield Finding("switches", str(error), f"unset {str(error).partition(':')[0]}")
    else:
        if switched_off:
            off = ", ".join((*switched_off.kernels.off, *switched_off.options))
            variables = f"unset {fallbacks.KERNELS_VARIABLE} {fallbacks.OPTIONS_VARIABLE}"
            yield Finding("switched off", f"{off}: results are unchanged, only slower", variables, advice=True)
    file = machine.cache / machine_record.NAME
    for key, record in machine_record.read_all(file).items():
        for sentence in record.sentences:
            yield Finding(
                "machine", f"{key}: {sentence}", f"to have it tried again: rm {shlex.quote(str(file))}", advice=True
            )
        if measured := ", ".join(_describe_measurements(record)):
            yield Finding("measured", f"{key}: {measured}")


def _describe_measurements(record: machine_record.MachineRecord) -> Iterator[str]:
    """Yield the measurements of a first run that programs use."""
    if record.reserve_share is not None:
        yield f"{100 * record.reserve_share:.0f} % of a chip's memory is left free"
    if record.compilers_behind is not None:
        yield f"{record.compilers_behind} compile in the background"
    if record.transfer_start_s is not None:
        yield f"a transfer between chips starts in {1e6 * record.transfer_start_s:.1f} us"
    if not record.keeps_programs:
        yield "compiled programs are not loaded from the disk"
    ways = {"to_chips": "to the chips", "from_chips": "from the chips"}
    yield from (f"{rate:.1f} GB/s {ways.get(name, name)}" for name, rate in record.rates.items())


# --- JAX --------------------------------------------------------------------------------------------------------------


def check_jax_start(machine: HostMachine) -> Findings:
    """Start JAX and report the outcome. It runs in its own process, which a wrong flag may abort."""
    program = "import jax, json; d = jax.devices(); print(json.dumps([len(d), d[0].device_kind, d[0].platform]))"
    command = [sys.executable, "-c", program]
    try:
        done = device_access.try_to_start(command, dict(machine.environ), START_S)
    except device_access.DevicesBusy as error:
        yield Finding("JAX", str(error), "comfyui-tpu doctor names the processes that it can see")
        return
    except subprocess.TimeoutExpired:
        remedy = "All hosts of a slice must start together; on one host: sudo reboot"
        yield Finding("JAX", f"did not start within {START_S} s", remedy)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("JAX", f"cannot start: {last}", "Fix the error above, then run again: comfyui-tpu doctor --start")
        return
    count, kind, platform = json.loads(done.stdout.strip().splitlines()[-1])
    is_idle = machine.device_files and platform != "tpu"
    remedy = "unset JAX_PLATFORMS; pip install 'jax[tpu]'" if is_idle else ""
    yield Finding("JAX", f"starts: {count} x {kind} ({platform})", remedy)
