"""ComfyUI's own templates in its page: the menu entry swaps their loaders, says which, and they run. What the page
looked like is in `output/screenshots/`.
"""

import importlib.resources
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs import loader_swap
from comfyui_tpu.tests.browser.page import SCREENSHOTS, needs_browser, opened, small
from comfyui_tpu.tests.comfyui.test_core_networks import DENOISERS_BY_NAME, TEXTS, VAES, write_denoiser
from comfyui_tpu.tests.comfyui.test_core_objects import wan_files
from comfyui_tpu.tests.files import single_files, test_comfyui_encoders
from comfyui_tpu.tests.files.comfyui_oracle import saved
from comfyui_tpu.tests.support.comfyui_server import TWO_CHIPS, Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until
from PIL import Image

pytestmark = [needs_comfyui, needs_browser]

NOTICE = "#comfyui-tpu-notice"
TEMPLATES = ("video_wan2_2_14B_flf2v",)
# Minutes more.
MORE = (
    "image_flux2_klein_image_edit_4b_distilled",
    "image_qwen_Image_2512",
    "text_to_video_wan",
    "video_wan2_2_14B_t2v",
    "image_flux2_klein_text_to_image",
    "image_z_image_turbo",
    "video_wan2_2_14B_i2v",
    "video_wan2_2_5B_ti2v",
    "image_flux2",
    "image_flux2_fp8",
    "image_flux2_text_to_image",
    "image_flux2_klein_image_edit_4b_base",
    "image_z_image",
)
# ComfyUI's own has a file of nodes that it cannot import without kornia and torchvision.
SCALE = """
    import torch

    class ImageScaleToTotalPixels:
        CATEGORY, FUNCTION, RETURN_TYPES = "test", "scale", ("IMAGE",)

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {
                "image": ("IMAGE",), "upscale_method": ("STRING", {"default": "area"}),
                "megapixels": ("FLOAT", {"default": 1.0}), "resolution_steps": ("INT", {"default": 1}),
            }}

        def scale(self, image, upscale_method, megapixels, resolution_steps):
            height, width = image.shape[1:3]
            factor = (megapixels * 2**20 / (height * width)) ** 0.5
            size = [round(side * factor) for side in (height, width)]
            return (torch.nn.functional.interpolate(image.movedim(-1, 1), size).movedim(1, -1),)

    NODE_CLASS_MAPPINGS = {"ImageScaleToTotalPixels": ImageScaleToTotalPixels}
"""
# Which miniature stands for a file that a template names: the first whose pattern is in its name.
MINIATURES = {
    "z_image": "z_image",
    "lora|turbo|lightning": "style",
    "qwen_image_vae": "wan_vae",
    "qwen_image": "qwen_image",
    "qwen_2.5": "qwen25",
    "umt5": "umt5",
    "wan_2.1_vae": "wan_vae",
    "wan2.2_vae": "wan22_vae",
    "ti2v": "wan_ti2v",
    "wan.*i2v": "wan_i2v",
    "wan.*t2v": "wan_t2v",
    "mistral": "mistral",
    "qwen": "qwen3",
    "flux2-vae|small_decoder": "flux2_vae",
    "^ae": "flux_vae",
    "klein": "klein",
    "flux2_dev": "flux2",
}


# Of what network each is, by its name in the tests of networks; Wan's others are `wan_files`. Templates of klein and of
# Z-Image name one file of Qwen3, which has all layers of either.
_JOINT = {"joint_attention_dim": 3 * 64}
OF_DENOISERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "wan_i2v": ("wan 2.2 i2v", {}),
    "wan_ti2v": ("wan 2.2 ti2v", {}),
    "flux2": ("flux.2 dev", _JOINT),
    "klein": ("flux.2 klein", _JOINT),
    "z_image": ("z-image", {"cap_feat_dim": 64}),
    "qwen_image": ("qwen-image", {"joint_attention_dim": 128}),
}
OF_ENCODERS = {"mistral": "flux.2 dev", "qwen3": "z-image", "qwen25": "qwen-image"}
OF_VAES = {"flux2_vae": "flux.2", "flux_vae": "z-image", "wan22_vae": "wan 2.2 ti2v"}


def template(name: str) -> dict[str, Any]:
    """A template as the installed package has it."""
    folder = Path(str(importlib.resources.files("comfyui_workflow_templates_json")))
    return json.loads((folder / "templates" / f"{name}.json").read_text("utf-8"))


