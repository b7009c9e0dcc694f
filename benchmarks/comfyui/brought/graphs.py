"""Users' graphs, each with ComfyUI's own loaders and with this pack's."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tests.checkpoints import raw_files
from comfyui_tpu.tests.comfyui.test_core_networks import DENOISERS_BY_NAME, write_denoiser
from safetensors.torch import load_file

from .bench import BOUND, UMT5_SIZES, Bench, Graph, Row, between, core, nodes, own, tpu


def marks_and_names(bench: Bench) -> Iterator[Row]:
    one = DENOISERS_BY_NAME["qwen-image edit"]
    one = replace(one, config={**one.config, "joint_attention_dim": 128})
    path = write_denoiser(bench.miniatures.made, one, "edit")
    tensors = {name: x for name, x in load_file(path).items() if name != raw_files.MARK}
    # What a reference's own time changes shows in the image.
    tensors |= {name: 10 * x for name, x in tensors.items() if "img_mod" in name and name.endswith("weight")}
    folder = bench.models / "diffusion_models"
    raw_files.write_safetensors(folder / "marked.safetensors", {**tensors, raw_files.MARK: torch.zeros(0)})
    raw_files.write_safetensors(folder / "qwen_image_edit_2511_fp32.safetensors", tensors)
    raw_files.write_safetensors(folder / "qwen_image_edit_2509_fp32.safetensors", tensors)
    raw_files.write_gguf(folder / "Qwen-Image-Edit-2511-F32.gguf", tensors, "qwen_image")
    encoder = bench.has("qwen25", "text_encoders")

    def graph(name: str) -> Graph:
        found = core(unet=name, clip__clip_name=encoder, clip__type="qwen_image", cfg=2.5)
        found["latent"] = {"class_type": "EmptySD3LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
        found |= nodes(
            image=("LoadImage", {"image": "picture0.png"}),
            encoded=("VAEEncode", {"pixels": ["image", 0], "vae": ["vae", 0]}),
            seen=("ReferenceLatent", {"conditioning": ["positive", 0], "latent": ["encoded", 0]}),
            unseen=("ReferenceLatent", {"conditioning": ["negative", 0], "latent": ["encoded", 0]}),
        )
        found["sampler"]["inputs"] |= {"positive": ["seen", 0], "negative": ["unseen", 0]}
        return found

    wanted = bench.images(graph("marked.safetensors"))
    for name in ("marked.safetensors", "qwen_image_edit_2511_fp32.safetensors", "Qwen-Image-Edit-2511-F32.gguf"):
        yield bench.row(1, f"2511 as {name}", bench.images(tpu(graph(name))), wanted, "ComfyUI's torch, with the mark")
    older = "qwen_image_edit_2509_fp32.safetensors"
    row = bench.compared(1, f"2509 as {older}", tpu(graph(older)), graph(older))
    assert (row.images[1] - wanted).norm() > 10 * BOUND * wanted.norm(), "2509 and 2511 are the same"
    yield row


def caches(bench: Bench) -> Iterator[Row]:
    for node in ("EasyCache", "LazyCache"):
        inputs = {"reuse_threshold": 0.5, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
        graph = between(core(steps=8), node, **inputs)
        yield bench.compared(2, node, tpu(graph), graph)


def lists(bench: Bench) -> Iterator[Row]:
    graph = own("tiny/random-wan21", prompt=["several", 0])
    graph |= nodes(several=("Several", {"lines": "a cat|a dog|a house"}))
    alone = [bench.images(own("tiny/random-wan21", prompt=prompt)) for prompt in ("a cat", "a dog", "a house")]
    assert not torch.equal(alone[0], alone[1])
    yield bench.row(3, "three prompts into a pipeline", bench.images(graph), torch.cat(alone), "each prompt alone")


def changed_clips(bench: Bench) -> Iterator[Row]:
    generator, lora = torch.Generator().manual_seed(2), {}
    for block in range(2):
        name = f"text_encoders.umt5xxl.transformer.encoder.block.{block}.layer.1.DenseReluDense.wo"
        lora[f"{name}.lora_up.weight"] = torch.randn(4096, 4, generator=generator) * 0.3
        lora[f"{name}.lora_down.weight"] = torch.randn(4, 64, generator=generator) * 0.3
    bench.write("loras", "clip_lora.safetensors", lora)

    def graph(*, ours: bool, change: str, **inputs: Any) -> Graph:
        found = tpu(core()) if ours else core()
        if not ours:
            sizes = {"clip_name": "umt5.safetensors", "sizes": json.dumps(UMT5_SIZES)}
            found["clip"] = {"class_type": "OracleCLIP", "inputs": sizes}
        found["changed"] = {"class_type": change, "inputs": {"clip": ["clip", 0], **inputs}}
        if change == "CLIPMergeSimple":
            lora = {"model": ["unet", 0], "clip": ["clip", 0], "lora_name": "clip_lora.safetensors"}
            found["other"] = {"class_type": "LoraLoader", "inputs": {**lora, "strength_model": 0, "strength_clip": 0.9}}
            found["changed"]["inputs"] = {"clip1": ["clip", 0], "clip2": ["other", 1], "ratio": 0.4}
        place = 0
        if change == "LoraLoader":
            found["changed"]["inputs"] |= {"model": ["unet", 0]}
            place = 1
        for text in ("positive", "negative"):
            found[text]["inputs"]["clip"] = ["changed", place]
        return found

    plain = bench.images(tpu(core()))
    for change, inputs in {
        "LoraLoader": {"lora_name": "clip_lora.safetensors", "strength_model": 0.0, "strength_clip": 0.9},
        "CLIPSetLastLayer": {"stop_at_clip_layer": -2},
        "CLIPMergeSimple": {},
    }.items():
        ours, theirs = (graph(ours=is_ours, change=change, **inputs) for is_ours in (True, False))
        row = bench.compared(4, change, ours, theirs)
        assert (row.images[0] - plain).norm() / plain.norm() > 1e-4, f"{change} changes nothing"
        yield row


def flux(bench: Bench, cfg: float, denoiser: str = "flux2") -> Graph:
    """Core's nodes of text to image with FLUX.2."""
    files = {"unet__unet_name": bench.has(denoiser, "diffusion_models"), "clip__type": "flux2"}
    encoder = "mistral" if denoiser == "flux2" else "qwen3"
    files |= {"clip__clip_name": bench.has(encoder, "text_encoders"), "vae__vae_name": bench.has("flux2_vae", "vae")}
    found = core(cfg=cfg, steps=2, **files)
    size = {"width": 64, "height": 64, "batch_size": 1}
    found["latent"] = {"class_type": "EmptyFlux2LatentImage", "inputs": size}
    return found


