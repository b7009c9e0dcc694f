"""Faults that a prompt meets in a running server, and strangers' files and texts: what is done, and how it must end.

For `benchmarks/soak.py --faults`. A fault ends with a sentence about what is wrong, which is empty where all is well.
"""

import contextlib
import hashlib
import itertools
import json
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from .citizen import Listener, digest
from .comfyui_server import Server

MIB = 2**20
_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a prompt ended: with digests of its frames and of the files it saved, cancelled, refused or with an error."""

    digest: str = ""
    recorded: tuple[str, ...] = ()  # the prompts in the files
    is_cancelled: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a prompt meets a fault: `graph` as it runs without one, which gives `wanted`, and takes `alone_s`."""

    server: Server
    page: Listener
    dice: random.Random
    graph: dict[str, Any]
    wanted: str
    alone_s: float

    def run(self, graph: Mapping[str, Any] | None = None, meanwhile: Callable[[str], object] = lambda _: None) -> Ended:
        """Runs a prompt; at a random moment of it `meanwhile` is called with its id."""
        return run(self.page, self.server, dict(graph or self.graph), self._at_some_moment(meanwhile))

    def _at_some_moment(self, action: Callable[[str], object]) -> Callable[[str], object]:
        moment_s = self.dice.uniform(0, self.alone_s)
        return lambda prompt_id: (time.sleep(moment_s), action(prompt_id))

    def changed(self, **inputs: object) -> dict[str, Any]:
        """The graph with these values wherever a node has an input of that name; the model everywhere or nowhere."""
        graph = json.loads(json.dumps(self.graph))
        for node in graph.values():
            node["inputs"] |= {name: value for name, value in inputs.items() if name in node["inputs"]}
        return graph

    @contextlib.contextmanager
    def model(self) -> Iterator[Path]:
        """A copy of the prompt's built-in checkpoint, as a folder that a user downloaded."""
        (source,) = sorted((self.server.cache / "tiny").glob(f"{self._miniature}-*"))[:1]
        folder = self.server.base / "models" / "diffusers" / f"copy-{next(_NUMBERS)}"
        shutil.copytree(source, folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @property
    def _miniature(self) -> str:
        ids = {node["inputs"]["model_id"] for node in self.graph.values() if "model_id" in node["inputs"]}
        (model_id,) = ids
        return model_id.rpartition("random-")[2]


def run(
    page: Listener, server: Server, graph: dict[str, Any], meanwhile: Callable[[str], object] | None = None
) -> Ended:
    """Queues a prompt, calls `meanwhile` with its id in a thread, and waits for its end; ComfyUI forgets it."""
    answer = server.post("/prompt", {"prompt": graph, "client_id": page.client_id})
    if "prompt_id" not in answer or answer.get("node_errors"):
        return Ended(error=json.dumps(answer, ensure_ascii=False))
    thread = threading.Thread(target=meanwhile, args=(answer["prompt_id"],)) if meanwhile else None
    if thread:
        thread.start()
    entry = page.finish(answer["prompt_id"])
    page.forget()
    if thread:
        thread.join()
    server.post("/history", {"delete": [answer["prompt_id"]]})
    messages = dict(entry["status"]["messages"])
    if "execution_interrupted" in messages:
        return Ended(is_cancelled=True)
    if failure := messages.get("execution_error"):
        return Ended(error=failure["exception_message"])
    saved = list(_saved_files(server, entry))
    found = hashlib.sha256(b"".join(_pixels(path) for path in saved)).hexdigest()
    recorded = tuple(map(_prompt_of, saved))
    for path in saved:
        path.unlink()
    return Ended(digest=f"{digest(entry)} {found}", recorded=recorded)


def _saved_files(server: Server, entry: Mapping[str, Any]) -> Iterator[Path]:
    for node in entry["outputs"].values():
        for one in node.get("images", ()):
            yield server.base / "output" / one["subfolder"] / one["filename"]


def _pixels(path: Path) -> bytes:
    """An image's pixels; of a video the sizes of its frames alone, for ComfyUI lets x264 choose, which varies."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return np.asarray(image).tobytes()
    with av.open(str(path)) as video:
        return repr([(frame.width, frame.height) for frame in video.decode(video=0)]).encode()


def _prompt_of(path: Path) -> str:
    if path.suffix == ".png":
        with Image.open(path) as image:
            return image.text["prompt"]
    with av.open(str(path)) as video:
        return video.metadata["prompt"]


def _refusal_problem(ended: Ended, *words: str) -> str:
    """Of what must be refused in a sentence with one of these words in it."""
    if ended.error and any(word in ended.error for word in words):
        return ""
    return f"it must be refused with {' or '.join(map(repr, words))}: {_short(ended)}"


def _result_problem(ended: Ended, wanted: str, *, or_cancelled: bool = False, or_words: tuple[str, ...] = ()) -> str:
    if (ended.digest == wanted) or (or_cancelled and ended.is_cancelled):
        return ""
    if ended.error and any(word in ended.error for word in or_words):
        return ""
    return f"other frames than without a fault, or none: {_short(ended)}"


def _short(ended: Ended) -> str:
    return f"cancelled: {ended.is_cancelled}, frames: {ended.digest!r}, error: {ended.error[:600]}"


# --- the disk and the cache -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(folder: Path, size_bytes: int = 64 * 1024) -> Iterator[None]:
    """A small file system in the place of a folder, all of it taken. Needs a mount: root, or `unshare -rm`."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def _output_is_full(site: Site) -> str:
    folder = site.server.base / "output" / f"full-{next(_NUMBERS)}"
    with full_disk(folder):
        wrong = _refusal_problem(
            site.run(site.changed(filename_prefix=f"{folder.name}/x")), "No space left", "takes no more"
        )
    folder.rmdir()
    return wrong


def _cache_is_full(site: Site) -> str:
    graph = site.changed(prompt=f"a circle number {next(_NUMBERS)}")
    with contextlib.ExitStack() as stack:
        for kind in ("prompts", "compile_seconds"):
            stack.enter_context(full_disk(site.server.cache / kind))
        found = site.run(graph)
    return _result_problem(site.run(graph), found.digest or "no frames") or (found.error and _short(found))


def _cache_is_damaged(site: Site) -> str:
    cache = site.server.cache
    for path in [*(cache / "prompts").glob("*.bin"), *(cache / "compile_seconds").glob("*.bin")]:
        with contextlib.suppress(FileNotFoundError):
            _replace(path, path.read_bytes()[: site.dice.randrange(40)] + b"damaged")
    (cache / "machine.json").write_bytes(site.dice.choice([b"", b"{", b"[" * 5000, b"\xff" * 100, b'{"version": []}']))
    folder = next((cache / "tiny").glob(f"{site._miniature}-*"))
    weights = site.dice.choice(sorted(folder.rglob("*.safetensors")))
    if site.dice.random() < 0.5:
        weights.unlink()
    else:
        _replace(weights, weights.read_bytes()[: weights.stat().st_size // 2])
    site.server.post("/tpu/free", None)
    return _result_problem(site.run(), site.wanted)


def _replace(path: Path, content: bytes) -> None:
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_bytes(content)
    scratch.replace(path)


# --- while it runs ----------------------------------------------------------------------------------------------------


def _cancel_prompt(site: Site) -> str:
    stop = lambda prompt_id: site.server.post("/interrupt", {"prompt_id": prompt_id})  # noqa: E731
    return _result_problem(site.run(meanwhile=stop), site.wanted, or_cancelled=True)


def _free_everything(site: Site) -> str:
    def free(_: str) -> None:
        site.server.post("/tpu/free", None)
        site.server.post("/free", {"unload_models": True, "free_memory": True})
        site.server.get("/citizen/unload")

    return _result_problem(site.run(meanwhile=free), site.wanted)


def _weights_are(change: Callable[[Path], None]) -> Callable[[Site], str]:
    def meet(site: Site) -> str:
        with site.model() as folder:
            graph, path = site.changed(model_id=str(folder)), site.dice.choice(sorted(folder.rglob("*.safetensors")))
            words = (path.name, str(folder))
            wrong = _result_problem(site.run(graph, meanwhile=lambda _: change(path)), site.wanted, or_words=words)
            site.server.post("/tpu/free", None)
            return wrong or _refusal_problem(site.run(graph), *words)

    return meet


def _overwrite_file(path: Path) -> None:
    _replace(path, random.Random(0).randbytes(path.stat().st_size))


def _truncate_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


# --- of strangers -----------------------------------------------------------------------------------------------------


def gguf(tensors: int, fields: int, content: bytes) -> bytes:
    """A GGUF file that claims so many tensors and fields."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + content


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def safetensors(header: bytes, *, size: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def _layers(count: int) -> bytes:
    """A file of so many quantised layers, each with a description of its format."""
    said = json.dumps({"format": "float8_e4m3fn"}).encode()
    sizes = {
        "weight": ("F8_E4M3", [1, 1], 1),
        "weight_scale": ("F32", [], 4),
        "comfy_quant": ("U8", [len(said)], len(said)),
    }
    header, at = {}, 0
    for number in range(count):
        for name, (dtype, shape, size) in sizes.items():
            header[f"blocks.{number}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    return safetensors(json.dumps(header).encode(), data=(bytes(5) + said) * count)


def _safetensors_with_metadata(**metadata: str) -> bytes:
    header = {"__metadata__": metadata, "blocks.0.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    return safetensors(json.dumps(header).encode(), data=bytes(4))


STRANGERS: Mapping[str, Callable[[], bytes]] = {
    "tensors without end.gguf": lambda: gguf(2**40, 1, _text(b"a") + struct.pack("<IB", 0, 1)),
    "empty texts.gguf": lambda: gguf(
        0, 1, _text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2**19) + bytes(4 * MIB)
    ),
    "a list in lists.gguf": lambda: gguf(0, 1, _text(b"a") + struct.pack("<I", 9) * 500 + struct.pack("<IQ", 8, 1)),
    "longer than itself.safetensors": lambda: safetensors(b"{}", size=2**62),
    "nested.safetensors": lambda: safetensors(b'{"a":' * 50_000),
    "layers.safetensors": lambda: _layers(4000),
    "config of 5 MiB.safetensors": lambda: _safetensors_with_metadata(
        config='{"layers": [' + "[]," * (5 * MIB // 3) + "0]}"
    ),
    "escapes.safetensors": lambda: safetensors(
        json.dumps({"\x1b[2J\nblocks": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(), data=bytes(4)
    ),
}  # fmt: skip


def _file_is_hostile(site: Site) -> str:
    for name in site.dice.sample(sorted(STRANGERS), 3):
        path = site.server.base / "models" / "diffusion_models" / f"{next(_NUMBERS)} {name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(STRANGERS[name]())
        wrong = _refusal_problem(site.run(site.changed(model_id=str(path))), path.name)
        path.unlink()
        if wrong:
            return f"{name}: {wrong}"
    return ""


TEXTS = (
    'a ring bearer "Frodo"', 'bearer", "x": "\\', "\x1b[2J\x00\x7f\u202e \ud83d\ude00 %s {} \r\n &amp; <b>",
    "a red circle " * (MIB // 13), '"' * (MIB // 2),
)  # fmt: skip


def _text_is_hostile(site: Site) -> str:
    """Twice the same frames, and in the file the text as it was written."""
    graph = site.changed(prompt=site.dice.choice(TEXTS), filename_prefix=f"text-{next(_NUMBERS)}")
    first, second = site.run(graph), site.run(graph)
    for one in first.recorded:
        if json.loads(one) != graph:
            return f"the file holds another prompt: {one[:600]}"
    return _result_problem(second, first.digest) or (_short(first) if first.error else "")


def _tokenizer_is_hostile(site: Site) -> str:
    with site.model() as folder:
        path = folder / "tokenizer" / "tokenizer.json"
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": split}))
        wrong = _refusal_problem(site.run(site.changed(model_id=str(folder), prompt="a" * 60)), "regular expression")
        config = folder / "tokenizer" / "tokenizer_config.json"
        config.write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9}))
        return wrong or _refusal_problem(
            site.run(site.changed(model_id=str(folder), prompt="b" * 60)), "extra_ids", "tokenizer"
        )


FAULTS: Mapping[str, Callable[[Site], str]] = {
    "the output's disk is full": _output_is_full,
    "the cache's disk is full": _cache_is_full,
    "the cache is damaged": _cache_is_damaged,
    "it is cancelled": _cancel_prompt,
    "everything is freed": _free_everything,
    "its weights are replaced": _weights_are(_overwrite_file),
    "its weights are cut off": _weights_are(_truncate_file),
    "a stranger's file": _file_is_hostile,
    "a stranger's text": _text_is_hostile,
    "a stranger's tokenizer": _tokenizer_is_hostile,
}
