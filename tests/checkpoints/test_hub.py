"""Models on the Hugging Face Hub: what is asked for and when, what a failing Hub or disk says, and no secrets."""

import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import jax
import pytest
import torch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.hunyuan15 import SAMPLER
from comfyui_tpu.tests.support.fake_hub import Answer, FakeHub
from comfyui_tpu.tests.support.host import Runner, new_prompt
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tests.support.patience import PATIENCE_S
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, hub, model_ref, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine.prompt_cache import PromptCache
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("Wan21")
HUNYUAN, HUNYUAN_I2V = spec_for_family("HunyuanVideo15"), lookup_spec("hunyuanvideo1.5-i2v-720p")
WAN22, COGVIDEOX = spec_for_family("Wan22I2V"), spec_for_family("CogVideoX")
ID = "owner/model"
MODEL = ModelRef(spec_name=SPEC.name, model_id=ID, precision="float32")
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"
# Of another form than the Hub's: only its own variable tells it.
ODD_TOKEN = "my-own-gateway-key"


@pytest.fixture
def fake(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """A hub with the built-in checkpoint as `owner/model`, and a cache of the test's own."""
    server.use(monkeypatch, tmp_path / "hf", {ID: tiny.ensure_random(SPEC)})
    return server


def copy_with_index(folder: Path, spec=SPEC, **index: object) -> Path:
    """A copy of a built-in checkpoint whose index says something else."""
    shutil.copytree(tiny.ensure_random(spec), folder)
    said = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**said, **index}))
    return folder


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        action()
    return str(error.value)


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_encode_hub_model_wrong_index_fetches_index_only(fake: FakeHub, tmp_path: Path):
    """Wan 2.2 T2V-A14B in the Wan 2.1 nodes: nothing but its index is fetched, and its second expert is named."""
    second = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}
    fake.repositories[ID] = copy_with_index(tmp_path / "experts", **second)
    sentence = error_of(lambda: Runner(jax.devices()[:1]).encode(MODEL, "a cat", "", SilentProgress()))
    unknown = "transformer_2 (WanTransformer3DModel) and boundary_ratio 0.875"
    assert_message(sentence, "compatibility.component_unknown", unknown=unknown)
    assert fake.served() == ["model_index.json"]
    # From now on it is known without a network, before anything runs.
    fake.asked.clear()
    assert error_of(lambda: MODEL.check()) == sentence
    assert not fake.asked


def test_encode_hub_model_wrong_config_fetches_no_weights(fake: FakeHub, tmp_path: Path):
    fake.repositories[ID] = copy_with_index(tmp_path / "other")
    config = tmp_path / "other" / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "z_dim": 48}))
    sentence = error_of(lambda: Runner(jax.devices()[:1]).encode(MODEL, "a cat", "", SilentProgress()))
    state = Expected("compatibility.has_value", value=48)
    assert_message(
        sentence, "compatibility.config_unsupported", key="z_dim", state=state, folder="vae", model_id=ID, need=16
    )
    assert "vae/config.json" in fake.served() and not fake.weights()
    assert error_of(lambda: MODEL.check()) == sentence


def test_encode_hub_model_fetches_only_files_of_the_stage(fake: FakeHub, monkeypatch: pytest.MonkeyPatch):
    runner = Runner(jax.devices()[:1])
    local = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
    prompt = new_prompt()
    expected = runner.encode(local, prompt, "", SilentProgress())[0][0][0]
    assert (runner.encode(MODEL, prompt, "", SilentProgress())[0][0][0] == expected).all()
    assert fake.served()[0] == "model_index.json"
    assert {name.split("/")[0] for name in fake.weights()} == {"text_encoder"}
    fetched = fake.served()
    assert len(set(fetched)) == len(fetched), "a file was fetched twice"
    # Again, and with a Hub that does not answer: everything is here.
    runner.prompt_cache = PromptCache()
    runner.free()
    fake.asked.clear()
    runner.encode(MODEL, prompt, "", SilentProgress())
    assert not fake.served()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    runner.free()
    assert (runner.encode(MODEL, "a dog", "", SilentProgress())[0][0][0] != expected).any()
    # A stage whose weights are not here says so.
    what = Expected("hub.file_of_model", name="vae", model_id=ID)
    with raises_message(ValueError, "hub.unreachable", what=what, why_lost="hub.offline_is_set", model_id=ID):
        runner.decode(MODEL, {"samples": expected.new_zeros(1, 16, 1, 10, 14)}, SilentProgress())


