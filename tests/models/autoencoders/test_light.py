"""The light decoder gives what ComfyUI's own module gives, from a file of its own; files of others are refused."""

import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui_tpu.nodes.declare import Folders, Input, Node
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, run_workflow
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK
from comfyui_tpu.tests.support.comfyui_server import COMFYUI, needs_comfyui
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime.checkpoints import file_resolution, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, choose_model, choose_partial_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import Preview, SilentProgress
from safetensors.torch import save_file
from torch import nn

pytestmark = [pytest.mark.slow, needs_comfyui]

Tensors = dict[str, torch.Tensor]
WAN, TI2V, HUNYUAN = map(lookup_spec, ("wan2.1-t2v-14b", "wan2.2-ti2v-5b", "hunyuanvideo1.5-t2v-720p"))
QWEN = lookup_spec("qwen-image-2512")


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    """ComfyUI's own file, without the rest of it."""
    ops, management = ModuleType("comfy.ops"), ModuleType("comfy.model_management")
    ops.disable_weight_init = nn
    management.intermediate_device = lambda: torch.device("cpu")
    comfy = ModuleType("comfy")
    comfy.ops, comfy.model_management = ops, management
    stubs = {"comfy": comfy, "comfy.ops": ops, "comfy.model_management": management}
    spec = importlib.util.spec_from_file_location("taehv", COMFYUI / "comfy" / "taesd" / "taehv.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec.loader.exec_module(module)
    return module


def network(upstream: ModuleType, channels: int) -> Any:
    """Random, with frames that are neither black nor white and differ from one to the next."""
    torch.manual_seed(channels)
    with torch.inference_mode(False):
        found = upstream.TAEHV(channels, parallel=True).requires_grad_(False)
    for weight in found.parameters():
        nn.init.normal_(weight, std=(1.3 / weight[0].numel()) ** 0.5 if weight.ndim > 1 else 0.1)
    return found


def write_file(path: Path, tensors: Tensors) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def scale_latents(spec: Any, latents: torch.Tensor) -> torch.Tensor:
    """LATENT samples as the denoiser has them."""
    config = spec.component("vae_decoder").config
    if "latents_mean" not in config:
        return latents * config["scaling_factor"]
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (latents - mean) / std


def frames_of(theirs: Any, latents: torch.Tensor) -> torch.Tensor:
    return theirs.decode(latents)[0].movedim(0, -1).clamp(0.0, 1.0)


# By file: the model, latents, the makers' scale, and whether activation and pixels are LightX2V's for HunyuanVideo.
FILES = {
    "taew2_1": (WAN, (3, 5, 7), False),
    "lighttaew2_1": (WAN, (2, 6, 4), True),
    "taew2_2": (TI2V, (2, 3, 5), False),
    "lighttaew2_2": (TI2V, (2, 3, 5), True),
    "taehv1_5": (HUNYUAN, (3, 5, 3), False),
    "lighttaehy1_5": (HUNYUAN, (2, 3, 5), True),
    "taew2_1 of a picture": (QWEN, (1, 5, 7), False),
}


@pytest.mark.parametrize("name", slower(FILES, "lighttaew2_2"))
def test_light_decoder_frames_match_comfyui(name: str, upstream: ModuleType, tmp_path: Path, compare: Callable):
    spec, (number, height, width), is_lightx2v = FILES[name]
    channels = spec.geometry.channels
    theirs = network(upstream, channels)
    path = write_file(tmp_path / f"{name.split()[0]}.safetensors", theirs.state_dict())
    if spec is HUNYUAN and not is_lightx2v:
        # ComfyUI's has one activation for all of 32 channels; the maker's own code has this one.
        theirs.decoder[2], theirs.decoder[21] = nn.ReLU(), nn.ReLU()
        for block in (layer for layer in theirs.decoder if hasattr(layer, "act")):
            block.act = block.conv[1] = block.conv[3] = nn.ReLU()
    latents = torch.randn(1, channels, number, height, width)
    model = choose_partial_model([spec], str(path), precision="float32")
    ours = engine(8 if height % 2 else 3).decode(model, {"samples": latents}, SilentProgress())
    wanted = theirs.decode(latents if is_lightx2v else scale_latents(spec, latents))[0].movedim(0, -1)
    wanted = (wanted / 2 + 0.5 if spec is HUNYUAN and is_lightx2v else wanted).clamp(0.0, 1.0)
    assert len(wanted) == 4 * number - 3 and wanted.std() > 0.1
    compare(f"frames, {name}", ours.numpy(), wanted.numpy(), error=NETWORK)


def test_light_decoder_format_follows_name_or_dtype(upstream: ModuleType, tmp_path: Path):
    tensors = network(upstream, 16).state_dict()
    half = {name: tensor.half() for name, tensor in tensors.items()}
    for name, held, is_lightx2v in (
        ("taew2_1", tensors, False), ("lighttaew2_1", half, True), ("Wan/LightTAE_small", half, True),
        ("decoder", half, False), ("decoder_of_another", tensors, True),
    ):  # fmt: skip
        path = write_file(tmp_path / f"{name}.safetensors", held)
        found = choose_partial_model([WAN], str(path)).resolve(SilentProgress())
        assert found.configs["vae_decoder"]["is_lightx2v"] is is_lightx2v, name


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def output_node(kind: str) -> Node:
    """An output node, whose results are returned."""
    given = Input(name="a", type=kind, tooltip="")
    return Node(id=kind, title=kind, description="", inputs=(given,), is_output=True, run=lambda host, a: (a,))


def test_light_decoder_in_workflow_decodes_only_where_selected(upstream: ModuleType, tmp_path: Path, compare: Callable):
    theirs = network(upstream, 16)
    write_file(tmp_path / "vae_approx" / "taew2_1.safetensors", theirs.state_dict())
    small = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 1, "guidance_scale": 1.0, "seed": 3}
    loaded = {"model_id": WAN.miniature.random_id, "family": "Wan21", "precision": "float32"}
    workflow = {
        "light": node("TPUModelLoader", **loaded, vae="taew2_1.safetensors"),
        "exact": node("TPUModelLoader", **loaded),
        "text": node("Wan21TextEncoder", prompt="a cat", negative_prompt="", model=["exact", 0]),
        "latents": node("Wan21TPUSampler", prompt_embeds=["text", 0], model=["exact", 0], **small),
        "same latents": node("Wan21TPUSampler", prompt_embeds=["text", 0], model=["light", 0], **small),
        "frames": node("Wan21TPUVAEDecoder", latents=["latents", 0], model=["light", 0]),
        "exact frames": node("Wan21TPUVAEDecoder", latents=["latents", 0], model=["exact", 0]),
    }
    for name in ("latents", "same latents", "frames", "exact frames"):
        workflow[f"show {name}"] = node("IMAGE" if "frames" in name else "LATENT", a=[name, 0])
    host = TerminalContext(Folders(models=(str(tmp_path / "vae_approx"),)), stream=io.StringIO())
    found = run_workflow(
        workflow, host, {**HEADLESS_NODES, **{kind: output_node(kind) for kind in ("IMAGE", "LATENT")}}
    )
    results = {name.removeprefix("show "): value for name, value in found.items()}
    samples = results["latents"][0]["samples"]
    assert torch.equal(samples, results["same latents"][0]["samples"])
    wanted = frames_of(theirs, scale_latents(WAN, samples))
    compare("frames of a workflow", results["frames"][0].numpy(), wanted.numpy())
    exact = ModelRef(spec_name=WAN.name, model_id=WAN.miniature.random_id, precision="float32")
    assert torch.equal(results["exact frames"][0], engine(8).decode(exact, {"samples": samples}, SilentProgress()))
    assert (results["exact frames"][0] - results["frames"][0]).abs().mean() > 0.05


