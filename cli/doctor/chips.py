"""Checks of the chips: what is plugged in, who holds it, and what in the environment keeps JAX from it."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

from ...tpu_runtime.engine.memory_advice import VARIABLE as HBM
from ...tpu_runtime.monitor import bus, metrics_service
from ...tpu_runtime.units import GIB, readable
from .machine import Finding, Machine

# JAX waits for all hosts of a slice; on one it takes some ten seconds.
START_S = 300
_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
HUGEPAGES = "sys/kernel/mm/transparent_hugepage/enabled"
LOCK = "tmp/libtpu_lockfile"
# Each changes every program, and nothing was tested with it.
_UNTESTED = ("JAX_ENABLE_X64", "JAX_DISABLE_JIT")
# With these values no network can be traced.
_REFUSING = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
_PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"


def plugged_in(machine: Machine) -> Iterator[Finding]:
    """The chips on the bus, their device files, and the mesh they would make."""
    chips, files = machine.chips, machine.device_files
    if chips is None and not files:
        simulated = _simulated(machine)
        found = f"no TPU; programs run on the CPU, as {simulated} simulated chip{'s' if simulated > 1 else ''}"
        yield Finding(topic="devices", found=found)
        yield from _meshes(simulated)
    elif chips is None:
        found = f"{len(files)} device files ({files[0].name}, ...), of which chips is not known"
        yield Finding(topic="devices", found=found, remedy="pip install 'tpu-info>=0.14.2'")
    else:
        remedy = "" if files else "Give a container the chips: docker run --privileged ..."
        each = readable(chips.hbm_bytes_per_chip)
        missing = "" if files else " on the bus, but no device files (/dev/vfio/*, /dev/accel*)"
        yield Finding(topic="devices", found=f"{chips}{missing or f', {each} each'}", remedy=remedy)
        yield from _meshes(chips.num_devices)


def _simulated(machine: Machine) -> int:
    given = _SIMULATED.findall(machine.environ.get("XLA_FLAGS", ""))
    return max(1, int(given[-1])) if given else 1


def _meshes(num_devices: int) -> Iterator[Finding]:
    from ...tpu_runtime.spec import guidance_first

    for branches, when in ((2, "with guidance"), (1, "without guidance")):
        yield Finding(topic=f"mesh {when}", found=str(guidance_first(num_devices, branches)))


def rights(machine: Machine) -> Iterator[Finding]:
    """libtpu opens the device files, and locks a file in /tmp."""
    refused = [f"/{path.relative_to(machine.root)}" for path in machine.device_files if not machine.may_use(path)]
    if refused:
        files = " ".join(refused)
        yield Finding(topic="device files", found=f"no rights to {files}", remedy=f"sudo chmod a+rw {files}")
    lock = machine.root / LOCK
    if machine.device_files and lock.exists() and not machine.may_use(lock):
        found = f"/{LOCK} belongs to another user, so libtpu cannot lock it"
        yield Finding(topic="libtpu's lock", found=found, remedy=f"sudo rm /{LOCK}")


def holders(machine: Machine) -> Iterator[Finding]:
    """Only one process at a time can have the chips."""
    if not machine.device_files:
        return
    memory = ""
    reason = None
    try:
        usages = metrics_service.usage(metrics_service.ports(machine.environ))
        used, limit = (sum(getattr(each, name) or 0 for each in usages) for name in ("hbm_used", "hbm_limit"))
        memory = f", {readable(used)} of {readable(limit)} used" if limit else ""
    except (metrics_service.NotServed, metrics_service.NoAnswer, ImportError) as error:
        reason = error
    servers = {server.pid for server in machine.servers}
    found = bus.holders(machine.root)
    for holder in found:
        said = f"{holder.program}, process {holder.pid}{memory}"
        if holder.pid in servers:
            # Nothing is wrong; but who wants the command line to use the chips must know.
            yield Finding(topic="TPU in use", found=f"by ComfyUI ({said}); for the command line: kill {holder.pid}")
        else:
            yield Finding(topic="TPU in use", found=f"by {said}", remedy=f"kill {holder.pid}")
    if not found and memory:
        remedy = "sudo lsof /dev/accel* /dev/vfio/*, then sudo kill PID"
        yield Finding(topic="TPU in use", found=f"by a process of another user{memory}", remedy=remedy)
    if isinstance(reason, metrics_service.NoAnswer):
        yield Finding(topic="TPU in use", found=f"{reason}: whoever holds the chips may hang, or is just starting")


def host(machine: Machine) -> Iterator[Finding]:
    """What libtpu wants of the kernel."""
    pages = machine.text(HUGEPAGES)
    if machine.device_files and pages and "[always]" not in pages:
        found = "off: the TPU starts and ends slowly on v5e and newer"
        remedy = f"sudo sh -c 'echo always > /{HUGEPAGES}'"
        yield Finding(topic="transparent hugepages", found=found, remedy=remedy, advice=True)


def variables(machine: Machine) -> Iterator[Finding]:
    """Environment variables that break a run."""
    environ, has_tpu = machine.environ, bool(machine.device_files)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        if has_tpu and environ.get(name) and "tpu" not in environ[name]:
            yield Finding(topic=name, found=f"{environ[name]}: the TPU is not used", remedy=f"unset {name}")
    if has_tpu and (library := environ.get("TPU_LIBRARY_PATH")):
        found = f"{library}, in place of the tested libtpu"
        yield Finding(topic="TPU_LIBRARY_PATH", found=found, remedy="unset TPU_LIBRARY_PATH")
    if has_tpu and environ.get("TPU_SKIP_MDS_QUERY") and not environ.get("TPU_ACCELERATOR_TYPE"):
        found = "set without TPU_ACCELERATOR_TYPE: libtpu does not learn which slice this is"
        yield Finding(topic="TPU_SKIP_MDS_QUERY", found=found, remedy="unset TPU_SKIP_MDS_QUERY")
    words = environ.get("XLA_FLAGS", "").split()
    if libtpus := [word for word in words if word.startswith(("--xla_tpu_", "--xla_jf_", "--xla_sc_"))]:
        rest = " ".join(word for word in words if word not in libtpus)
        both = f"{environ.get('LIBTPU_INIT_ARGS', '')} {' '.join(libtpus)}".strip()
        remedy = f"export XLA_FLAGS={shlex.quote(rest)} LIBTPU_INIT_ARGS={shlex.quote(both)}"
        found = f"{' '.join(libtpus)}: only libtpu knows these, and JAX aborts the process"
        yield Finding(topic="XLA_FLAGS", found=found, remedy=remedy)
    for name in _UNTESTED:
        if environ.get(name, "").lower() not in ("", "0", "false"):
            yield Finding(topic=name, found=f"{environ[name]}: never tested", remedy=f"unset {name}")
    for name, value in _REFUSING.items():
        if environ.get(name, "").lower() == value:
            yield Finding(topic=name, found=f"{value}: JAX refuses what networks compute", remedy=f"unset {name}")
    if precision := environ.get(_PRECISION):
        found = f"{precision}: changes products of bfloat16 programs, but for those in kernels"
        yield Finding(topic=_PRECISION, found=found, remedy=f"unset {_PRECISION}", advice=True)
    yield from _budget(machine)


def _budget(machine: Machine) -> Iterator[Finding]:
    given = machine.environ.get(HBM)
    if not given:
        return
    try:
        wanted = float(given)
    except ValueError:
        yield Finding(topic=HBM, found=f"{given!r} is no number of GiB", remedy=f"unset {HBM}")
        return
    if chips := machine.chips:
        each = chips.hbm_bytes_per_chip // chips.devices_per_chip
        if wanted * GIB > each:
            found = f"{given} GiB, more than the {readable(each)} of a {chips.kind}: runs end out of memory"
            yield Finding(topic=HBM, found=found, remedy=f"unset {HBM}")


def start(machine: Machine) -> Iterator[Finding]:
    """What JAX says when it starts the chips: in a process of its own, which a wrong flag may abort."""
    program = "import jax, json; d = jax.devices(); print(json.dumps([len(d), d[0].device_kind, d[0].platform]))"
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, env=dict(machine.environ))
    except subprocess.TimeoutExpired:
        remedy = "All hosts of a slice must start together; on one host: sudo reboot"
        yield Finding(topic="JAX", found=f"did not start within {START_S} s", remedy=remedy)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        remedy = "Mend what is named above, then again: comfyui-tpu doctor --start"
        yield Finding(topic="JAX", found=f"cannot start: {last}", remedy=remedy)
        return
    count, kind, platform = json.loads(done.stdout.strip().splitlines()[-1])
    is_idle = bool(machine.device_files) and platform != "tpu"
    remedy = "unset JAX_PLATFORMS; pip install 'jax[tpu]'" if is_idle else ""
    yield Finding(topic="JAX", found=f"starts: {count} x {kind} ({platform})", remedy=remedy)