def test_denoise_hub_model_fetches_denoiser_weights(fake: FakeHub):
    """Which kernel runs depends on the weights: a Hub model's have to be fetched for that."""
    fake.repositories[ID] = tiny.ensure_random(COGVIDEOX)
    model = ModelRef(spec_name=COGVIDEOX.name, model_id=ID, precision="float32")
    settings = COGVIDEOX.settings(height=64, width=64, num_frames=1, num_inference_steps=1, guidance_scale=1.0)
    prompt = [[torch.ones(1, 226, 40), {"tpu_family": COGVIDEOX.family}]]
    found = Runner(jax.devices()[:1]).denoise(model, settings, prompt, None, SilentProgress())["samples"]
    assert {name.split("/")[0] for name in fake.weights()} == {"transformer"}
    assert found.shape == (1, 16, 1, 8, 8)


def test_encode_hub_model_cached_prompt_fetches_no_text_encoder(fake: FakeHub):
    """Their key is the commit's, not that of files which may not be here yet."""
    runner, progress = Runner(jax.devices()[:1]), SilentProgress()
    before = MODEL.locate().identity("text_encoder", progress)
    runner.encode(MODEL, "a bird", "", progress)
    assert MODEL.locate().identity("text_encoder", progress) == before
    (Path(hub.find_cached(ID) or "") / "text_encoder" / "model.safetensors").unlink()
    fake.asked.clear()
    assert runner.encode(MODEL, "a bird", "", progress) and runner.counts["encode"] == 1
    assert not fake.weights()


def test_hub_model_new_commit_changes_identity(fake: FakeHub, tmp_path: Path):
    fake.repositories[ID] = copy_with_index(tmp_path / "first")
    before = MODEL.locate().identity("vae", SilentProgress())
    (tmp_path / "first" / "README.md").write_text("new")
    assert MODEL.locate().identity("vae", SilentProgress()) != before


def test_fetch_weights_skips_shards_without_loaded_tensors(fake: FakeHub):
    """The decoder of a VAE of three files, then its encoder: each file once, none for nothing."""
    fake.repositories[ID] = tiny.ensure_random(WAN22)
    found = checkpoint.locate(WAN22, ID)
    found.fetch_weights(WAN22.component("vae_decoder"), SilentProgress())
    decoder = sorted(fake.weights())
    assert decoder == [f"vae/diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (2, 3)]
    found.fetch_weights(WAN22.component("vae_encoder"), SilentProgress())
    assert len(fake.weights()) == 3 == len(set(fake.weights()))


def test_fetch_weights_skips_code_and_pickles(fake: FakeHub, tmp_path: Path):
    folder = copy_with_index(tmp_path / "more")
    for name in (
        "tokenizer/tokenizer.py",
        "transformer/diffusion_pytorch_model.bin",
        "README.md",
        "flux2-dev.safetensors",
    ):
        (folder / name).write_text("x")
    fake.repositories[ID] = folder
    found = MODEL.locate()
    for component in SPEC.components:
        found.fetch_weights(component, SilentProgress())
    assert {Path(name).suffix for name in fake.served()} == {".json", ".safetensors"}
    assert "flux2-dev.safetensors" not in fake.served()


@pytest.mark.parametrize(
    ("name", "spec", "task"),
    [
        ("owner/480p_i2v", HUNYUAN_I2V, "i2v"),
        ("owner/720p_i2v_distilled", HUNYUAN_I2V, "t2v"),
        ("owner/480p_t2v", HUNYUAN, "i2v"),
        ("owner/720p", lookup_spec("hunyuanvideo1.5-i2v-480p-step-distilled"), "t2v"),
    ],
)
def test_resolve_variant_hub_model_uses_index_and_configs(fake: FakeHub, tmp_path: Path, name: str, spec, task: str):
    """Neither its name decides, nor `task_type`: one published text-to-video checkpoint calls itself i2v."""
    folder = copy_with_index(tmp_path / "model", spec)
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "task_type": task}))
    fake.repositories[name] = folder
    for asking in (HUNYUAN, HUNYUAN_I2V):
        # Not known yet, and nobody asks while a workflow is only looked at.
        assert model_ref.resolve_variant(asking, name) is asking
    assert not fake.asked
    for asking in (HUNYUAN, HUNYUAN_I2V):
        assert model_ref.resolve_variant(asking, name, progress=SilentProgress()) is spec
    assert "model_index.json" in fake.served() and not fake.weights()
    fake.asked.clear()
    assert model_ref.resolve_variant(HUNYUAN, name) is spec and not fake.asked