def test_light_decoder_leaves_image_encoding_to_the_vae(upstream: ModuleType, tmp_path: Path):
    spec = lookup_spec("wan2.2-i2v-a14b")
    path = write_file(tmp_path / "taew2_1.safetensors", network(upstream, 16).state_dict())
    settings = spec.settings(height=64, width=96, num_frames=5)
    conditions = [
        engine(8).encode_image(
            choose_model(spec, each, precision="float32"), torch.rand(1, 64, 96, 3), settings, SilentProgress()
        )
        for each in (spec.miniature.random_id, f"{spec.miniature.random_id} + {path}")
        if torch.manual_seed(1)
    ]
    exact, beside = (condition["tensors"] for condition in conditions)
    assert exact.keys() == beside.keys() and all(torch.equal(exact[name], beside[name]) for name in exact)


class Watching(SilentProgress):
    """The previews of a sampler: latents, and the picture if there is one."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if preview is not None:
            self.seen.append((preview.sample(), preview.picture and preview.picture()))


def test_light_decoder_previews_match_comfyui(upstream: ModuleType, tmp_path: Path, compare: Callable):
    theirs, runner, host = network(upstream, 16), engine(8), Watching()
    path = write_file(tmp_path / "taew2_1.safetensors", theirs.state_dict())
    settings = WAN.settings(height=64, width=96, num_frames=9, num_inference_steps=2, guidance_scale=1.0)
    light, exact = (
        choose_model(WAN, model_id, precision="float32")
        for model_id in (f"{WAN.miniature.random_id} + {path}", WAN.miniature.random_id)
    )
    embeds = runner.encode(light, "a cat", "", SilentProgress())
    runner.denoise(light, settings, *embeds, host)
    assert len(host.seen) == 2 and not torch.equal(host.seen[0][1], host.seen[1][1])
    for latents, picture in host.seen:
        wanted = frames_of(theirs, latents[:, :, 1:2])[0]
        compare("preview", picture.numpy(), wanted.numpy(), error=NETWORK)
    host.seen.clear()
    runner.denoise(exact, settings, *embeds, host)
    assert [picture for _, picture in host.seen] == [None, None]


def test_resolve_missing_vae_never_uses_light_decoder(upstream: ModuleType, tmp_path: Path):
    """It is the largest of the folder's files that fit."""
    source, folder = tiny.ensure_random(WAN), tmp_path / "vae"
    write_file(folder / "lighttaew2_1.safetensors", network(upstream, 16).state_dict())
    single_files.write(folder / "wan_vae.safetensors", source / "vae", "AutoencoderKLWan")
    path = single_files.write(tmp_path / "wan.safetensors", source / "transformer", "WanTransformer3DModel")
    encoder = single_files.write(tmp_path / "umt5.safetensors", source / "text_encoder", "UMT5EncoderModel")
    found = file_resolution.resolve(f"{path} + {encoder}", [WAN], (str(folder),))
    assert found.parts["vae"].path.name == "wan_vae.safetensors" and "vae_light" not in found.parts


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


