"""What a wrong model id or a damaged checkpoint says, word for word, and that nothing was loaded before."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import pytest
from comfyui_tpu.tpu_runtime import checkpoint, hub, stage_files, stages, tiny
from comfyui_tpu.tpu_runtime.engine import Engine
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import Silent
from comfyui_tpu.tpu_runtime.stages import ModelRef
from safetensors.torch import load_file, save_file

SPEC = spec_for_family("Wan21")


def model(model_id: str | Path, **options) -> ModelRef:
    return ModelRef(spec_name=SPEC.name, model_id=str(model_id), precision="float32", **options)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint of our own to damage."""
    return Path(shutil.copytree(tiny.ensure(SPEC), tmp_path / "model"))


@pytest.mark.parametrize(
    ("model_id", "sentence"),
    [
        (
            "  ",
            "Wan 2.1 T2V 14B: model_id is empty. Enter a Hugging Face id such as Wan-AI/Wan2.1-T2V-14B-Diffusers, a "
            "folder in diffusers layout, or tiny/wan21.",
        ),
        ("tiny/flux2", "Wan 2.1 T2V 14B: model_id is tiny/flux2; its built-in checkpoint is tiny/wan21."),
        (
            "/no/such/folder",
            "Wan 2.1 T2V 14B: model_id is /no/such/folder; there is no such folder (looked at the path itself) and it "
            "is not a Hugging Face id (owner/name) such as Wan-AI/Wan2.1-T2V-14B-Diffusers.",
        ),
    ],
)
def test_ids_that_name_nothing(model_id: str, sentence: str):
    with pytest.raises(ValueError) as error:
        stages.check_model(model(model_id))
    assert str(error.value) == sentence


def test_a_folder_that_is_not_a_model(tmp_path: Path):
    with pytest.raises(ValueError) as error:
        stages.check_model(model(tmp_path))
    assert str(error.value) == (
        f"Wan 2.1 T2V 14B: the folder {tmp_path} has no model_index.json; it is not a model in diffusers layout. "
        "Choose the folder that holds model_index.json, transformer/, vae/."
    )


def test_another_familys_checkpoint(copied: Path):
    (copied / "model_index.json").write_text(json.dumps({"_class_name": "Flux2Pipeline"}))
    with pytest.raises(ValueError) as error:
        stages.check_model(model(copied))
    assert str(error.value) == (
        f"Wan 2.1 T2V 14B: the checkpoint {copied} is a Flux2Pipeline; this node needs a WanPipeline, such as "
        "Wan-AI/Wan2.1-T2V-14B-Diffusers."
    )


def test_a_component_of_another_class(copied: Path):
    config = copied / "transformer" / "config.json"
    config.write_text(config.read_text().replace("WanTransformer3DModel", "CogVideoXTransformer3DModel"))
    with pytest.raises(ValueError, match="transformer is a CogVideoXTransformer3DModel; Wan 2.1 T2V 14B needs a Wan"):
        stages.check_model(model(copied))


def test_a_truncated_file_is_found_before_anything_is_loaded(copied: Path):
    path = copied / "transformer" / "diffusion_pytorch_model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError) as error:
        stages.check_model(model(copied))
    assert str(error.value).startswith(f"{path} is not a whole safetensors file (")
    assert str(error.value).endswith("it was probably cut off while downloading. Delete it and download it again.")


def test_a_missing_shard(copied: Path):
    (copied / "vae" / "diffusion_pytorch_model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        stages.check_model(model(copied))
    assert str(error.value) == (
        f"{copied / 'vae'}: 1 of 3 weight files are missing: diffusion_pytorch_model-00003-of-00003.safetensors. "
        "Download the checkpoint again."
    )


@pytest.fixture
def runner() -> Engine:
    return Engine(jax.devices()[:3])


def test_a_missing_weight(copied: Path, runner: Engine):
    path = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.block.1.layer.0.SelfAttention.k.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError) as error:
        runner.encode(model(copied), "cat", "", Silent())
    assert str(error.value) == (
        f"{copied / 'text_encoder'}: the weight encoder.block.1.layer.0.SelfAttention.k.weight is missing; the "
        "checkpoint is incomplete."
    )


def test_a_nan_weight(copied: Path, runner: Engine):
    path = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ValueError) as error:
        runner.encode(model(copied), "cat", "", Silent())
    assert str(error.value) == (
        f"{path}: the weight encoder.block.1.layer.1.DenseReluDense.wo.weight holds NaN or infinity; the file is "
        "damaged. Download it again."
    )
    assert runner.residency.list() == ()


def test_a_folder_of_comfyuis_models_is_found_by_name(copied: Path):
    ref = model("model", folders=("/nowhere", str(copied.parent)))
    stages.check_model(ref)
    assert ref.locate().root == copied


def test_a_single_weight_file_and_the_other_name_of_the_embedding_load_too(copied: Path, runner: Engine):
    path = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    assert "shared.weight" in tensors
    expected = runner.encode(model(copied), "cat", "", Silent())[0][0][0]
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, path)
    runner.free()
    runner.forget_prompts()
    assert (runner.encode(model(copied), "cat", "", Silent())[0][0][0] == expected).all()


