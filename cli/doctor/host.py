"""Checks of the host: clashing packages, folders, memory, the Hugging Face token, pip."""

import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ...tpu_runtime.cache import store
from ...tpu_runtime.units import GIB, format_size
from .disk import existing_folder
from .machine import Finding, Findings, HostMachine

# Compiling programs of real sizes needs two to four GiB of the host, more while other stages run.
RAM_BYTES = 8 * GIB
GATED = ("FLUX.2-dev", "FLUX.2-klein-9B")
# A vocabulary trained and loaded after protobuf: with some pairs of versions that ended in SIGABRT.
_TOKENIZE = """
import io
import google.protobuf.message
try:
    import tpu_info.proto.tpu_metric_service_pb2
except ImportError:
    pass
import sentencepiece
model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a b c a b", "hello world a b"] * 5), model_writer=model, vocab_size=20,
    hard_vocab_limit=False, minloglevel=9,
)
sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode("hello")
"""


def check_pack(machine: HostMachine) -> Findings:
    """Report this pack's version, the first question about any report."""
    yield Finding("comfyui-tpu", f"{machine.packages.get('comfyui-tpu', 'not installed as a package')}, {machine.pack}")


def check_python(machine: HostMachine) -> Findings:
    """Check that Python is a release: Ubuntu 22.04's python3.11 was once a release candidate."""
    message = f"{machine.python} on {platform.system()}"
    if re.search(r"(a|b|rc)\d", machine.python):
        remedy = "sudo apt install --only-upgrade python3.11, or a released Python from python.org; then install again"
        yield Finding("Python", f"{message}, which was never released", remedy, advice=True)
    else:
        yield Finding("Python", message)


def check_conflicting_packages(machine: HostMachine) -> Findings:
    """Report packages that install into the same folder as those we need; the last one installed wins."""
    for other, ours in (("libtpu-nightly", "libtpu"), ("jax-nightly", "jax")):
        if other in machine.packages:
            version = machine.packages.get(ours)
            requirement = f"{ours}=={version}" if version else ours
            remedy = f"pip uninstall -y {other} && pip install --force-reinstall --no-deps {requirement}"
            yield Finding(other, f"{machine.packages[other]}, in the folder of {ours}", remedy)


def check_tokenizer(machine: HostMachine) -> Findings:
    """Check that sentencepiece works in one process with protobuf, in a child process, which may abort."""
    sentencepiece, protobuf = (machine.packages.get(name) for name in ("sentencepiece", "protobuf"))
    if not sentencepiece or not protobuf:
        return
    command = [sys.executable, "-c", _TOKENIZE]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(machine.environ))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else last
        pins = shlex.quote(str(machine.pack / "constraints.txt"))
        remedy = f"pip install --force-reinstall --no-deps -c {pins} sentencepiece protobuf"
        yield Finding("tokenizers", f"sentencepiece {sentencepiece} fails with protobuf {protobuf}: {how}", remedy)


def check_caches(machine: HostMachine) -> Findings:
    """Check that the cache folders exist or can be created, are writable, and are on a disk."""
    programs = machine.path("JAX_COMPILATION_CACHE_DIR", machine.cache / "xla")
    folders = [(store.VARIABLE, "cache", machine.cache), ("HF_HOME", "downloads", machine.hub)]
    if machine.cache not in programs.parents:
        folders.append(("JAX_COMPILATION_CACHE_DIR", "compiled programs", programs))
    for name, topic, folder in folders:
        existing = existing_folder(folder)
        if not existing.is_dir() or not machine.is_writable(existing):
            remedy = f"unset {name}" if machine.environ.get(name) else f"export {name}=FOLDER, one that can be written"
            yield Finding(topic, f"{folder} cannot be written", remedy)
        elif machine.root / "dev/shm" in (folder, *folder.parents):
            message = f"{folder} is memory of the host, and empty after a restart"
            yield Finding(topic, message, f"unset {name} (look for it in ~/.bashrc)", advice=True)
        else:
            yield Finding(topic, f"{folder}{f', {format_size(_size_bytes(folder))}' if topic != 'downloads' else ''}")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_downloaded_models(machine: HostMachine) -> Findings:
    """Report the downloaded models."""
    yield Finding("downloaded models", f"{machine.hub}: {', '.join(machine.hub_models) or 'none'}")
    if machine.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on") and not machine.has_pack_models:
        yield Finding("HF_HUB_OFFLINE", "on, and no model of this pack is downloaded", "unset HF_HUB_OFFLINE")


def check_token(machine: HostMachine) -> Findings:
    """Report whether there is a token, never its value."""
    names = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if machine.environ.get(name, "").strip()]
    if names or machine.path("HF_TOKEN_PATH", machine.hf_home / "token").is_file():
        yield Finding("Hugging Face token", f"there ({names[0] if names else 'saved by hf auth login'})")
    else:
        message = f"none; only gated models need one ({', '.join(GATED)})"
        yield Finding("Hugging Face token", message, "hf auth login", advice=True)


def check_memory(machine: HostMachine) -> Findings:
    """Check the host's free memory. /dev/shm matters only if a cache is in it, which `caches` reports."""
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("proc/meminfo"), re.MULTILINE):
        available = 1024 * int(match[1])
        remedy = "ps aux --sort=-rss | head, then end processes that are not needed" if available < RAM_BYTES else ""
        needed = f"; compiling and loading may need {format_size(RAM_BYTES)}" if remedy else ""
        yield Finding("host memory", f"{format_size(available)} free{needed}", remedy, advice=True)


def check_pip(machine: HostMachine) -> Findings:
    """Report a line of the separate packs' installer that lets pip write into the system's Python."""
    for file in (machine.home / ".config/pip/pip.conf", machine.home / ".pip/pip.conf"):
        if file.is_file() and re.search(r"break-system-packages\s*=\s*(true|1)", file.read_text("utf-8", "replace")):
            remedy = "pip config --user unset global.break-system-packages"
            yield Finding("pip", f"{file} lets pip write into the system's Python", remedy, advice=True)
