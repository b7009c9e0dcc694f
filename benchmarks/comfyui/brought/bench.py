"""A ComfyUI server with this pack and tiny models, and the requests and results of the cases."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tests.browser.test_core_loaders import Miniatures
from comfyui_tpu.tests.comfyui.test_core_objects import SWAPS, wan_files
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.test_comfyui_encoders import UMT5
from comfyui_tpu.tests.support import comfyui_server
from safetensors.torch import load_file, save_file

# Relative L2 of images, of float32 networks on both sides.
BOUND = 1e-4
# A neighbour pack: it keeps images as numbers, gives lists, and loads core's own text encoder of a miniature.
ORACLE = """
    import importlib
    import json
    from pathlib import Path

    import comfy.sd
    import comfy.utils
    import folder_paths
    import torch

    class Keep:
        CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "keep", (), True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"images": ("IMAGE",), "name": ("STRING", {"default": ""})}}

        def keep(self, images, name):
            folder = Path(folder_paths.get_output_directory())
            number = len(list(folder.glob(f"{name}.*.pt")))
            torch.save(images.float().cpu().clone(), folder / f"{name}.{number}.pt")
            return {}

    class Several:
        CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_IS_LIST = "test", "give", ("STRING",), (True,)

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"lines": ("STRING", {"default": ""})}}

        def give(self, lines):
            return (lines.split("|"),)

    class OracleCLIP:
        CATEGORY, FUNCTION, RETURN_TYPES = "test", "load", ("CLIP",)

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"clip_name": ("STRING", {"default": ""}), "sizes": ("STRING", {"default": ""})}}

        def load(self, clip_name, sizes):
            wan = importlib.import_module("comfy.text_encoders.wan")
            path = folder_paths.get_full_path("text_encoders", clip_name) or clip_name
            found, target = comfy.utils.load_torch_file(path), type("Target", (), {"params": {}})()
            target.clip, target.tokenizer = wan.te(), wan.WanT5Tokenizer
            options = {"umt5xxl_model_config": json.loads(sizes), "dtype": torch.float32}
            tokenizer = {name: found[name] for name in ("spiece_model",) if name in found}
            return (comfy.sd.CLIP(target, tokenizer_data=tokenizer, model_options=options, state_dict=[found]),)

    NODE_CLASS_MAPPINGS = {"Keep": Keep, "Several": Several, "OracleCLIP": OracleCLIP}
