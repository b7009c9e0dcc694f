"""Faults of a machine for tests of `comfyui-tpu doctor`: each changes a HostMachine without faults."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from comfyui_tpu.cli.doctor import HostMachine, chips

fake_tpu = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu", reason="no tpu-info: it is for Linux")

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


Harm = Callable[[HostMachine], HostMachine | None]


def env(**variables: str) -> Harm:
    return lambda machine: dataclasses.replace(machine, environ={**machine.environ, **variables})


def installed(**versions: str) -> Harm:
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return lambda machine: dataclasses.replace(machine, packages={**machine.packages, **names})


def server(machine: HostMachine, pid: int = 77, *opens: str, environ: Mapping[str, str] | None = None) -> None:
    """A ComfyUI that runs."""
    arguments = ("/venv/bin/python", "main.py", "--cpu")
    fake_tpu.process(machine.root, pid, *arguments, opens=opens, folder=machine.comfyui, environ=environ)


def listening(machine: HostMachine, inode: int = 5555, port: int = 8188) -> None:
    line = f"  0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"
    write(machine.root / "proc/net/tcp", f"header\n{line}")


def environment(machine: HostMachine, name: str = ".venv", minor: int = 11, **versions: str) -> Path:
    """An environment beside ComfyUI, with these packages alone."""
    site = machine.comfyui / name / f"lib/python3.{minor}/site-packages"
    for package, version in versions.items():
        write(site / f"{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")
    site.mkdir(parents=True, exist_ok=True)
    write(machine.comfyui / name / "bin/python", "")
    return machine.comfyui / name


# --- the faults: the check, what is done to a machine that is well, what is found, the command ------------------------


def bare(machine: HostMachine) -> None:
    shutil.rmtree(machine.root / "dev")


def unmapped(machine: HostMachine) -> None:
    shutil.rmtree(machine.root / "sys/bus")


def forbidden(machine: HostMachine) -> HostMachine:
    return dataclasses.replace(machine, may_use=lambda path: not path.name.endswith(("3", "lockfile")))


def locked(machine: HostMachine) -> HostMachine:
    write(machine.root / chips.LOCK, "")
    return dataclasses.replace(machine, may_use=lambda path: path.name != "libtpu_lockfile")


def held(machine: HostMachine) -> None:
    fake_tpu.process(machine.root, 42, "python3", "train.py", "--key=secret", opens=["/dev/vfio/0", "/dev/vfio/1"])


def slow_pages(machine: HostMachine) -> None:
    write(machine.root / chips.HUGEPAGES, "always [madvise] never\n")


def few_mappings(machine: HostMachine) -> None:
    write(machine.root / chips.DMA_ENTRIES, "65535\n")


def held_by_another(machine: HostMachine) -> HostMachine:
    held(machine)
    return dataclasses.replace(machine, uid=machine.uid + 1)


def halted(machine: HostMachine) -> None:
    said = {"kernels_off": ["convolution"], "sentences": ["decode halted the chips."]}
    write(machine.home / ".cache/comfyui-tpu/machine.json", json.dumps({"8 x TPU v6 lite": said}))


def unwritable(machine: HostMachine) -> HostMachine:
    machine = env(COMFYUI_TPU_CACHE=str(machine.home / "cache"))(machine)
    return dataclasses.replace(machine, is_writable=lambda path: path != machine.home)


def in_memory(machine: HostMachine) -> HostMachine:
    (machine.root / "dev/shm").mkdir()
    return env(HF_HOME=str(machine.root / "dev/shm"))(machine)


def full(machine: HostMachine) -> HostMachine:
    return dataclasses.replace(machine, free_bytes=lambda path: GIB)


def forgotten(machine: HostMachine) -> None:
    shutil.rmtree(machine.hub)


def too_small(machine: HostMachine) -> HostMachine:
    forgotten(machine)
    return dataclasses.replace(machine, free_bytes=lambda path: 10 * GIB)


def slow_disk(machine: HostMachine) -> HostMachine:
    weights(machine.hub / "models--Wan-AI--Wan2.1-T2V-14B-Diffusers/snapshots/a/vae/model.safetensors")
    return dataclasses.replace(machine, read_rate=lambda file: 0.1)


def weights(file: Path) -> Path:
    """A file that takes no disk."""
    write(file, "")
    os.truncate(file, 100 * 2**20)
    return file


def offline(machine: HostMachine) -> HostMachine:
    forgotten(machine)
    return env(HF_HUB_OFFLINE="1")(machine)


def no_token(machine: HostMachine) -> None:
    (machine.home / ".cache/huggingface/token").unlink()


def little_memory(machine: HostMachine) -> None:
    write(machine.root / "proc/meminfo", "MemAvailable:   3145728 kB\n")


def pip_conf(machine: HostMachine) -> None:
    write(machine.home / ".config/pip/pip.conf", "[global]\nbreak-system-packages = true\n")


def version(text: str, *, ours: bool = False) -> Harm:
    def harm(machine: HostMachine) -> None:
        file = machine.comfyui / "comfyui_version.py"
        write(file, f'__version__ = "{text}"\n') if text else file.unlink()
        if ours:
            write(machine.comfyui / ".comfyui-tpu/installed.json", "{}")

    return harm


def no_comfyui(machine: HostMachine) -> None:
    shutil.rmtree(machine.comfyui)


def demanding(machine: HostMachine) -> None:
    write(machine.comfyui / "requirements.txt", "transformers>=6\n")


def unlinked(machine: HostMachine) -> None:
    (machine.comfyui / "custom_nodes/ComfyUI-TPU").unlink()


def linked_twice(machine: HostMachine) -> None:
    (machine.comfyui / "custom_nodes/comfyui-tpu").symlink_to(machine.pack)


def copied_too(machine: HostMachine) -> None:
    write(machine.comfyui / "custom_nodes/Copy/pyproject.toml", '[project]\nname = "comfyui-tpu"\n')


def another(machine: HostMachine) -> None:
    unlinked(machine)
    copied_too(machine)


def dangling(machine: HostMachine) -> None:
    (machine.comfyui / "custom_nodes/Gone").symlink_to("/nowhere/at/all")


def old_pack(machine: HostMachine) -> None:
    text = (
        'NODE_CLASS_MAPPINGS = {\n    "Flux2TPUSampler": Flux2TPUSampler,\n    "Flux2TextEncoder": Flux2TextEncoder,\n}'
    )
    write(machine.comfyui / "custom_nodes/ComfyUI-FLUX.2-TPU/nodes.py", text)


def new_style(machine: HostMachine) -> None:
    write(machine.comfyui / "custom_nodes/wan.py", 'io.Schema(node_id="Wan21TPUSampler", inputs=[])')


def crystools(machine: HostMachine) -> None:
    text = "import tpu_info.device\nimport jax\nself.devices = jax.devices()"
    write(machine.comfyui / "custom_nodes/ComfyUI-Crystools/general/tpu.py", text)


def unmanaged(machine: HostMachine) -> None:
    shutil.rmtree(machine.comfyui / "custom_nodes/ComfyUI-Manager")


def broken(name: str) -> Harm:
    def harm(machine: HostMachine) -> None:
        python = environment(machine, name) / "bin/python"
        python.unlink()
        python.symlink_to("/usr/bin/python3.98")

    return harm


def old_python(machine: HostMachine) -> None:
    environment(machine, minor=10)


def unconstrained(machine: HostMachine) -> None:
    server(machine, environ={"HOME": "/home/me"})


def taken(machine: HostMachine) -> None:
    fake_tpu.process(machine.root, 88, "jupyter", "lab", opens=["socket:[5555]"])
    listening(machine)


def aborting(machine: HostMachine) -> HostMachine:
    write(machine.home / "python/sentencepiece.py", "import os; os.abort()")
    return env(PYTHONPATH=str(machine.home / "python"))(machine)