def test_cli_encode_resolves_variant_of_hub_model(fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fake.repositories["owner/480p"] = tiny.ensure_random(HUNYUAN_I2V)
    arguments = ["encode", "--folder", str(tmp_path), "--family", HUNYUAN.family, "--model", "owner/480p"]
    assert cli.main(arguments) == 2
    assert "HunyuanVideo 1.5 I2V starts from one image, but none was given." in capsys.readouterr().err


def test_validate_constants_hub_model_uses_no_network(fake: FakeHub):
    """A model that is not here may be on the Hub: that shows when it runs."""
    fake.repositories.clear()
    SAMPLER.validate_constants(Folders(), {"model_id": "owner/unknown"})
    assert not fake.asked


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_hub_missing_repository_raises_value_error(fake: FakeHub):
    fake.repositories.clear()
    assert_message(error_of(lambda: MODEL.locate().home(SilentProgress())), "hub.not_found", model_id=ID)


@pytest.mark.parametrize(("status", "given_token"), [(401, ""), (403, "hub.account_without_access")])
def test_hub_gated_repository_raises_value_error(fake: FakeHub, status: int, given_token: str):
    """Its listing is public, its files are not."""
    fake.answers["/resolve/"] = Answer(status=status, headers={"X-Error-Code": "GatedRepo"})
    assert_message(
        error_of(lambda: MODEL.locate().home(SilentProgress())), "hub.gated", model_id=ID, given_token=given_token
    )


def test_hub_repository_without_index_raises_value_error(fake: FakeHub, tmp_path: Path):
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "model.pt").write_text("x")
    fake.repositories[ID] = tmp_path / "original"
    sentence = error_of(lambda: MODEL.locate().home(SilentProgress()))
    assert_message(sentence, "hub.not_diffusers_layout", model_id=ID, title="model_index.json")


def test_hub_repository_without_safetensors_raises_value_error(fake: FakeHub, tmp_path: Path):
    folder = copy_with_index(tmp_path / "pickles")
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "pytorch_model.bin")
    fake.repositories[ID] = folder
    found = MODEL.locate()
    sentence = error_of(lambda: found.fetch_weights(SPEC.component("text_encoder"), SilentProgress()))
    missing = "text_encoder/model.safetensors"
    assert_message(sentence, "hub.files_not_there", model_id=ID, missing=missing, hint="hub.no_safetensors")


def test_hub_offline_after_index_raises_value_error(fake: FakeHub, monkeypatch: pytest.MonkeyPatch):
    model_ref.resolve_variant(HUNYUAN, ID, progress=SilentProgress())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    what = Expected("hub.file_of_model", name="configuration", model_id=ID)
    sentence = error_of(lambda: MODEL.locate().home(SilentProgress()))
    assert_message(sentence, "hub.unreachable", what=what, why_lost="hub.offline_is_set", model_id=ID)


def test_hub_rate_limit_after_index_raises_value_error(fake: FakeHub):
    """Its client takes what is here, though that is the index alone."""
    model_ref.resolve_variant(HUNYUAN, ID, progress=SilentProgress())
    fake.answers["/api/"] = Answer(status=429, headers={"Retry-After": "42"})
    retry_time = Expected("hub.in_seconds", seconds=42)
    sentence = error_of(lambda: MODEL.locate().home(SilentProgress()))
    assert_message(sentence, "hub.too_many_requests", title="configuration", model_id=ID, retry_time=retry_time)