"""


@dataclass
class Row:
    """What one case gave: an error, or a sentence with the parts that it must hold."""

    number: int
    case: str
    way: str
    oracle: str
    error: float | None = None
    sentence: str = ""
    parts: tuple[str, ...] = ()
    images: list[Any] = field(default_factory=list)  # of this pack and the oracle, for the sheet

    @property
    def holds(self) -> bool:
        if self.error is not None:
            return self.error < BOUND
        return bool(self.parts) and all(part in self.sentence for part in self.parts)

    def line(self) -> str:
        result = f"{self.error:.1e}" if self.error is not None else self.sentence.replace("|", "/")
        return (
            f"| {self.number} | {self.case} | {self.way} | {self.oracle} | {result} | {'yes' if self.holds else 'NO'} |"
        )


Graph = dict[str, Any]
FP8 = torch.float8_e4m3fn
PAGE, COMMAND = "graph of the page", "command"
UMT5_SIZES = {**UMT5.sizes, "num_layers": 2, "d_ff": 64, "d_model": 4096, "num_heads": 1}


class Bench:
    """The server, its folders and the files of miniatures."""

    def __init__(self, server: comfyui_server.Server, miniatures: Miniatures) -> None:
        self.server, self.miniatures = server, miniatures
        self.base, self.models = server.base, server.base / "models"
        self.number = 0

    @classmethod
    @contextmanager
    def started(cls, folder: Path, cache: Path | None = None) -> "Iterator[Bench]":
        """With a server that runs until the end."""
        base, made = folder / "comfyui", folder / "made"
        made.mkdir(parents=True)
        models = wan_files(base / "models", made)
        narrow = Path(single_files.__file__).with_name("narrow.py").read_text()
        server = comfyui_server.prepare(base, cache=cache, packs={"oracle": ORACLE, "narrow": narrow})
        bench = cls(server, Miniatures(made, models))
        for number, color in enumerate(((200, 60, 40), (40, 90, 200))):
            for name in ("input", "output"):
                (base / name).mkdir(exist_ok=True)
            bench.picture(color).save(base / "input" / f"picture{number}.png")
        server.start()
        try:
            yield bench
        finally:
            server.stop()

    @staticmethod
    def picture(color: tuple[int, int, int]) -> Any:
        from PIL import Image

        found = Image.new("RGB", (96, 64), color)
        found.paste((240, 240, 200), (20, 10, 60, 40))
        return found

    # --- files --------------------------------------------------------------------------------------------------------

    def has(self, name: str, folder: str, as_name: str = "") -> str:
        """A miniature's file in one of ComfyUI's folders, by its name there."""
        path = self.miniatures.file(name)
        target = self.models / folder / f"{as_name or name}{path.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(path, target)
        return target.name

    def write(self, folder: str, name: str, tensors: Mapping[str, torch.Tensor], **metadata: str) -> str:
        path = self.models / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: x.clone().contiguous() for key, x in tensors.items()}, path, metadata or None)
        return name

    def wan(self) -> dict[str, torch.Tensor]:
        return load_file(self.models / "diffusion_models" / "wan_t2v.safetensors")

    # --- graphs -------------------------------------------------------------------------------------------------------

    def images(self, graph: Graph) -> torch.Tensor:
        """What a graph gives to its node `keep`, of all its results in a row."""
        self.number += 1
        name = f"kept{self.number}"
        graph = json.loads(json.dumps(graph))
        graph["keep"]["inputs"]["name"] = name
        if said := self.said(graph):
            raise ValueError(said)
        paths = sorted((self.base / "output").glob(f"{name}.*.pt"), key=lambda path: int(path.suffixes[-2][1:]))
        return torch.cat([torch.load(path) for path in paths])

    def sentence(self, graph: Graph) -> str:
        """What the server says of a graph that it does not run."""
        graph = json.loads(json.dumps(graph))
        if "keep" in graph:
            self.number += 1
            graph["keep"]["inputs"]["name"] = f"kept{self.number}"
        return self.said(graph) or "it ran"

    def said(self, graph: Graph) -> str:
        """Why the server does not run a graph; empty where it does."""
        answer = self.server.queue(graph)
        if answer.get("node_errors") or "prompt_id" not in answer:
            errors = [e for one in answer.get("node_errors", {}).values() for e in one["errors"]]
            return "; ".join(f"{e['message']}: {e['details']}" for e in errors) or str(answer)
        entry = self.server.finish(answer["prompt_id"])
        said = [one["exception_message"] for kind, one in entry["status"]["messages"] if kind == "execution_error"]
        return said[0].strip() if said else ""

    def compared(self, number: int, case: str, ours: Graph, theirs: Graph, oracle: str = "ComfyUI's torch") -> Row:
        return self.row(number, case, self.images(ours), self.images(theirs), oracle)

    def row(self, number: int, case: str, ours: torch.Tensor, theirs: torch.Tensor, oracle: str) -> Row:
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        error = ((ours - theirs).norm() / theirs.norm()).item()
        return Row(number, case, PAGE, oracle, error=error, images=[ours, theirs])

    def refused(self, number: int, case: str, graph: Graph, *parts: str) -> Row:
        return Row(number, case, PAGE, "the sentence", sentence=self.sentence(graph), parts=parts)


def nodes(**said: tuple[str, dict[str, Any]]) -> Graph:
    return {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in said.items()}


def core(steps: int = 3, cfg: float = 4.0, unet: str = "wan_t2v.safetensors", **more: Any) -> Graph:
    """Core's nodes of text to video, with its own denoiser and VAE, and this pack's text encoder: core makes that of
    Wan in one size only.
    """
    found = nodes(
        unet=("UNETLoader", {"unet_name": unet, "weight_dtype": "default"}),
        clip=("TPUCLIPLoader", {"clip_name": "umt5.safetensors", "type": "wan", "device": "default"}),
        vae=("VAELoader", {"vae_name": "wan_vae.safetensors"}),
        positive=("CLIPTextEncode", {"clip": ["clip", 0], "text": "a cat and a (dog:1.3)"}),
        negative=("CLIPTextEncode", {"clip": ["clip", 0], "text": ""}),
        latent=("EmptyHunyuanLatentVideo", {"width": 64, "height": 48, "length": 5, "batch_size": 1}),
        sampler=(
            "KSampler",
            {
                "model": ["unet", 0], "positive": ["positive", 0], "negative": ["negative", 0],
                "latent_image": ["latent", 0], "seed": 3, "steps": steps, "cfg": cfg, "sampler_name": "euler",
                "scheduler": "simple", "denoise": 1.0,
            },
        ),
        decode=("VAEDecode", {"samples": ["sampler", 0], "vae": ["vae", 0]}),
        keep=("Keep", {"images": ["decode", 0], "name": ""}),
    )  # fmt: skip
    for place, value in more.items():
        node, _, name = place.partition("__")
        found[node]["inputs"][name] = value
    return found


def tpu(graph: Graph) -> Graph:
    """With this pack's loaders in the place of core's."""
    return {n: {**one, "class_type": SWAPS.get(one["class_type"], one["class_type"])} for n, one in graph.items()}


def between(graph: Graph, node: str, output: int = 0, **inputs: Any) -> Graph:
    """With a node between the MODEL's loader and the sampler."""
    graph = json.loads(json.dumps(graph))
    graph["patch"] = {"class_type": node, "inputs": {"model": ["unet", 0], **inputs}}
    graph["sampler"]["inputs"]["model"] = ["patch", output]
    return graph


def own(model_id: str, family: str = "Wan21", **inputs: Any) -> Graph:
    """This pack's pipeline node."""
    sizes = {"prompt": "a cat", "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 4.0, "seed": 1}
    sizes |= {"precision": "float32", **({"num_frames": 5, "negative_prompt": ""} if family == "Wan21" else {})}
    return nodes(
        pipe=(f"{family}TPUPipeline", {**sizes, "model_id": model_id, **inputs}),
        keep=("Keep", {"images": ["pipe", 0], "name": ""}),
    )


def command(bench: Bench, graph: Graph, out: Path, *arguments: str) -> str:
    """What `comfyui-tpu run` says of a graph, that saves into `out`."""
    path = out.with_suffix(".json")
    path.write_text(json.dumps(graph))
    environment = {**os.environ, "COMFYUI_PATH": str(bench.base), "COMFYUI_TPU_CACHE": str(bench.server.cache)}
    environment |= {"HF_HUB_OFFLINE": "1", "XLA_FLAGS": comfyui_server.FLAGS}
    run = [str(Path(sys.executable).with_name("comfyui-tpu")), "run", str(path), "--out", str(out), *arguments]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=900)
    return (ended.stdout + ended.stderr).strip()