def with_condition(graph: Graph, node: str, place: str = "positive", **inputs: Any) -> Graph:
    graph = json.loads(json.dumps(graph))
    graph["condition"] = {"class_type": node, "inputs": {"conditioning": [place, 0], **inputs}}
    graph["sampler"]["inputs"][place] = ["condition", 0]
    return graph


def absent_inputs(bench: Bench) -> Iterator[Row]:
    graph = flux(bench, cfg=1.0)
    for name, one in {
        "FluxDisableGuidance": with_condition(graph, "FluxDisableGuidance"),
        "no FluxGuidance": graph,
    }.items():
        yield bench.compared(8, name, tpu(one), one)
    one = DENOISERS_BY_NAME["wan 2.1 i2v"]
    path = write_denoiser(bench.miniatures.made, one, "wan21_i2v")
    shutil.copy(path, bench.models / "diffusion_models" / path.name)
    graph = core(unet=path.name, steps=2)
    sizes = {"width": 64, "height": 48, "length": 5, "batch_size": 1}
    texts = {"positive": ["positive", 0], "negative": ["negative", 0], "vae": ["vae", 0]}
    graph |= nodes(image=("LoadImage", {"image": "picture0.png"}))
    for name, more in {"a picture and no view of it": {"start_image": ["image", 0]}, "no picture": {}}.items():
        graph["latent"] = {"class_type": "WanImageToVideo", "inputs": {**sizes, **texts, **more}}
        places = {"positive": ["latent", 0], "negative": ["latent", 1], "latent_image": ["latent", 2]}
        graph["sampler"]["inputs"] |= places
        yield bench.compared(8, f"Wan 2.1 I2V, {name}", tpu(graph), graph)


