"""Users' files, in the formats and with the names of the programs that write them."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from comfyui_tpu.tests.checkpoints import raw_files
from comfyui_tpu.tests.support import comfyui_server
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.models import lookup_spec
from safetensors.torch import load_file

from .bench import COMMAND, FP8, Bench, Graph, Row, between, command, core, nodes, own, tpu

# The files of a Wan model, without its denoiser.
FILES = " + umt5.safetensors + wan_vae.safetensors + wan2.1-t2v-14b"


def merged_by_comfyui(bench: Bench, lora: str) -> str:
    """Return the file name of a Wan whose LoRA ComfyUI's own nodes have merged and saved."""
    graph = nodes(
        unet=("UNETLoader", {"unet_name": "wan_t2v.safetensors", "weight_dtype": "default"}),
        lora=("LoraLoaderModelOnly", {"model": ["unet", 0], "lora_name": lora, "strength_model": 1.0}),
        save=("ModelSave", {"model": ["lora", 0], "filename_prefix": f"merged/{lora}"}),
    )
    bench.server.run(graph)
    (path,) = (bench.base / "output" / "merged").glob(f"{lora}*.safetensors")
    name = f"merged_{lora}"
    tensors = {key.removeprefix("model.diffusion_model."): x for key, x in load_file(path).items()}
    return bench.write("diffusion_models", name, tensors)


def with_lora(lora: str) -> Graph:
    graph = own("wan_t2v.safetensors" + FILES, model=["lora", 0])
    del graph["pipe"]["inputs"]["model_id"], graph["pipe"]["inputs"]["precision"]
    model = {"model_id": "wan_t2v.safetensors" + FILES, "family": "Wan21", "precision": "float32"}
    return graph | nodes(
        loader=("TPUModelLoader", model),
        lora=("TPULoraLoader", {"model": ["loader", 0], "lora_name": lora, "strength": 1.0}),
    )


def drawn_lora(alpha: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(4), {}
    for module in ("blocks.0.self_attn.q", "blocks.1.self_attn.o", "blocks.1.cross_attn.k"):
        found[f"diffusion_model.{module}.lora_A.weight"] = torch.randn(4, 128, generator=generator) * 0.1
        found[f"diffusion_model.{module}.lora_B.weight"] = torch.randn(128, 4, generator=generator) * 0.1
        if alpha is not None:
            found[f"diffusion_model.{module}.alpha"] = alpha
    return found


def lora_spellings(bench: Bench) -> Iterator[Row]:
    once = drawn_lora()
    twice = once | {f"transformer.{name.removeprefix('diffusion_model.')}": x for name, x in once.items()}
    flat = {}
    for name, x in once.items():
        module, part = name.removeprefix("diffusion_model.").rsplit(".lora_", 1)
        ends = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}
        flat[f"lora_unet_{module.replace('.', '_')}.{ends[part]}"] = x
    wanted = None
    for name, tensors in {"twice": twice, "kohya_too": {**once, **flat}, "three": {**twice, **flat}}.items():
        lora = bench.write("loras", f"spelled_{name}.safetensors", tensors)
        if wanted is None:
            bench.write("loras", "spelled_once.safetensors", once)
            wanted = bench.images(own(merged_by_comfyui(bench, "spelled_once.safetensors") + FILES))
        yield bench.row(5, f"a LoRA of names, {name}", bench.images(with_lora(lora)), wanted, "merged by ComfyUI once")


def integer_alphas(bench: Bench) -> Iterator[Row]:
    bench.write("loras", "float_alpha.safetensors", drawn_lora(torch.tensor(8.0)))
    wanted = bench.images(own(merged_by_comfyui(bench, "float_alpha.safetensors") + FILES))
    for dtype in (torch.int64, torch.uint8, torch.int32):
        lora = bench.write("loras", f"alpha_{str(dtype)[6:]}.safetensors", drawn_lora(torch.tensor(8, dtype=dtype)))
        yield bench.row(12, f"alpha of {dtype}", bench.images(with_lora(lora)), wanted, "ComfyUI's merge of 8.0")


