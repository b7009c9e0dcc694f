"""Run in a process of its own: states and frames of ComfyUI's own CLIP and VAE, core's torch and ours, of one file.

Arguments: ComfyUI's folder and a job as JSON. `kind` is "clip" (with `type`, `paths`, and what core makes of it: `te`
and `tokenizer`, below `comfy.text_encoders`, and its `options`; heights and widths of `pictures` in prompts; with
`changes` also what nodes change, and what they save), "vae" (`paths`, `frames` to encode, null for one that does not,
`latents` to decode, as shapes) or "vision" (`paths`, `frames`, `options` of core's). What of core is made smaller:
`sizes` by class. With a `folder` (family, path), ours is of that model. Prints the relative L2 by case as JSON, last.
"""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfyui_tpu.tests.support.messages import Expected, assert_message

PROMPTS = (
    "a cat and a dog",
    "",
    'a sign with "open" on it',
    "a (red:1.4) cat and a [dog]",
    "the (quick (brown:0.7)) fox \\(literally\\)",
)


def main(comfyui: str, job: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    said = json.loads(job)
    with torch.inference_mode():
        errors = {"clip": texts, "vae": frames, "vision": looks}[said["kind"]](said)
    print(json.dumps(errors))


def relative(found: Any, theirs: Any) -> float:
    assert found.shape == theirs.shape, (found.shape, theirs.shape)
    assert found.isfinite().all()
    return ((found - theirs).norm() / theirs.norm()).item()


def import_by_name(path: str) -> Any:
    module, name = path.split(".")
    return getattr(importlib.import_module(f"comfy.text_encoders.{module}"), name)


def texts(job: Mapping[str, Any]) -> dict[str, float]:
    import comfy.sd
    import comfy.utils
    import torch
    from comfyui_tpu.nodes.comfyui import core_text_and_vae
    from comfyui_tpu.tests.corenodes import changes
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    # Core recognises encoders by their published sizes, so a miniature's class is said here.
    for name, sizes in job.get("sizes", {}).items():
        make_smaller(name, sizes)
    target, files = core_text_and_vae.ClipTarget(), [comfy.utils.load_torch_file(path) for path in job["paths"]]
    target.clip, target.tokenizer = import_by_name(job["te"])(), import_by_name(job["tokenizer"])
    carried = {name: files[0][name] for name in ("spiece_model", "tekken_model") if name in files[0]}
    options = {**job["options"], "dtype": torch.float32}
    theirs = comfy.sd.CLIP(target, tokenizer_data=carried, model_options=options, state_dict=files)
    if "folder" in job:
        ours = core_text_and_vae.defer_clip(of_folder(job), SilentProgress)
        check_later(ours, comfy.sd.CLIP)
        check_tokens(ours, Path(job["folder"][1], "tokenizer"))
    else:
        ours = core_text_and_vae.load_clip(job["paths"], job["type"], "float32", SilentProgress)
    check_refused(ours)
    errors = beside_pictures(ours, theirs, job["pictures"]) if "pictures" in job else {}
    # Of an encoder that sees pictures another file without its eyes shows the other prompts.
    for prompt in PROMPTS[: 1 if "pictures" in job else None]:
        (found, own), (wanted, said) = (
            clip.encode_from_tokens_scheduled(clip.tokenize(prompt))[0] for clip in (ours, theirs)
        )
        assert own.keys() == said.keys(), (own.keys(), said.keys())
        errors[prompt] = relative(found, wanted)
        for name, value in said.items():
            if isinstance(value, torch.Tensor):
                errors[f"{prompt}, {name}"] = relative(own[name].float(), value.float())
        assert ours.tokenize(prompt) == theirs.tokenize(prompt)
    if "changes" in job:
        changes.saved(ours, theirs, job["paths"], Path.cwd())
        if job["changes"]:
            changes.extracted(ours, theirs, Path.cwd() / "loras")
        return errors | changes.compared(ours, theirs, relative, every=job["changes"])
    return errors


def check_refused(clip: Any) -> None:
    """An embedding among the tokens, as `embedding:name` puts one there, and hooks."""
    import comfy.hooks
    import torch
    from comfy_extras.nodes_hooks import SetClipHooks

    tokens = {name: [[(torch.zeros(8), 1.0), *rows[0][1:]]] for name, rows in clip.tokenize("a cat").items()}
    hooks = comfy.hooks.create_hook_lora({"lora_te1_text_model": torch.ones(1)}, 1.0, 1.0)
    embedding = Expected("comfyui.prompt_entry_unsupported", what="an embedding (textual inversion)")
    for use, expected in (
        (lambda: clip.encode_from_tokens_scheduled(tokens), embedding),
        (lambda: SetClipHooks().apply_hooks(clip, False, True, hooks), Expected("comfyui.hooks_unsupported")),
    ):
        try:
            use()
        except ValueError as error:
            assert_message(error, expected)
        except RuntimeError as error:  # core itself looks whether HunyuanVideo's first token is a number
            assert "Boolean value of Tensor" in str(error), error
        else:
            raise AssertionError(f"no error with the message {expected}")


def beside_pictures(ours: Any, theirs: Any, shapes: Sequence[Sequence[int]]) -> dict[str, float]:
    """What core's node for edits makes of pictures of these heights and widths."""
    import torch
    from comfy_extras.nodes_qwen import TextEncodeQwenImageEdit, TextEncodeQwenImageEditPlus

    torch.manual_seed(3)
    pictures = [torch.rand(1, *shape, 3) for shape in shapes]
    errors, encoded = {}, []
    for number in range(1, 1 + len(pictures)):
        given = {f"image{place + 1}": picture for place, picture in enumerate(pictures[:number])}
        (found, own), (wanted, _) = (
            TextEncodeQwenImageEditPlus.execute(clip, "make it night", **given).result[0][0] for clip in (ours, theirs)
        )
        assert "attention_mask" not in own and wanted.shape[1] > 100 * number
        errors[f"{number} pictures"] = relative(found, wanted)
        encoded.append(found)
    seen, without = encoded[0], TextEncodeQwenImageEditPlus.execute(ours, "make it night").result[0][0][0]
    other = TextEncodeQwenImageEditPlus.execute(ours, "make it night", image1=1.0 - pictures[0]).result[0][0][0]
    # The prompt's own states, behind the pictures, are about these.
    assert relative(seen[:, -8:], without[:, -8:]) > 1e-2 and relative(seen[:, -8:], other[:, -8:]) > 1e-3
    try:
        TextEncodeQwenImageEdit.execute(ours, "make it night", image=pictures[0])
    except ValueError as error:
        assert_message(error, "comfyui.prompt_too_long", advice="comfyui.shorten_or_show_fewer_images")
    else:
        raise AssertionError("a picture of more tokens than the encoder takes was taken")
    return errors


def of_folder(job: Mapping[str, Any]) -> Any:

    from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
    from comfyui_tpu.tpu_runtime.models import spec_for_family

    family, path = job["folder"]
    return choose_model(spec_for_family(family), path, precision="float32")


def check_later(found: Any, kind: type) -> None:
    """What core, and compiling ahead, ask of the outputs of every node makes nothing."""
    from comfy.model_patcher import PromptModelTracker, is_model_patcher_output
    from comfyui_tpu.nodes.comfyui.node_outputs import read_output
    from comfyui_tpu.nodes.graphs.known import UNKNOWN

    PromptModelTracker().add([found])
    assert read_output([found]) is UNKNOWN
    assert is_model_patcher_output(found) and isinstance(found, kind) and not found.is_resolved


def check_tokens(clip: Any, folder: Path) -> None:
    """They are those of the folder's own tokenizer, but for padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS[:3]:
        ((rows,),) = clip.tokenize(prompt).values()
        wanted = tokenizer(prompt)["input_ids"]
        assert [entry[0] for entry in rows][: len(wanted)] == wanted, prompt


def make_smaller(path: str, sizes: Mapping[str, Any]) -> None:
    """Lets core make a network, which it has in one size only, with these keywords in place of its own."""
    module, name = path.rsplit(".", 1)
    owner = importlib.import_module(module)
    made = getattr(owner, name)
    setattr(owner, name, lambda **options: made(**{**options, **sizes}))


def frames(job: Mapping[str, Any]) -> dict[str, float]:
    import comfy.sd
    import comfy.utils
    import torch
    from comfyui_tpu.nodes.comfyui import core_text_and_vae
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    (path,) = job["paths"]
    for name, sizes in job.get("sizes", {}).items():
        make_smaller(name, sizes)
    theirs = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path), device=torch.device("cpu"), dtype=torch.float32)
    if "folder" in job:
        ours = core_text_and_vae.defer_vae(of_folder(job), SilentProgress)
        check_later(ours, comfy.sd.VAE)
    else:
        ours = core_text_and_vae.load_vae(path, "float32", SilentProgress)
    torch.manual_seed(5)
    latents, pixels = torch.randn(job["latents"]), torch.rand(job["frames"] or (1, 64, 64, 3))
    assert ours.spacial_compression_decode() == theirs.spacial_compression_decode()
    assert ours.temporal_compression_decode() == theirs.temporal_compression_decode()
    wanted = theirs.decode(latents.clone()).clamp(0.0, 1.0)  # core leaves out the last for light decoders
    errors = {
        "decode": relative(ours.decode(latents.clone()), wanted),
        "decode tiled": relative(ours.decode_tiled(latents.clone()), wanted),
    }
    if job["frames"] is not None:
        ahead = [] if "folder" in job else encoded_ahead(Path(path), job["frames"])
        errors["encode"] = relative(ours.encode(pixels.clone()), theirs.encode(pixels.clone()))
        assert ahead == [] or ahead == [program.name for program in OBTAINED], [program.name for program in OBTAINED]
        return errors
    check_listed(Path(path))
    check_shown()
    try:
        ours.encode(pixels)
    except ValueError as error:
        assert_message(error, "comfyui.vae_encoder_not_in_file")
        return errors
    raise AssertionError("it encodes with what it has not")


OBTAINED: list[Any] = []  # programs that were compiled


def encoded_ahead(path: Path, frames: Sequence[int]) -> list[str]:
    """Compiles what a prompt that encodes such frames will need; the programs' names."""
    import threading
    import time
    from dataclasses import replace

    import folder_paths
    from comfyui_tpu.nodes.comfyui import precompile
    from comfyui_tpu.nodes.graphs import core_calls
    from comfyui_tpu.tpu_runtime import api
    from comfyui_tpu.tpu_runtime.engine.lifecycle import current_engine
    from comfyui_tpu.tpu_runtime.engine.program_cache import COMPILE_THREAD
    from comfyui_tpu.tpu_runtime.programs import executables
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    folder_paths.add_model_folder_path("vae", str(path.parent))
    obtain = executables.compile_or_load
    executables.compile_or_load = lambda program: (OBTAINED.append(program), obtain(program))[1]
    number, height, width, _ = frames
    prompt = {
        "vae": {"class_type": "TPUVAELoader", "inputs": {"vae_name": path.name}},
        "image": {"class_type": "EmptyImage", "inputs": {"width": width, "height": height, "batch_size": number}},
        "latent": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}},
        "end": {"class_type": "KSampler", "inputs": {"latent_image": ["latent", 0]}},
    }
    calls = list(precompile.predict_calls(core_calls.predict(prompt, precompile.Files()).calls))
    assert [list(arguments) for _, arguments in calls] == [["encoded"]], calls
    calls = [(replace(model, precision="float32"), arguments) for model, arguments in calls]
    api.precompile_calls(calls, progress=SilentProgress())
    engine = current_engine()
    while (
        any(thread.name == COMPILE_THREAD for thread in threading.enumerate()) or engine.program_cache.list_background()
    ):
        time.sleep(0.05)
    assert OBTAINED
    return [program.name for program in OBTAINED]