def unlike_rows(bench: Bench) -> Iterator[Row]:
    for denoiser in ("flux2", "klein"):
        graph = flux(bench, cfg=3.0, denoiser=denoiser)
        for place in ("positive", "negative"):
            one = with_condition(graph, "FluxGuidance", place, guidance=6.0)
            yield bench.compared(9, f"{denoiser}, FluxGuidance on {place}", tpu(one), one)


def saved_files(bench: Bench) -> Iterator[Row]:
    style = "style.safetensors"
    lora = {"lora_name": style, "strength_model": 0.4}

    def saving(what: str) -> Path:
        graph = tpu(core())
        graph["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["unet", 0], **lora}}
        node, inputs = {
            "model": ("ModelSave", {"model": ["lora", 0]}),
            "checkpoint": ("CheckpointSave", {"model": ["lora", 0], "clip": ["clip", 0], "vae": ["vae", 0]}),
            "clip": ("CLIPSave", {"clip": ["clip", 0]}),
            "vae": ("VAESave", {"vae": ["vae", 0]}),
        }[what]
        graph["save"] = {"class_type": node, "inputs": {**inputs, "filename_prefix": f"saved/{what}"}}
        used = {"model": ("unet", "lora"), "clip": ("clip",), "vae": ("vae",)}
        used["checkpoint"] = tuple(name for names in used.values() for name in names)
        bench.server.run({name: graph[name] for name in (*used[what], "save")})
        # Of a CLIP core writes what is beside its encoders, too.
        return max((bench.base / "output" / "saved").glob(f"{what}*.safetensors"), key=lambda path: path.stat().st_size)

    wanted = bench.images(between(core(), "LoraLoaderModelOnly", **lora))
    for what, node in {"model": "ModelSave", "checkpoint": "CheckpointSave"}.items():
        name = f"saved_{what}.safetensors"
        shutil.copy(saving(what), bench.models / "diffusion_models" / name)
        yield bench.row(15, f"{node} with a LoRA", bench.images(core(unet=name)), wanted, "ComfyUI's own, unsaved")
    of_checkpoint = nodes(
        image=("LoadImage", {"image": "picture0.png"}),
        vae=("VAELoader", {"vae_name": "wan_vae.safetensors"}),
        encode=("VAEEncode", {"pixels": ["image", 0], "vae": ["vae", 0]}),
        decode=("VAEDecode", {"samples": ["encode", 0], "vae": ["vae", 0]}),
        keep=("Keep", {"images": ["decode", 0], "name": ""}),
    )
    ours = json.loads(json.dumps(of_checkpoint).replace('["vae", 0]', '["vae", 2]'))
    (bench.models / "checkpoints").mkdir(exist_ok=True)
    shutil.copy(bench.models / "diffusion_models" / "saved_checkpoint.safetensors", bench.models / "checkpoints")
    ours["vae"] = {"class_type": "TPUCheckpointLoader", "inputs": {"ckpt_name": "saved_checkpoint.safetensors"}}
    yield bench.compared(15, "VAEEncode of a text-to-video checkpoint", ours, of_checkpoint)
    shutil.copy(saving("vae"), bench.models / "vae" / "saved_vae.safetensors")
    plain = bench.images(core())
    yield bench.row(
        15, "VAESave", bench.images(core(vae__vae_name="saved_vae.safetensors")), plain, "ComfyUI's own VAE"
    )
    # The tokenizer is in a file beside it.
    carried = load_file(bench.models / "text_encoders" / "umt5.safetensors")["spiece_model"]
    bench.write("text_encoders", "saved_clip.safetensors", {**load_file(saving("clip")), "spiece_model": carried})
    of_oracle = core()
    inputs = {"clip_name": "saved_clip.safetensors", "sizes": json.dumps(UMT5_SIZES)}
    of_oracle["clip"] = {"class_type": "OracleCLIP", "inputs": inputs}
    yield bench.row(15, "CLIPSave", bench.images(of_oracle), plain, "ComfyUI's torch of the saved file")

    def merged(graph: Graph, node: str, **inputs: float) -> Graph:
        graph = between(graph, node)
        graph["other"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["unet", 0], **lora}}
        graph["patch"]["inputs"] = {"model1": ["unet", 0], "model2": ["other", 0], **inputs}
        return graph

    for node, inputs in {"ModelMergeSimple": {"ratio": 0.3}, "ModelMergeAdd": {}}.items():
        graph = merged(core(), node, **inputs)
        yield bench.compared(15, node, tpu(graph), graph)
    graph = merged(core(), "ModelMergeBlocks", input=0.2, middle=0.7, out=0.4)
    yield bench.compared(15, "ModelMergeBlocks", tpu(graph), graph)
    path = write_denoiser(
        bench.miniatures.made, replace(DENOISERS_BY_NAME["wan t2v"], config={"ffn_dim": 384}), "wan_wide"
    )
    shutil.copy(path, bench.models / "diffusion_models" / path.name)
    graph = merged(tpu(core()), "ModelMergeSimple", ratio=0.3)
    graph["other"] = {"class_type": "TPUUNETLoader", "inputs": {**graph["unet"]["inputs"], "unet_name": path.name}}
    yield bench.refused(15, "ModelMergeSimple of two sizes", graph, "merges two models", "256", "384")


