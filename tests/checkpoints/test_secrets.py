"""Secrets stay secret, and code that comes with a checkpoint is not run."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tpu_runtime import api, redact, tokenization
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("Wan21")
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"
# Of another form than the Hub's: only its own variable tells it.
ODD_TOKEN = "my-own-gateway-key"


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        action()
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"the token {TOKEN} is not valid", "the token *** is not valid"),
        (f"https://{TOKEN}@huggingface.co/owner/model", "https://***@huggingface.co/owner/model"),
        ("http://user:pass@proxy:80/x", "http://***@proxy:80/x"),
        ("GET https://cdn/x?X-Amz-Signature=abc&y=1 200", "GET https://cdn/x?X-Amz-Signature=***&y=1 200"),
        ("https://hub/x?token=abc", "https://hub/x?token=***"),
        ("{'authorization': 'Bearer abc.def'}", "{'authorization': 'Bearer ***'}"),
        (f"{ODD_TOKEN} was refused", "*** was refused"),
        ("hf_transfer is not installed; see hf_hub_download", "hf_transfer is not installed; see hf_hub_download"),
        ("owner/model@main: 3 files", "owner/model@main: 3 files"),
    ],
)
def test_redact_replaces_secrets_with_asterisks(monkeypatch: pytest.MonkeyPatch, text: str, clean: str):
    monkeypatch.setenv("HF_TOKEN", ODD_TOKEN)
    assert redact.redact(text) == clean


def test_model_ref_url_with_token_is_redacted_in_error(caplog: pytest.LogCaptureFixture):
    model_id = f"https://user:{TOKEN}@huggingface.co/owner/model"
    sentence = error_of(lambda: ModelRef(spec_name=SPEC.name, model_id=model_id).check())
    assert "https://***@huggingface.co/owner/model" in sentence and TOKEN not in sentence + caplog.text


def test_from_pretrained_calls_disable_remote_code():
    pack = Path(api.__file__).parents[1]
    calls = [
        (path, call)
        for path in sorted(pack.rglob("*.py"))
        if path.relative_to(pack).parts[0] not in ("tests", ".venv")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained"
    ]
    assert calls
    for path, call in calls:
        said = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
        assert said.get("trust_remote_code") is False, f"{path}:{call.lineno}"


def test_load_tokenizer_custom_code_is_not_executed(tmp_path: Path):
    folder = Path(shutil.copytree(tiny.ensure_random(SPEC), tmp_path / "model"))
    (folder / "tokenizer" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    path = folder / "tokenizer" / "tokenizer_config.json"
    config = {
        **json.loads(path.read_text()),
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil"] * 2},
    }
    path.write_text(json.dumps(config))
    model = ModelRef(spec_name=SPEC.name, model_id=str(folder), precision="float32")
    # What a tokenizer.json says is all that is needed.
    assert tokenization.load_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert error_of(lambda: Runner(jax.devices()[:1]).encode(model, "a cat", "", SilentProgress())) == (
        f"{folder / 'tokenizer'} comes with code of its own, which is never run here. Use a checkpoint whose tokenizer "
        "is one of transformers' own."
    )
    assert not (tmp_path / "ran").exists()
