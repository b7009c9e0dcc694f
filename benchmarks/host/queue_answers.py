"""Measure how long a server's page waits while long prompts and untrusted files are queued: the slowest answer of each.

Run: python benchmarks/host/queue_answers.py [--repeats 5], on an otherwise idle machine. It starts its own server, runs
a prompt, and queues cases that once froze the page: a UMT5 encoder in GGUF, samplers with prompts of 88 kB and 1 MiB, a
file of 4000 described layers, and a config of 5 MiB. Prints a table; its first line is for an idle server.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from comfyui_tpu.tests.support import faults
from comfyui_tpu.tests.support.citizen import workflow
from comfyui_tpu.tests.support.comfyui_server import PACK, Server, prepare, tiny_workflow

MIB = 2**20
# As many tokens as UMT5 has, each with a score and a kind.
TOKENS = 256_384


def umt5(path: Path) -> None:
    """The header of a UMT5 encoder in GGUF, with a tensor of no layer."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def field(name: bytes, kind: int, value: bytes) -> bytes:
        return text(name) + struct.pack("<I", kind) + value

    def listed(kind: int, values: bytes) -> bytes:
        return struct.pack("<IQ", kind, TOKENS) + values

    words = b"".join(text(b"\xe2\x96\x81word%d" % number) for number in range(TOKENS))
    fields = [
        field(b"general.architecture", 8, text(b"t5encoder")),
        field(b"tokenizer.ggml.tokens", 9, listed(8, words)),
        field(b"tokenizer.ggml.scores", 9, listed(6, bytes(4 * TOKENS))),
        field(b"tokenizer.ggml.token_type", 9, listed(5, bytes(4 * TOKENS))),
    ]
    tensor = text(b"token_embd.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)
    header = faults.gguf(1, len(fields), b"".join(fields) + tensor)
    path.write_bytes(header + bytes(-len(header) % 32 + 128))


def samplers(length: int) -> dict[str, Any]:
    """A prompt of so many bytes: a text, and samplers that all hang on it and on the one before."""
    graph = workflow("Wan21")
    (sampler,) = (name for name, node in graph.items() if node["class_type"] == "Wan21TPUSampler")
    inputs = {"model_id": "no such model"}
    for number in range(100):
        graph[f"more{number}"] = {"class_type": "Wan21TPUSampler", "inputs": {**graph[sampler]["inputs"], **inputs}}
    size = len(json.dumps(graph))
    for node in graph.values():
        node["inputs"] |= {"prompt": "a" * max(0, length - size)} if "prompt" in node["inputs"] else {}
    return graph


def of_file(path: Path) -> dict[str, Any]:
    loader = {"class_type": "TPUModelLoader", "inputs": {"model_id": str(path), "family": "Wan21"}}
    return {"1": loader, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}}


def worst(server: Server, prompts: Sequence[dict[str, Any]]) -> tuple[dict[str, float], float, int]:
    """Worst answers in ms by path while these are queued, the longest POST in s, and MiB that the server grew by."""
    command = [sys.executable, str(PACK / "benchmarks/host/answers.py"), server.url]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = psutil.Process(server.process.pid if server.process else None)
    time.sleep(1)
    before, taken = process.memory_info().rss, [0.0]
    for prompt in prompts:
        begun = time.monotonic()
        # With a workflow, in which what ran would be noted.
        server.post("/prompt", {"prompt": prompt, "extra_data": {"extra_pnginfo": {"workflow": {"extra": {}}}}})
        taken.append(time.monotonic() - begun)
        time.sleep(0.3)
    if not prompts:
        time.sleep(5)
    grown = process.memory_info().rss - before
    found = json.loads(watch.communicate()[0])
    return {one["path"]: one["worst_ms"] for one in found}, max(taken), round(grown / MIB)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The page's worst answers while hostile prompts are queued.")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="how often each is queued (5)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="a cache that is kept (default: a new one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        base = Path(folder)
        server = prepare(base, cache=options.cache)
        files = {"UMT5 in GGUF": base / "umt5.gguf", "4000 comfy_quant": base / "a", "config of 5 MiB": base / "b"}
        umt5(files["UMT5 in GGUF"])
        for name, stranger in (("4000 comfy_quant", "layers"), ("config of 5 MiB", "config of 5 MiB")):
            files[name] = base / f"{stranger}.safetensors"
            files[name].write_bytes(faults.STRANGERS[files[name].name]())
        cases: dict[str, list[dict[str, Any]]] = {"nothing": []}
        cases |= {name: [of_file(path)] * options.repeats for name, path in files.items()}
        cases |= {"prompt of 88 kB": [samplers(88_000)] * options.repeats}
        cases |= {"prompt of 1 MiB": [samplers(MIB)] * options.repeats}
        server.start()
        try:
            server.run(tiny_workflow("before"))  # what ran is noted, and looked for in later prompts
            print("| queued | worst GET /tpu/stats, ms | worst GET /, ms | longest POST /prompt, s | MiB grown |")
            print("|---|---|---|---|---|")
            for name, prompts in cases.items():
                answers, taken_s, grown_mib = worst(server, prompts)
                print(f"| {name} | {answers['/tpu/stats']:.0f} | {answers['/']:.0f} | {taken_s:.2f} | {grown_mib} |")
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