def peft_options(bench: Bench) -> Iterator[Row]:
    from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model

    class Block(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Module()])
            self.blocks[0].attn1 = torch.nn.Module()
            self.blocks[0].attn1.to_q = torch.nn.Linear(*weight.shape[::-1], bias=False)
            self.blocks[0].attn1.to_q.weight.data = weight.clone()

    wan = bench.wan()
    for name, config in {
        "LoHa": LoHaConfig(r=4, alpha=2, target_modules=["to_q"]),
        "LoKr": LoKrConfig(r=64, alpha=16, target_modules=["to_q"]),
        "rsLoRA, DoRA": LoraConfig(r=4, lora_alpha=6, use_rslora=True, use_dora=True, target_modules=["to_q"]),
    }.items():
        torch.manual_seed(5)
        model = get_peft_model(Block(wan["blocks.0.self_attn.q.weight"]), config)
        for key, one in model.named_parameters():
            if any(part in key for part in ("lora_A", "lora_B", "hada_", "lokr_")):
                one.data = torch.randn_like(one) / one.shape[-1] ** 0.5
        folder = bench.models / "loras" / name.replace(", ", "_")
        model.save_pretrained(str(folder))
        weight = model.merge_and_unload().blocks[0].attn1.to_q.weight.detach()
        file = bench.write(
            "diffusion_models", f"{folder.name}.safetensors", {**wan, "blocks.0.self_attn.q.weight": weight}
        )
        graph = with_lora(f"{folder.name}/adapter_model.safetensors")
        yield bench.row(6, f"PEFT's {name}", bench.images(graph), bench.images(own(file + FILES)), "merged by peft")