def test_hub_unreachable_raises_value_error(fake: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    why = f" ([Errno {errno.ECONNREFUSED}] Connection refused)"
    sentence = error_of(lambda: MODEL.locate().home(SilentProgress()))
    assert_message(sentence, "hub.unreachable", what=ID, why_lost=why, model_id=ID)


@pytest.mark.parametrize(
    ("answer", "key", "parameters"),
    [
        (
            Answer(status=429, headers={"Retry-After": "42"}),
            "hub.too_many_requests",
            {"retry_time": Expected("hub.in_seconds", seconds=42)},
        ),
        (
            Answer(status=429, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
            "hub.too_many_requests",
            {"retry_time": Expected("hub.after_time", time="2026-10-21 07:28:00 UTC")},
        ),
        (
            Answer(status=429, headers={"RateLimit": '"api";r=0;t=55'}),
            "hub.too_many_requests",
            {"retry_time": Expected("hub.in_seconds", seconds=55)},
        ),
        (Answer(status=429), "hub.too_many_requests", {"retry_time": "hub.in_a_few_minutes"}),
        (Answer(status=403), "hub.refused", {"status": 403}),
        (Answer(status=503), "hub.answered", {"status": 503, "when": "hub.hub_failed_try_later"}),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Answer) else "",
)
def test_hub_error_status_raises_value_error_without_retry(fake: FakeHub, answer: Answer, key: str, parameters: dict):
    fake.answers["/api/"] = answer
    sentence = error_of(lambda: MODEL.locate().home(SilentProgress()))
    assert_message(sentence, key, title="model_index.json", model_id=ID, **parameters)
    assert len(fake.asked) == 1, "it was asked again and again"


def test_hub_cached_config_is_used_while_hub_is_down(fake: FakeHub):
    MODEL.locate().home(SilentProgress())
    fake.answers["/"] = Answer(status=429, headers={"Retry-After": "1000"})
    assert MODEL.locate().config(SPEC.component("vae_decoder"), SilentProgress())


FULL = Expected("hub.disk_full", title="text_encoder", model_id=ID)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            Expected(
                "hub.disk_full",
                title="text_encoder",
                model_id=ID,
                place=re.compile("/hf$"),
                free=Expected("hub.space_left", free=re.compile(r"^\d+\.\d$")),
                elsewhere="hub.set_hf_home",
            ),
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), FULL),
        (RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"), FULL),
        (
            PermissionError(errno.EACCES, "Permission denied", "/data/hf/blobs/x"),
            Expected(
                "hub.folder_not_writable",
                path="/data/hf/blobs/x",
                strerror="Permission denied",
                title="text_encoder",
                model_id=ID,
            ),
        ),
        (
            OSError(errno.EROFS, "Read-only file system"),
            Expected(
                "hub.folder_not_writable",
                path=re.compile("/hf$"),
                strerror="Read-only file system",
                title="text_encoder",
                model_id=ID,
            ),
        ),
        (
            RuntimeError("Data processing error: CAS service error"),
            Expected("hub.download_broke_off", title="text_encoder", model_id=ID),
        ),
    ],
    ids=["full", "quota", "full-by-xet", "no-permission", "read-only", "broken-off"],
)
def test_fetch_weights_disk_error_raises_value_error(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: Expected
):
    found = MODEL.locate()
    found.home(SilentProgress())

    def snapshot_download(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with raises_message(ValueError, expected):
        found.fetch_weights(SPEC.component("text_encoder"), SilentProgress())


def test_hub_cache_path_that_is_a_file_raises_value_error(fake: FakeHub, tmp_path: Path):
    (tmp_path / "hf").write_text("in the way")
    sentence = error_of(lambda: MODEL.locate().home(SilentProgress()))
    path = re.compile(f"^{re.escape(str(tmp_path / 'hf'))}")
    assert_message(sentence, "hub.folder_not_writable", path=path, title="model_index.json", model_id=ID)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, ODD_TOKEN])
def test_hub_error_with_echoed_token_is_redacted(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, token: str
):
    """In the environment and in the address; the answer, the library's errors and its log lines all hold it."""
    monkeypatch.setenv("HF_TOKEN", token)
    address = fake.url.replace("http://", f"http://user:{token}@")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    said = f"the token {token} may not do that, see {address}/settings?token={token}"
    fake.answers["/api/"] = Answer(status=500, headers={"X-Error-Message": said}, body=said.encode())
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ValueError) as error:
        MODEL.locate().home(SilentProgress())
    trace = "".join(traceback.format_exception(error.value))
    assert token in str(fake.authorization) or "Basic" in str(fake.authorization), "no token was sent"
    assert "_RedactedCause: HfHubHTTPError" in trace and "HTTP Request" in caplog.text
    for text in (str(error.value), trace, caplog.text):
        assert token not in text


@pytest.mark.slow
def test_cli_encode_debug_output_has_no_token(fake: FakeHub, tmp_path: Path):
    """In a process of its own, with every log line and a traceback: it is in the environment and in the answer."""
    fake.answers["/api/"] = Answer(status=403, headers={"X-Error-Message": f"no rights for {TOKEN}"})
    environment = {**os.environ, "HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    script = "import logging; logging.basicConfig(level=0); from comfyui_tpu.cli.main import main; main()"
    command = [sys.executable, "-c", script, "encode", "--folder", str(tmp_path), "--model", ID, "--debug"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert fake.authorization == f"Bearer {TOKEN}"
    assert "The Hugging Face Hub refuses model_index.json of owner/model (403)." in result.stderr
    assert result.stderr.count("no rights for ***") > 1 and TOKEN not in result.stdout + result.stderr
