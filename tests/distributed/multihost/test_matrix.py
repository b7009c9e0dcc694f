"""Every family over two and four hosts, and everything that can end badly in every stage: `pytest -m recorded -s`, by
hand. What it prints is in docs/LOG.md.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from comfyui_tpu.tests.support import hosts
from comfyui_tpu.tests.support.citizen import Listener
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, tiny_workflow
from comfyui_tpu.tests.support.hosts import Hosts
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs import upstream_network
from safetensors.torch import save_file

pytestmark = pytest.mark.recorded

FAMILIES = ("Wan21", "Wan22I2V", "HunyuanVideo15", "Flux2", "ZImage", "QwenImage", "CogVideoX")
MODELS = [spec_for_family(family).name for family in FAMILIES]
WAN = spec_for_family("Wan21").name
# A unit of each stage that may be interrupted: weights, steps, decoded chunks.
PLACES = {"load": ["denoise", "MiB"], "step": ["denoise", "step"], "decode": ["decode", "chunk"]}
PACK = Path(__file__).parents[3]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["ended"] == other["ended"] == "done" and all(
        one[name] == other[name] for name in ("text", "latents", "frames")
    )


def test_hosts_match_one_process_for_every_family(tmp_path: Path, cache: Path):
    """Of four chips: one process with four, two with two each, four with one each."""
    requests: dict[str, dict[str, Any]] = {
        **{model: {"model": model} for model in MODELS},
        "a LoRA": {"model": WAN, "loras": [lora(tmp_path)]},
        # The second expert's program has another mesh.
        "an expert without guidance": {"model": MODELS[1], "sizes": {"guidance_scale_2": 1.0}},
    }
    with hosts.alone(tmp_path, cache, chips=4) as one:
        wanted = {name: one.ask(**request) for name, request in requests.items()}
    assert not same(wanted[WAN], wanted["a LoRA"])
    others: list[tuple[str, int]] = []
    for count in (2, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        with hosts.running(folder, cache, count=count, chips=4 // count) as several:
            for name, request in requests.items():
                found = several.lead.ask(**request)
                is_same = same(found, wanted[name])
                print(f"{name}: {count} hosts of {4 // count} chips, {'equal' if is_same else 'OTHER'}: {found}")
                others += [] if is_same else [(name, count)]
    assert not others


def lora(folder: Path) -> str:
    """A file that changes two weights of the miniature."""
    random, path = torch.Generator().manual_seed(3), folder / "lora.safetensors"
    config = lookup_spec(WAN).component("transformer").tiny
    width = config["num_attention_heads"] * config["attention_head_dim"]
    tensors = {}
    for name in ("blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0"):
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(4, width, generator=random)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(width, 4, generator=random)
    save_file(tensors, path)
    return str(path)


def run_until_place(several: Hosts, place: str, frames: int) -> None:
    """A run that has got as far as `place`, with nothing loaded before it."""
    several.lead.ask(free=True)
    several.lead.send(model=WAN, steps=60 if place == "step" else 2, sizes={"num_frames": frames})
    while several.lead.next("step")["step"] != PLACES[place]:
        pass


def wait_for_lost_host_error(several: Hosts) -> tuple[str, float]:
    """What the user is told of a host that is gone, and after how long."""
    began = time.monotonic()
    said = several.lead.next("ended", "ready", within_s=hosts.ENDS_S)
    seconds = time.monotonic() - began
    if "ready" not in said:
        several.lead.next("ready")
    return said.get("sentence") or several.lead.texts()[-1], seconds


def test_hosts_recover_from_cancel_and_lost_host_in_every_stage(tmp_path: Path, cache: Path):
    frames = 33
    with hosts.running(tmp_path, cache, count=2, chips=1) as two:
        first = two.lead.ask(model=WAN, sizes={"num_frames": frames})
        assert first["ended"] == "done", first
        for place, where in PLACES.items():
            two.lead.ask(free=True)
            found = two.lead.ask(model=WAN, sizes={"num_frames": frames}, cancel=where)
            print(f"cancel in {place}: {found}")
            assert found["ended"] == "Cancelled"
            assert same(two.lead.ask(model=WAN, sizes={"num_frames": frames}), first)
        for place in PLACES:
            for how in (signal.SIGKILL, signal.SIGSTOP) if place == "step" else (signal.SIGKILL,):
                run_until_place(two, place, frames)
                follower = two.at_work(1)
                follower.send_signal(how)
                sentence, seconds = wait_for_lost_host_error(two)
                print(f"{how.name} in {place}, told after {seconds:.1f} s: {sentence}")
                assert sentence.startswith("Host 1 (127.0.0.1) was lost (") and seconds < hosts.ENDS_S
                if how == signal.SIGSTOP:
                    follower.kill()
                began = time.monotonic()
                again = two.lead.ask(model=WAN, sizes={"num_frames": frames})
                print(f"  the next prompt after {time.monotonic() - began:.1f} s: {again}")
                assert same(again, first)


def test_leader_reports_late_or_mismatched_follower(tmp_path: Path, cache: Path):
    other = tmp_path / "other" / "comfyui_tpu"
    shutil.copytree(PACK, other, ignore=shutil.ignore_patterns(".git", "docs", "web", "examples", "__pycache__"))
    with (other / "sharding" / "mesh.py").open("a") as file:
        file.write("# another version\n")
    with hosts.running(tmp_path, cache, count=2, chips=1, late=True) as two:
        missing = two.lead.ask(model=WAN)
        print(f"no follower: {missing}")
        assert missing["sentence"].startswith("This TPU has 2 hosts, and host 1 of 2 did not connect within 45 s.")
        assert missing["seconds"] < hosts.ENDS_S
        two.follow(1, PYTHONPATH=str(other.parent))
        hosts.until(lambda: "cannot join: its versions differ" in two.log(1).read_text())
        refused = two.lead.ask(model=WAN)
        print(f"another version: {refused}")
        assert refused["sentence"].startswith("Host 1 (127.0.0.1) cannot join: its versions differ (the pack's")
        assert refused["seconds"] < hosts.ENDS_S
        two.followers[1].terminate()
        two.followers[1].wait()
        two.lead.send(model=WAN)
        two.lead.next("text")
        time.sleep(3)
        two.follow(1)
        done = two.lead.next("ended")
        print(f"late, but in time: {done}")
        assert done["ended"] == "done"


def test_host_process_loads_only_local_shards_of_checkpoint(tmp_path: Path, cache: Path, monkeypatch):
    # What is free goes back to the kernel at once: glibc would keep some hundred MB that loading and compiling freed.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, str(2**20))
    spec = lookup_spec(WAN)
    component = spec.component("transformer")
    folder = tmp_path / "large"
    shutil.copytree(tiny.ensure_random(spec), folder)
    shutil.rmtree(folder / component.folder)
    large = {**component.tiny, "num_attention_heads": 16, "attention_head_dim": 128, "ffn_dim": 8192, "num_layers": 8}
    module = upstream_network.construct_upstream(component, large)
    size = sum(x.numel() * x.element_size() for x in module.state_dict().values())
    module.save_pretrained(folder / component.folder, max_shard_size="500MB")
    del module
    with hosts.running(tmp_path, cache, count=2, chips=2) as two:
        assert two.lead.ask(model=WAN)["ended"] == "done"  # libraries, encoder, tracing
        before = memory(two)
        assert two.lead.ask(model=WAN, id=str(folder), cancel=["denoise", "step"])["ended"] == "Cancelled"
        after = memory(two)
        grown = [end - start for start, end in zip(before, after, strict=True)]
        chips = two.lead.ask(stats=True)["chips"]
    print(json.dumps({"checkpoint_bytes": size, "grown_bytes": grown, "chips": [chip["hbm_used"] for chip in chips]}))
    assert all(part < 0.6 * size for part in grown)


def memory(several: Hosts) -> list[int]:
    """Bytes of their own that leader and follower hold; pages of files are the kernel's."""
    follower = several.at_work(1).memory_info()
    return [several.lead.ask(stats=True)["memory"], follower.rss - follower.shared]


