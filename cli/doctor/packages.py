"""Checks of the packages: versions against those that were run, builds that do not fit, the same files from two."""

import importlib.metadata
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from .machine import Finding, Machine

TORCH_PIP = "pip install --force-reinstall --no-deps --index-url"
# Small, and used by other packs' monitors on any machine.
_HARMLESS = frozenset({"nvidia-ml-py"})
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


def versions_here(machine: Machine) -> Iterator[Finding]:
    """What the pack needs, against the versions it was run with, in this environment."""
    if find_spec("packaging") is None:
        yield Finding(topic="packaging", found="not installed", remedy="pip install packaging")
        return
    from ...tpu_runtime import versions

    installed = {package.name: package.installed for package in versions.packages()}
    for topic, found, remedy in compared(installed, has_tpu=bool(machine.device_files)):
        yield Finding(topic=topic, found=found, remedy=remedy)


def compared(installed: Mapping[str, str | None], *, has_tpu: bool) -> Iterator[tuple[str, str, str]]:
    """Package, what there is of it, and the command that brings a version that was run."""
    from ...tpu_runtime import versions

    for package in versions.packages():
        found = installed.get(package.name)
        if found is None and package.name == "libtpu" and not has_tpu:
            yield package.name, "not installed; needed only on a TPU machine", ""
        elif found is None:
            yield package.name, "not installed", package.command
        elif not package.range.contains(found, prereleases=True):
            yield package.name, f"{found}; tested with {package.range}", package.command
        else:
            yield package.name, found, ""


def builds(machine: Machine) -> Iterator[Finding]:
    """PyTorch for a GPU works, but brings gigabytes that a TPU machine cannot use, and slows every start."""
    if find_spec("packaging") is None:
        return
    installed = machine.packages
    local = installed.get("torch", "").partition("+")[2]
    extra = sorted(name for name in installed if name.startswith("nvidia-") and name not in _HARMLESS)
    if "torch" in installed and (local.startswith(("cu", "rocm", "xpu")) or extra):
        from ...tpu_runtime import versions

        (pin,) = (each for each in versions.requirements(versions.ROOT / "constraints.txt") if each.name == "torch")
        remove = f"pip uninstall -y {' '.join(extra)}; " if extra else ""
        beside = f" with {len(extra)} nvidia packages" if extra else ""
        yield Finding(
            topic="PyTorch's build",
            found=f"{installed['torch']}, a GPU build{beside}",
            remedy=f"{remove}{TORCH_PIP} {versions.TORCH_INDEX} {pin}",
        )


def companions(machine: Machine) -> Iterator[Finding]:
    """ComfyUI imports torchvision and torchaudio, which load with the very torch they were built for."""
    if find_spec("packaging") is None:
        return
    from packaging.requirements import Requirement

    torch = machine.packages.get("torch")
    for name in ("torchvision", "torchaudio"):
        if torch is None or name not in machine.packages:
            continue
        wanted = [Requirement(line) for line in _requires(name)]
        asked = next((each for each in wanted if each.name == "torch" and each.specifier), None)
        if asked and not asked.specifier.contains(torch, prereleases=True):
            from ...tpu_runtime import versions

            found = f"{machine.packages[name]}, built for torch{asked.specifier}; torch is {torch}"
            remedy = f"pip install --upgrade --index-url {versions.TORCH_INDEX} torch=={torch.partition('+')[0]} {name}"
            yield Finding(topic=name, found=found, remedy=remedy)


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def twice(machine: Machine) -> Iterator[Finding]:
    """Packages that put files into the same folder as those we need: the last installed wins."""
    for other, ours in (("libtpu-nightly", "libtpu"), ("jax-nightly", "jax")):
        if other in machine.packages:
            remedy = f"pip uninstall -y {other} && pip install --force-reinstall --no-deps {ours}"
            if version := machine.packages.get(ours):
                remedy += f"=={version}"
            yield Finding(topic=other, found=f"{machine.packages[other]}, in the folder of {ours}", remedy=remedy)


def tokenizer(machine: Machine) -> Iterator[Finding]:
    """Whether sentencepiece lives in one process with protobuf. In a process of its own, which may abort."""
    if "sentencepiece" not in machine.packages or "protobuf" not in machine.packages:
        return
    command = [sys.executable, "-c", _TOKENIZE]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(machine.environ))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else last
        found = f"sentencepiece {machine.packages['sentencepiece']} fails beside protobuf "
        found += f"{machine.packages['protobuf']}: {how}"
        pins = shlex.join(["-c", str(machine.pack / "constraints.txt")])
        remedy = f"pip install --force-reinstall --no-deps {pins} sentencepiece protobuf"
        yield Finding(topic="tokenizers", found=found, remedy=remedy)