def scales(bench: Bench) -> Iterator[Row]:
    from transformers.integrations import finegrained_fp8

    wan, generator = bench.wan(), torch.Generator().manual_seed(6)
    for name, shape in {"rows": (256, 1), "tiles of 64": (4, 2), "tiles of 32": (8, 4), "tiles of 128": (2, 1)}.items():
        coded, plain = dict(wan), dict(wan)
        for block in range(2):
            layer = f"blocks.{block}.ffn.0.weight"
            scale = (torch.rand(shape, generator=generator) + 0.5) * 2e-3
            codes = (wan[layer] / wan[layer].abs().max() * 200).to(FP8)
            tile = [256 // shape[0], 128 // shape[1]]
            plain[layer] = finegrained_fp8._dequantize_fp8_weight(codes.clone(), scale, tile, torch.float32)
            coded |= {layer: codes, f"{layer}_scale_inv": scale}
        ours, theirs = (
            bench.write("diffusion_models", f"{kind}_{shape[0]}.safetensors", x) for kind, x in
            (("coded", coded), ("plain", plain))
        )  # fmt: skip
        row = bench.compared(7, f"weight_scale_inv of {name}", tpu(core(unet=ours)), core(unet=theirs))
        yield replace(row, oracle="transformers' weights in ComfyUI's torch")


def fp8_wan(bench: Bench, scaled: Callable[[str], bool]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a Wan in fp8, some of whose layers have a scale, and the decoded weights."""
    coded, plain = bench.wan(), bench.wan()
    for name, x in bench.wan().items():
        if name.startswith("blocks.") and name.endswith(".weight") and x.ndim == 2:
            scale = x.abs().max() / 448 if scaled(name) else torch.tensor(1.0)
            coded[name] = (x / scale).to(FP8)
            plain[name] = coded[name].float() * scale
            if scaled(name):
                coded[f"{name.removesuffix('weight')}scale_weight"] = scale
    return coded, plain


def all_in_one(bench: Bench, name: str, denoiser: Mapping[str, torch.Tensor]) -> str:
    """Write a checkpoint of all networks; its encoder is in scaled fp8 and contains the tokenizer."""
    encoder = load_file(bench.models / "text_encoders" / "umt5.safetensors")
    prefix = "text_encoders.umt5xxl.transformer."
    found = {f"model.diffusion_model.{key}": x for key, x in denoiser.items()}
    found |= {f"vae.{key}": x for key, x in load_file(bench.models / "vae" / "wan_vae.safetensors").items()}
    for key, x in encoder.items():
        if ".layer.1.DenseReluDense." in key and key.endswith(".weight"):
            scale = x.float().abs().max() / 448
            found[prefix + key] = (x / scale).to(FP8)
            found[f"{prefix}{key.removesuffix('weight')}scale_weight"] = scale
        else:
            found[prefix + key] = x
    return bench.write("checkpoints", name, {**found, f"{prefix}scaled_fp8": torch.zeros(2, dtype=FP8)})


def decoded_encoder(bench: Bench) -> str:
    found = load_file(bench.models / "text_encoders" / "umt5.safetensors")
    for key, x in found.items():
        if ".layer.1.DenseReluDense." in key and key.endswith(".weight"):
            scale = x.float().abs().max() / 448
            found[key] = (x / scale).to(FP8).float() * scale
    return bench.write("text_encoders", "umt5_decoded.safetensors", found)


def unscaled_layers(bench: Bench) -> Iterator[Row]:
    encoder = decoded_encoder(bench)
    for name, scaled in {
        "a plain fp8 denoiser beside a scaled encoder": lambda name: False,
        "one layer of each block without a scale": lambda name: ".self_attn.q" not in name,
        "a layer without a scale, its sibling with one": lambda name: "blocks.1." not in name,
    }.items():
        coded, plain = fp8_wan(bench, scaled)
        file = f"aio_{len(name)}"
        ours = tpu(core())
        all_in_one(bench, f"{file}.safetensors", coded)
        ours["unet"] = {"class_type": "TPUCheckpointLoader", "inputs": {"ckpt_name": f"{file}.safetensors"}}
        for node, output in (("positive", 1), ("negative", 1)):
            ours[node]["inputs"]["clip"] = ["unet", output]
        ours["decode"]["inputs"]["vae"] = ["unet", 2]
        theirs = core(unet=bench.write("diffusion_models", f"{file}_plain.safetensors", plain), clip__clip_name=encoder)
        row = bench.compared(10, name, ours, theirs)
        yield replace(row, oracle="hand arithmetic in ComfyUI's torch")


def tokenizers(bench: Bench) -> Iterator[Row]:
    file = all_in_one(bench, "aio_own.safetensors", bench.wan())
    ours = bench.images(own(f"{file} + wan2.1-t2v-14b"))
    theirs = bench.images(own(f"wan_t2v.safetensors + {decoded_encoder(bench)} + wan_vae.safetensors + wan2.1-t2v-14b"))
    yield bench.row(13, "an all-in-one file, its tokenizer inside", ours, theirs, "the same in files of one network")


def ggufs(bench: Bench) -> Iterator[Row]:
    """Yield files as stable-diffusion.cpp writes them: at most four dimensions, no leading ones of size 1."""
    import gguf

    for title, kind in {"F32": "F32", "F16": "F16", "Q8_0": "Q8_0"}.items():
        path = bench.models / "diffusion_models" / f"wan_sdcpp_{title}.gguf"
        writer, plain = gguf.GGUFWriter(str(path), "wan"), {}
        for name, x in bench.wan().items():
            shape = list(x.shape)
            array = x.float().numpy()
            if len(shape) == 5:
                array = array.reshape(shape[0] * shape[1], *shape[2:])
            while array.ndim > 1 and array.shape[0] == 1:
                array = array[0]
            dtype = gguf.GGMLQuantizationType[kind if x.ndim == 2 and x.shape[1] % 32 == 0 else "F32"]
            data = gguf.quants.quantize(array, dtype)
            writer.add_tensor(name, data, raw_dtype=dtype)
            plain[name] = torch.from_numpy(gguf.quants.dequantize(data, dtype).astype("float32")).reshape(shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        theirs = core(unet=bench.write("diffusion_models", f"gguf_{title}.safetensors", plain))
        row = bench.compared(11, f"stable-diffusion.cpp's {title}", tpu(core(unet=path.name)), theirs)
        yield replace(row, oracle="gguf's numbers in ComfyUI's torch")


def variants(bench: Bench) -> Iterator[Row]:
    import transformers
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    home = tiny.ensure_random(lookup_spec("wan2.1-t2v-14b"))
    folder = bench.base / "variant"
    shutil.copytree(home, folder)
    for part, kind in {
        "transformer": WanTransformer3DModel, "text_encoder": transformers.UMT5EncoderModel,
        "vae": AutoencoderKLWan,
    }.items():  # fmt: skip
        network = kind.from_pretrained(home / part, trust_remote_code=False)
        for path in (folder / part).glob("*.safetensors*"):
            path.unlink()
        network.save_pretrained(folder / part, variant="fp16", max_shard_size="60KB")
    assert list(folder.glob("*/*.index.fp16.json"))
    results = []
    for name, model in {"variant": folder, "usual": home}.items():
        graph = json.loads((comfyui_server.PACK / "examples" / "api" / "wan21_t2v_720p.json").read_text())
        graph["2"]["inputs"] |= {"num_frames": 5, "num_inference_steps": 2, "height": 64, "width": 64}
        graph["6"]["inputs"]["model_id"] = str(model)
        said = command(bench, graph, bench.base / f"run_{name}")
        (video,) = (bench.base / f"run_{name}").rglob("*.mp4")
        results.append(frames(video))
        assert "error" not in said.lower(), said
    row = bench.row(14, "shards of a variant", results[0], results[1], "the usual folder, written by diffusers")
    yield replace(row, way=COMMAND)


def frames(video: Path) -> torch.Tensor:
    import av

    with av.open(str(video)) as container:
        return (
            torch.stack([torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)])
            / 255
        )


def wrong_files(bench: Bench) -> Iterator[Row]:
    wan, folder = bench.wan(), bench.models / "diffusion_models"
    half = dict(list(wan.items())[::2])
    rest = "umt5.safetensors + wan_vae.safetensors"

    def refused(case: str, model_id: str, *parts: str, family: str = "Wan21") -> Row:
        graph = own(model_id, family)
        if family == "Wan22I2V":
            graph["pipe"]["inputs"] |= {"image": ["image", 0]}
            graph |= nodes(image=("LoadImage", {"image": "picture0.png"}))
        return bench.refused(18, case, graph, *parts)

    name = bench.write("diffusion_models", "wan-00001-of-00003.safetensors", half)
    yield refused("one shard", f"{name} + {rest}", "part 1 of 3", "whole network", "Choose")
    raw_files.write_gguf(folder / "wan-00002-of-00002.gguf", half, "wan")
    yield refused("half a split GGUF", f"wan-00002-of-00002.gguf + {rest}", "part 2 of 2", "llama-gguf-split --merge")
    svdq = {"transformer_blocks.0.attn.to_qkv.qweight": torch.zeros(4, 4, dtype=torch.int8)}
    svdq |= {"transformer_blocks.0.attn.to_qkv.wscales": torch.ones(4)}
    svdq |= {"transformer_blocks.0.attn.to_qkv.smooth_factor": torch.ones(4)}
    name = bench.write("diffusion_models", "svdq-int4_r32-qwen-image.safetensors", svdq)
    yield refused("Nunchaku's", f"{name} + {rest}", "SVDQuant (Nunchaku)", "bfloat16")
    name = bench.has("wan22_vae", "vae")
    found = refused(
        "a VAE of Wan 2.2", f"wan_t2v.safetensors + umt5.safetensors + {name}", "another model", "Choose one"
    )
    yield found
    graph = tpu(core(latent__batch_size=2))
    yield replace(bench.compared(18, "two latents behind core", graph, core(latent__batch_size=2)))
    graph = between(tpu(core()), "LoraLoaderBypassModelOnly", lora_name="style.safetensors", strength_model=1.0)
    yield bench.refused(18, "LoraLoaderBypassModelOnly", graph, "LoraLoaderBypass", "Use LoraLoaderModelOnly")
    workflow = json.loads((comfyui_server.PACK / "examples" / "api" / "wan21_t2v_720p.json").read_text())
    workflow["6"]["inputs"]["model_id"] = f"wan-00001-of-00003.safetensors + {rest}"
    said = command(bench, workflow, bench.base / "run_shard")
    parts = ("part 1 of 3", "whole network", "Choose")
    yield Row(18, "one shard", COMMAND, "the sentence", sentence=said.splitlines()[-1] if said else "", parts=parts)


def relatives(bench: Bench) -> Iterator[Row]:
    rest, source = "umt5.safetensors + wan_vae.safetensors", bench.models / "diffusion_models" / "wan_t2v.safetensors"
    for name, what in {
        "Wan2_1-T2V-14B-Phantom_fp8_e4m3fn_scaled_KJ": "Phantom", "Wan2_1_mocha-14B-preview": "MoCha",
        "Wan2_1-T2V-1_3B_FlashVSR_fp32": "FlashVSR", "wan2.2_bernini_r_high_noise": "Bernini-R",
    }.items():  # fmt: skip
        shutil.copy(source, source.with_name(f"{name}.safetensors"))
        graph = own(f"{name}.safetensors + {rest}")
        yield bench.refused(19, name, graph, what, "ComfyUI's own loader", "to model_id")
    graph = core(unet="wan2.2_bernini_r_high_noise.safetensors")
    yield bench.compared(19, "Bernini-R's file behind core", tpu(graph), graph)


CASES: Mapping[int, Callable[[Bench], Iterator[Row]]] = {
    5: lora_spellings, 6: peft_options, 7: scales, 10: unscaled_layers, 11: ggufs, 12: integer_alphas, 13: tokenizers,
    14: variants, 18: wrong_files, 19: relatives,
}  # fmt: skip