@needs_comfyui
def test_comfyui_leads_follower_and_restarts_after_loss(
    start_comfyui: Callable[..., Server], tmp_path: Path, cache: Path
):
    port, environment = hosts.free_port(), {"XLA_FLAGS": hosts.flags(2), "COMFYUI_TPU_CACHE": str(cache)}
    place = {"COMFYUI_TPU_HOSTS": f"0/2@127.0.0.1:{port}", "COMFYUI_TPU_SUPERVISED": "1"}
    server = start_comfyui(environment={**environment, **place}, arguments=("--preview-method", "auto"))
    with (tmp_path / "follower.log").open("w") as log:
        follower = subprocess.Popen(
            hosts.follow_command(port, 1, 2), env={**os.environ, **environment}, stdout=log, stderr=log
        )

    def held() -> list[int]:
        return [chip["hbm_used"] for chip in server.get("/tpu/stats")["chips"]]

    try:
        with Listener(server) as client:
            entry = client.finish(client.queue(tiny_workflow("first", num_inference_steps=3)))
            assert entry["status"]["status_str"] == "success", server.log_tail()
            print(f"previews: {[picture.size for picture in client.pictures()]}; {client.texts()[-3:]}")
            assert client.pictures()
            hosts.until(lambda: len(held()) == 4 and min(held()) > 100_000)
            print(f"held on the chips of both: {held()}")
            server.post("/free", {"unload_models": True, "free_memory": True})
            hosts.until(lambda: max(held()) == 0)
            print(f"after unloading: {held()}")
            server.run(tiny_workflow("second", seed=5))
            client.forget()
            client.queue(tiny_workflow("third", num_inference_steps=100, seed=6))
            hosts.until(lambda: any(data["max"] == 100 and data["value"] > 3 for data in client.values("progress")))
            began = time.monotonic()
            psutil.Process(follower.pid).children()[0].kill()
            hosts.until(lambda: client.values("execution_error"))
            (error,) = client.values("execution_error")
            print(f"after {time.monotonic() - began:.1f} s the page says: {error['exception_message']}")
            assert error["exception_message"].startswith("Host 1 (127.0.0.1) was lost (")
            assert server.process is not None and server.process.wait(hosts.ENDS_S) == 75
        server.start()
        server.run(tiny_workflow("fourth", seed=7))
        print("the next prompt ran")
    finally:
        follower.terminate()
        follower.wait()