def check_listed(path: Path) -> None:
    """In ComfyUI's folder of decoders for previews it is a VAE that loaders offer, and others there are not."""
    import folder_paths
    from comfyui_tpu.nodes.comfyui import host

    path.with_name("taesd_decoder.safetensors").touch()
    folder_paths.add_model_folder_path("vae_approx", str(path.parent))
    listed = host.list_weight_files("vae")
    assert path.name in listed and not [name for name in listed if name.startswith("taesd")], listed
    assert host.resolve_path("vae", path.name) == str(path) and str(path.parent) in host.comfyui_folders().models


def check_shown() -> None:
    """A preview that brings its picture along is that, unless the user wants none."""
    import latent_preview
    import torch
    from comfyui_tpu.nodes.comfyui import previews
    from comfyui_tpu.tpu_runtime.progress import Preview

    numbers, latents = torch.randint(0, 255, (6, 8, 3)), torch.zeros(1, 16, 3, 6, 8)
    picture = (numbers + 0.5) / 255.0
    preview = Preview(latent_format="Wan21", sample=lambda: latents, picture=lambda: picture)
    methods, found = latent_preview.LatentPreviewMethod, {}
    for method in (methods.NoPreviews, methods.Latent2RGB):
        latent_preview.args.preview_method = method
        found[method] = previews.Previewer().image(preview)
    assert found[methods.NoPreviews] is None
    kind, image, _ = found[methods.Latent2RGB]
    assert (kind, image.size, image.getpixel((7, 0))) == ("JPEG", (8, 6), tuple(numbers[0, 7].tolist()))