def nodes_of(workflow: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for graph in (workflow, *workflow.get("definitions", {}).get("subgraphs", [])):
        yield from graph["nodes"]


def select_templates(session: pytest.Session) -> list[str]:
    """The templates that this run tries: of the others no file is written, which takes longer than one of them."""
    calls = [getattr(item, "callspec", None) for item in session.items if item.path == Path(__file__)]
    return [call.params["name"] for call in calls if call]


class Miniatures:
    """Files of networks, each written when a template names it."""

    def __init__(self, made: Path, models: Path) -> None:
        self.made = made
        self.found = {path.stem: path for path in models.rglob("*.safetensors")}

    def file(self, name: str) -> Path:
        if name not in self.found:
            self.found[name] = self._written(name)
        return self.found[name]

    def _written(self, name: str) -> Path:
        if name in OF_DENOISERS:
            kind, more = OF_DENOISERS[name]
            one = DENOISERS_BY_NAME[kind]
            return write_denoiser(self.made, replace(one, config={**one.config, **more}), name)
        if name in OF_ENCODERS:
            ((encoder, carried),) = TEXTS[OF_ENCODERS[name]][3]
            change = test_comfyui_encoders.carrying(carried) if carried else single_files.same
            return encoder.write(self.made, name, change)
        kind, config, *_ = VAES[OF_VAES[name]]
        folder = saved(kind, self.made / f"{name} folder", **config)
        return single_files.write(self.made / f"{name}.safetensors", folder, kind)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, start_comfyui: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """With a miniature for every file that the templates name, and pictures."""
    base, made = tmp_path_factory.mktemp("comfyui"), tmp_path_factory.mktemp("files")
    models = wan_files(base / "models", made)
    miniatures = Miniatures(made, models)
    folders = {"UNETLoader": "diffusion_models", "CLIPLoader": "text_encoders", "VAELoader": "vae",
               "LoraLoaderModelOnly": "loras"}  # fmt: skip
    (base / "input").mkdir(exist_ok=True)
    for node in (node for name in select_templates(request.session) for node in nodes_of(template(name))):
        if node["type"] == "LoadImage":
            Image.new("RGB", (96, 80), "red").save(base / "input" / node["widgets_values"][0], "PNG")
        elif (folder := folders.get(node["type"])) and node.get("widgets_values"):
            file = node["widgets_values"][0]
            ours = next(ours for pattern, ours in MINIATURES.items() if re.search(pattern, file.lower()))
            target = models / folder / file
            target.is_symlink() or target.symlink_to(miniatures.file(ours))
    narrow = Path(single_files.__file__).with_name("narrow.py").read_text()
    return start_comfyui(base, packs={"scale": SCALE, "narrow": narrow}, environment=TWO_CHIPS)


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        yield page


def shrink_prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    """A queued prompt at a miniature's size."""
    for node in prompt.values():
        inputs = node["inputs"]
        for name in ("width", "height", "value", "length", "steps"):
            least = {"length": 5, "steps": 4}.get(name, 64)
            most = {"length": 5, "steps": 8}.get(name, 255)
            if isinstance(inputs.get(name), int) and not isinstance(inputs[name], bool) and inputs[name] > most:
                inputs[name] = least
        if node["class_type"] == "ComfyMathExpression":
            inputs["expression"] = "5"
        if "megapixels" in inputs:
            inputs["megapixels"] = 0.1 if node["class_type"] == "ResolutionSelector" else 0.01
        if isinstance(inputs.get("end_at_step"), int) and inputs["end_at_step"] > 4:
            inputs["end_at_step"] = 2 if inputs["start_at_step"] == 0 else 10000
        if isinstance(inputs.get("start_at_step"), int):
            inputs["start_at_step"] = min(2, inputs["start_at_step"])
    return prompt


@pytest.mark.parametrize("name", [*TEMPLATES, *(pytest.param(name, marks=pytest.mark.recorded) for name in MORE)])
def test_convert_command_swaps_core_loaders_and_template_runs(page: Any, server: Server, name: str):
    page.evaluate("(workflow) => app.loadGraphData(workflow)", template(name))
    page.evaluate("app.extensionManager.command.execute('comfyui-tpu.convert')")
    page.wait_for_selector(NOTICE)
    said = page.inner_text(NOTICE)
    assert " is now TPUUNETLoader." in said and " is now TPUCLIPLoader." in said and "stays" not in said, said
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"core-{name}.png")
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    assert not {node["class_type"] for node in prompt.values()} & set(loader_swap.LOADERS)
    with small(page):
        server.run(shrink_prompt(prompt))
    # And back.
    page.evaluate("app.extensionManager.command.execute('comfyui-tpu.convert-back')")
    page.wait_for_function(f"document.querySelector('{NOTICE}')?.innerText.includes('is now UNETLoader.')")
    kinds = page.evaluate("async () => Object.values((await app.graphToPrompt()).output).map((one) => one.class_type)")
    assert "UNETLoader" in kinds and not set(kinds) & {ours for ours, _ in loader_swap.LOADERS.values()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_page_on_a_tpu_offers_loaders_once_and_remembers_the_answer(page: Any, name: str):
    """The machine of the test has no TPU, so that the page of no other test gets an offer."""
    workflow, offers = {**template(name), "id": "33333333-3333-4333-8333-333333333333"}, []
    is_now = f"document.querySelector('{NOTICE}')?.innerText.includes('is now {{}}.')"

    def load(**changes: str) -> None:
        page.evaluate("(workflow) => app.loadGraphData(workflow)", {**workflow, **changes})

    def choose(value: str) -> None:
        page.evaluate(f"app.extensionManager.setting.set('TPU.Loaders.Offer', '{value}')")

    page.route("**/tpu/stats", lambda route: route.fulfill(json={"chips": [], "message": "TPU v6e"}))
    page.on("request", lambda request: offers.append(request.url) if request.url.endswith("/tpu/offer") else None)
    try:
        load()
        page.wait_for_selector(f"{NOTICE} >> text=with other loaders")
        said = page.inner_text(NOTICE)
        offered = ("TPUUNETLoader replaces ", "the denoiser for ", "the text encoder, ")
        assert all(part in said for part in offered), said
        page.screenshot(path=SCREENSHOTS / "core-offer.png")
        page.click(f"{NOTICE} button:text-is('Use TPU loaders')")
        page.wait_for_function(is_now.format("TPUUNETLoader"))
        page.evaluate("app.extensionManager.command.execute('comfyui-tpu.convert-back')")
        page.wait_for_function(is_now.format("UNETLoader"))
        load()  # answered
        choose("always use TPU loaders")
        load(id="11111111-1111-4111-8111-111111111111")
        page.wait_for_function(is_now.format("TPUUNETLoader"))
        choose("never offer")
        load(id="22222222-2222-4222-8222-222222222222")
        kinds = page.evaluate(
            "async () => Object.values((await app.graphToPrompt()).output).map((one) => one.class_type)"
        )
        assert "UNETLoader" in kinds and len(offers) == 2
    finally:
        page.unroute("**/tpu/stats")
        choose("ask once for each workflow")


def test_offer_endpoint_answers_hostile_prompts_with_nothing_or_an_error(server: Server):
    outside = {"class_type": "UNETLoader", "inputs": {"unet_name": "../../../etc/passwd", "weight_dtype": "default"}}
    circle = {"class_type": "KSampler", "inputs": {"model": ["1", 0], "latent_image": ["1", 0]}}
    nodes = (5, None, {"class_type": ["UNETLoader"]}, {"class_type": "UNETLoader", "inputs": 7}, outside, circle)
    for prompt in ({}, {"nodes": []}, *({"1": node} for node in nodes)):
        assert server.post("/tpu/offer", prompt) == {"changes": [], "programs": []}, prompt
    for body in ([], 3, "x"):
        assert server.post("/tpu/offer", body)["error"], body
    name = next(node["widgets_values"][0] for node in nodes_of(template(TEMPLATES[0])) if node["type"] == "UNETLoader")
    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": name, "weight_dtype": "default"}}
    size = {"width": 2**40, "height": 64, "length": 5, "batch_size": 1}
    latent = {"class_type": "EmptyHunyuanLatentVideo", "inputs": size}
    sampler = {"class_type": "KSampler", "inputs": {"model": ["1", 0], "latent_image": ["2", 0], "positive": ["3", 0]}}
    found = server.post("/tpu/offer", {"1": loader, "2": latent, "4": sampler})
    assert found["changes"] and not found["programs"]


def test_menu_lists_both_convert_commands(page: Any):
    commands = page.evaluate("app.extensionManager.command.commands.map((one) => [one.id, one.label])")
    found = {key: label for key, label in commands if key.startswith("comfyui-tpu.convert")}
    assert found["comfyui-tpu.convert"] == "Use TPU loaders in this workflow"
    assert until(lambda: len(found) == 2)