DAMAGE: dict[str, tuple[str, Callable[[Tensors], Tensors], Expected]] = {
    "another model's": (
        "taew2_2",
        lambda t: t,
        Expected(
            "compatibility.file_config_unsupported",
            key="latent_channels",
            state=Expected("compatibility.has_value", value=48),
            need=16,
        ),
    ),
    "hunyuanvideo 1's": ("taehv", lambda t: t, Expected("file.light_decoder_unsupported", other="HunyuanVideo 1")),
    "cogvideox's": ("taecvx", lambda t: t, Expected("file.light_decoder_unsupported", other="CogVideoX")),
    "another shape": (
        "taew2_1",
        with_tensor("decoder.9.conv.0.weight", torch.zeros(7, 5, 3, 3)),
        Expected("checkpoint.shape_contradicts_other_tensors", shape=(7, 5, 3, 3)),
    ),
    "an input of another kind": (
        "taew2_1",
        with_tensor("decoder.1.weight", torch.zeros(3)),
        Expected("file.weight_dimensions_wrong", shape=(3,), dimensions=4),
    ),
    "a hundred thousand channels": (
        "taew2_1",
        with_tensor("decoder.1.weight", torch.zeros(1, 100_000, 1, 1)),
        Expected(
            "compatibility.file_of_another_model",
            strange=Expected("compatibility.differs_from_published", key="latent_channels", value=100000),
        ),
    ),
    "patches of 30 pixels": (
        "taew2_1",
        with_tensor("decoder.22.weight", torch.zeros(2700, 1, 1, 1)),
        Expected(
            "compatibility.file_of_another_model",
            strange=Expected("compatibility.differs_from_published", key="patch_size", value=30),
        ),
    ),
    "no weight": (
        "taew2_1",
        lambda t: {n: x for n, x in t.items() if n != "decoder.13.conv.weight"},
        Expected("checkpoint.weight_missing", missing="decoder.13.conv.weight"),
    ),
    "values that are not finite": (
        "taew2_1",
        lambda t: {n: x * float("nan") for n, x in t.items()},
        Expected("checkpoint.weight_not_finite"),
    ),
    "the larger form": (
        "taew2_1_super",
        lambda t: {"decoder.0.weight": torch.zeros(1), "decoder.1.conv.3.weight": torch.zeros(1)},
        Expected("file.network_unsupported", what="a TAEHV of its larger form (super)"),
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_light_decoder_unsuitable_file_raises_checkpoint_error(name: str, upstream: ModuleType, tmp_path: Path):
    file, change, expected = DAMAGE[name]
    tensors = network(upstream, 48 if file == "taew2_2" else 16).state_dict()
    path = write_file(tmp_path / f"{file}.safetensors", change(tensors))
    with raises_message(CheckpointError, expected) as refused:
        model = choose_partial_model([WAN], str(path), precision="float32")
        engine(8).decode(model, {"samples": torch.zeros(1, 16, 1, 2, 2)}, SilentProgress())
    assert str(path) in str(refused.value).parameters.values()


def test_light_decoder_truncated_or_pickle_file_raises_error(upstream: ModuleType, tmp_path: Path):
    path = write_file(tmp_path / "taew2_1.safetensors", network(upstream, 16).state_dict())
    path.write_bytes(path.read_bytes()[:-1000])
    with raises_message(CheckpointError, "file.safetensors_cut_off"):
        choose_partial_model([WAN], str(path))
    with pytest.raises(CheckpointError):
        choose_partial_model([WAN], str(path.rename(tmp_path / "taew2_1.pth")))