def test_cancelling_while_loading_leaves_nothing_behind(copied: Path, runner: Engine):
    class Cancelled(Exception):
        pass

    class CancelWhileLoading(Silent):
        def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
            if unit == "MiB":
                raise Cancelled

    with pytest.raises(Cancelled):
        runner.encode(model(copied), "cat", "", CancelWhileLoading())
    assert runner.residency.list() == ()
    assert runner.encode(model(copied), "cat", "", Silent())


def test_a_stage_folder_of_another_model(tmp_path: Path):
    (tmp_path / stage_files.CONFIG).write_text(json.dumps({"model_name": "cogvideox1.5-5b"}))
    with pytest.raises(ValueError) as error:
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
    assert str(error.value) == f"{tmp_path} was made by cogvideox1.5-5b; it cannot be continued with wan2.1-t2v-14b."


def test_missing_and_damaged_stage_files(tmp_path: Path):
    with pytest.raises(ValueError, match=r"stage2_latents.safetensors is missing; run `comfyui-tpu denoise --folder"):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
    (tmp_path / stage_files.LATENTS).write_bytes(b"damaged")
    with pytest.raises(
        ValueError, match=r"stage2_latents.safetensors is damaged \(.*\); delete it and run `comfyui-tpu denoise` again"
    ):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))


class _Gated(BaseHTTPRequestHandler):
    """Answers as the Hub does for a gated repository without a token: its listing is public, its files are not."""

    def do_GET(self) -> None:
        if "/resolve/" in self.path or "/missing" in self.path:
            return self.refuse()
        names = ("model_index.json", "text_encoder/config.json")
        answer = {
            "id": "owner/gated", "sha": "0" * 40, "private": False, "gated": "auto", "downloads": 0, "tags": [],
            "siblings": [{"rfilename": name} for name in names],
        }  # fmt: skip
        tree = [{"type": "file", "path": name, "size": 10, "oid": "0" * 40} for name in names]
        body = json.dumps(tree if "/tree/" in self.path else answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self) -> None:
        gated = "/missing" not in self.path
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def gated_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def encode_with_hub(tmp_path: Path) -> Callable[[str, str], subprocess.CompletedProcess]:
    """Runs `comfyui-tpu encode` in a process of its own: the Hub's address is read when its client is imported."""

    def run(endpoint: str, model_id: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
        environment.pop("HF_TOKEN", None)
        script = Path(sys.executable).with_name("comfyui-tpu")
        command = [str(script), "encode", "--folder", str(tmp_path), "--model", model_id]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_a_gated_repository_without_a_token(gated_hub: str, encode_with_hub: Callable):
    result = encode_with_hub(gated_hub, "owner/gated")
    assert result.returncode == 2
    assert (
        "owner/gated is gated on the Hugging Face Hub. Accept its terms at https://huggingface.co/owner/gated, then "
        "run: hf auth login (or set HF_TOKEN)." in result.stderr
    )


def test_a_repository_that_does_not_exist(gated_hub: str, encode_with_hub: Callable):
    result = encode_with_hub(gated_hub, "owner/missing")
    assert result.returncode == 2
    assert (
        "owner/missing was not found on the Hugging Face Hub, or it is private. Check the spelling; for a private "
        "model run: hf auth login (or set HF_TOKEN)." in result.stderr
    )


def test_the_hub_is_asked_once_for_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Stages ask for their folders at every chunk; the Hub's answer is a request over the network."""
    (tmp_path / "vae").mkdir()
    asked = []
    monkeypatch.setattr(hub, "download", lambda model_id, part, progress: asked.append(part) or tmp_path)
    found = checkpoint.locate(SPEC, "owner/model")
    assert {found.folder("vae", Silent()) for _ in range(3)} == {tmp_path / "vae"}
    assert asked == ["vae"]


def test_no_network(encode_with_hub: Callable):
    result = encode_with_hub("http://127.0.0.1:9", "owner/model")
    assert result.returncode == 2
    assert (
        "text_encoder of owner/model is not on this machine and the Hugging Face Hub cannot be reached. With a "
        'network, run: hf download owner/model --include "text_encoder/*" "model_index.json"; or set model_id to a '
        "local folder." in result.stderr
    )


def test_only_the_component_asked_for_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = {}

    def snapshot_download(model_id: str, *, allow_patterns: list[str], tqdm_class: type) -> str:
        asked.update(model_id=model_id, patterns=allow_patterns)
        (tmp_path / "vae").mkdir()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = checkpoint.locate(SPEC, "owner/model")
    assert found.folder("vae", Silent()) == tmp_path / "vae"
    assert asked == {"model_id": "owner/model", "patterns": ["vae/*", "model_index.json"]}


def test_a_download_shows_its_bytes_and_can_be_cancelled():
    class Cancelled(Exception):
        pass

    class Host(Silent):
        cancelled = False
        shown: list = []

        def text(self, message: str) -> None:
            self.shown.append(message)

        def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
            self.shown.append((done, total, unit))

        def check_cancelled(self) -> None:
            if self.cancelled:
                raise Cancelled

    host = Host()
    bar = hub._bar(host, "Downloading vae of owner/model")(total=8 * 2**20, unit="B")
    bar.update(3 * 2**20)
    assert host.shown == ["Downloading vae of owner/model", (3, 8, "MiB")]
    host.cancelled = True
    with pytest.raises(Cancelled):
        bar.update(1)