def wrong_channels(bench: Bench) -> Iterator[Row]:
    graph = tpu(core())
    graph |= nodes(
        image=("LoadImage", {"image": "picture0.png"}),
        other=("TPUVAELoader", {"vae_name": bench.has("wan22_vae", "vae")}),
        latent=("VAEEncode", {"pixels": ["image", 0], "vae": ["other", 0]}),
    )
    yield bench.refused(16, "latents of Wan 2.2's VAE for Wan 2.1", graph, "48 channels", "expects 16", "VAE")
    graph = tpu(flux(bench, cfg=1.0))
    graph |= nodes(
        image=("LoadImage", {"image": "picture0.png"}),
        other=("TPUVAELoader", {"vae_name": "wan_vae.safetensors"}),
        encoded=("VAEEncode", {"pixels": ["image", 0], "vae": ["other", 0]}),
        seen=("ReferenceLatent", {"conditioning": ["positive", 0], "latent": ["encoded", 0]}),
    )
    graph["sampler"]["inputs"]["positive"] = ["seen", 0]
    yield bench.refused(16, "a reference of Wan's VAE for FLUX.2", graph, "reference_latents", "16", "128")
    graph = tpu(core(clip__clip_name=bench.has("mistral", "text_encoders"), clip__type="flux2"))
    yield bench.refused(16, "FLUX.2's text encoder for Wan", graph, "192 wide", "expects 4096", "text encoder")


def absent_methods(bench: Bench) -> Iterator[Row]:
    graph = tpu(core())
    graph["text"] = {
        "class_type": "TextGenerate",
        "inputs": {"clip": ["clip", 0], "prompt": "a", "max_length": 4, "sampling_mode": "off", "thinking": False},
    }
    graph["show"] = {"class_type": "PreviewAny", "inputs": {"source": ["text", 0]}}
    graph = {name: graph[name] for name in ("clip", "text", "show")}
    yield bench.refused(17, "TextGenerate", graph, "writes text", "only encodes prompts", "ComfyUI's own loader")
    graph = between(tpu(core()), "ModelSamplingSD3", shift=3.0)
    graph["patch"] = {"class_type": "NAGuidance", "inputs": {
        "model": ["unet", 0], "nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}}  # fmt: skip
    yield bench.refused(17, "NAGuidance", graph, "a patch of attention or blocks", "ComfyUI's own loader")


CASES: Mapping[int, Callable[[Bench], Iterator[Row]]] = {
    1: marks_and_names, 2: caches, 3: lists, 4: changed_clips, 8: absent_inputs, 9: unlike_rows, 15: saved_files,
    16: wrong_channels, 17: absent_methods,
}  # fmt: skip