def looks(job: Mapping[str, Any]) -> dict[str, float]:
    """What core's nodes take of CLIP_VISION."""
    import comfy.clip_vision
    import comfy.model_management
    import comfy.utils
    import torch
    from comfyui_tpu.nodes.comfyui import core_text_and_vae
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    import nodes

    (path,) = job["paths"]
    ours = core_text_and_vae.load_clip_vision(path, "float32", SilentProgress)
    comfy.model_management.args.fp32_text_enc = True  # else its weights are float16 here too
    theirs = comfy.clip_vision.ClipVisionModel({**ours.config, **job["options"]})
    missing, _ = theirs.load_sd(comfy.utils.load_torch_file(path))
    assert not [name for name in missing if "projection" not in name], missing
    torch.manual_seed(4)
    errors = {}
    for shape in job["frames"]:
        picture = torch.rand(shape)
        for crop in ("center", "none"):
            found, wanted = (nodes.CLIPVisionEncode().encode(one, picture, crop)[0] for one in (ours, theirs))
            errors[f"{shape}, {crop}"] = relative(found[ours.states_name], wanted[ours.states_name])
    try:
        found.image_embeds  # noqa: B018 - it must not be there
    except AttributeError as error:
        assert_message(error, "comfyui.vision_output_not_available", states_name=ours.states_name)
    else:
        raise AssertionError("it gives what it has not")
    return errors


if __name__ == "__main__":
    main(*sys.argv[1:])
