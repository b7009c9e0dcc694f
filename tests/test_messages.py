"""Messages of the server: every sentence for the page has a key, a text in every language, and its parameters."""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.distributed.rpc import codec, messages
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.tools import locales
from comfyui_tpu.tpu_runtime import redact
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.messages import (
    TABLE,
    Message,
    compose,
    compose_list,
    compose_term,
    find_messages,
    read_message,
    restore,
    transform,
)

ENGLISH: dict[str, str] = json.loads(TABLE.read_text())
TRANSLATIONS = sorted(path for path in TABLE.parent.glob("*.json") if path != TABLE)
PACKAGES = ("cli", "diagnostics", "distributed", "nodes", "tpu_runtime")
TREES = {
    path.relative_to(locales.ROOT).as_posix(): ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((locales.ROOT / package).rglob("*.py"))
}
# Keys that are composed from a name or a separator.
GROUPS = ("input.", "component.", "separator.")
NODE = shutil.which("node")


def holes(template: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", template))


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                called = [node.func, node.args[0]] if ast.unparse(node.func) == "functools.partial" else [node.func]
                if any(ast.unparse(function).rpartition(".")[2] == name for function in called):
                    yield file, node


def keys_in(node: ast.AST) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def list_key_uses() -> dict[str, list[tuple[str, set[str]]]]:
    """File and parameters of each use of a key; a key that is chosen before the call has those of the call."""
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for file, call in calls("compose"):
        keys = keys_in(call.args[0]) | (keys_in(call.args[1]) if len(call.args) > 1 else set())
        if isinstance(call.args[0], ast.Name) and len(call.args) == 1:
            assigned = (node for node in ast.walk(TREES[file]) if isinstance(node, ast.Assign))
            keys = {
                key
                for node in assigned
                if ast.unparse(node.targets[0]) == call.args[0].id
                for key in keys_in(node.value) & set(ENGLISH)
            }
        for key in keys:
            found.setdefault(key, []).append((file, {keyword.arg or "" for keyword in call.keywords}))
    return found


def test_message_key_uses_match_text_and_parameters():
    wrong = [
        (key, file, parameters)
        for key, uses in list_key_uses().items()
        for file, parameters in uses
        if key not in ENGLISH or (parameters and parameters != holes(ENGLISH[key]))
    ]
    assert wrong == []


def test_message_keys_are_all_used():
    assert [key for key in ENGLISH.keys() - list_key_uses().keys() if not key.startswith(GROUPS)] == []


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_message_translations_have_same_keys_and_parameters(path: Path):
    translated = json.loads(path.read_text())
    assert translated.keys() == ENGLISH.keys()
    assert [key for key, text in translated.items() if holes(text) != holes(ENGLISH[key])] == []
    assert list(translated) == sorted(translated)


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_message_input_names_match_node_labels(path: Path):
    translated = json.loads(path.read_text())
    labels = json.loads((locales.TRANSLATIONS / path.name).read_text())["sentences"]
    named = {each.name: each.label for node in DECLARATIONS.values() for each in node.inputs}
    for key, text in ENGLISH.items():
        if key.startswith("input.") and text in {*named, *named.values()}:
            assert translated[key] == labels[named.get(text, text)], key


# Files whose sentences the page does not show.
UNSHOWN = {
    "diagnostics": "the command line",
    "nodes/headless": "the command line",
    "nodes/graphs/graph.py": "the command line",
    "nodes/comfyui/routes.py": "answers to bodies that the page does not send",
    "nodes/comfyui/core_loaders.py": "tooltips, which locales/ has",
    "nodes/inputs.py": "tooltips, which locales/ has",
    "tpu_runtime/cache/store.py": "the log",
    "tpu_runtime/cache/xla_cache.py": "the log",
    "tpu_runtime/messages.py": "developers",
    "distributed/multihost/follower.py": "another host's terminal",
    "distributed/rpc/codec.py": "developers",
    "tpu_runtime/monitor/stats_feed.py": "a runtime that does not answer",
    "tpu_runtime/monitor/metrics_service.py": "a parameter of another message",
    "tpu_runtime/plan/findings.py": "a report for developers",
}
# Files whose texts outside functions are tooltips, which `locales/` has, or upstream prompts.
DECLARING = re.compile(r"nodes/\w+\.py|tpu_runtime/models/.*")
SENTENCE = re.compile(r"[^.][.!?](?: ?\{\})*$")


def is_apart(node: ast.AST) -> bool:
    """A docstring, a line of the log, a tooltip, an assertion."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node).startswith("log.")
    return isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg in ("description", "tooltip"))


def sentences(tree: ast.AST) -> set[str]:
    left = {id(part) for node in ast.walk(tree) if is_apart(node) for part in ast.walk(node)}
    left |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = set()
    for node in ast.walk(tree):
        if id(node) in left or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        if " " in text.strip() and SENTENCE.search(text):
            found.add(text)
    return found


def test_sentences_for_page_have_message_keys():
    found = {}
    for file, tree in TREES.items():
        if file.startswith(("cli", "distributed/fleet", *UNSHOWN)):
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for root in functions if DECLARING.fullmatch(file) else [tree]:
            found |= dict.fromkeys(sentences(root), file)
    assert found == {}
    assert [name for name in UNSHOWN if not (locales.ROOT / name).exists()] == []


def test_message_in_checkpoint_error_keeps_key_and_parameters():
    error = CheckpointError(nested_message())
    assert str(error) == "Flow: height is 7; it must be a whole number between 1 and 5."
    outer = compose("remote.from", address="tpu:1", text=ValueError(str(error)))
    assert outer == f"tpu:1: {error}"
    assert outer.parameters["text"].key == "settings.input"


def nested_message() -> Message:
    problem = compose("settings.not_whole_number", value=7, low=1, high=5)
    return compose("settings.input", title="Flow", name=compose_term("input", "height"), problem=problem)


def test_message_with_secret_is_redacted_in_parameters():
    token = "hf_" + "a" * 20
    error = CheckpointError(compose("remote.from", address="tpu:1", text=f"sent {token}\x1b"))
    assert token not in json.dumps(find_messages(str(error)))
    assert str(error).parameters["text"] == f"sent {redact.HIDDEN}\\x1b"


def test_find_messages_and_restore_round_trip():
    described = json.loads(json.dumps(find_messages({"notes": ["plain", nested_message()], "count": 1})))
    assert list(described) == [nested_message()]
    again = restore(str(nested_message()[:]), described)
    assert isinstance(again, Message) and again.describe() == nested_message().describe()
    assert restore("plain", described) == "plain" and restore("plain", None) == "plain"
    assert not isinstance(restore("other", {"other": nested_message().describe()}), Message)


def test_codec_round_trip_keeps_message():
    head, body = codec.pack(messages.StatusText(nested_message()))
    received = codec.unpack(codec.read_header(head, 0)[1], body, (messages.StatusText,))
    assert received.text == nested_message() and received.text.describe() == nested_message().describe()


DEEP = {"text": "", "key": "", "parameters": {}}
for _ in range(20):
    DEEP = {"text": "", "key": "", "parameters": {"of": DEEP}}


@pytest.mark.parametrize(
    "value",
    [
        None, [], "text", {}, {"text": "a"}, {"text": 1, "key": "", "parameters": {}}, DEEP,
        {"text": "a", "key": [], "parameters": {}}, {"text": "a", "key": "", "parameters": {"a": 1}},
        {"text": "a" * 10**6, "key": "", "parameters": {}}, {"text": "a", "key": "", "parameters": []},
    ],
)  # fmt: skip
def test_read_message_invalid_value_raises_value_error(value: object):
    with pytest.raises(ValueError, match="a message is"):
        read_message(value)


def test_transform_of_plain_text_returns_plain_text():
    assert type(transform("a", str.upper)) is str
    assert transform(nested_message(), str.upper).parameters["title"] == "FLOW"


SCRIPT = """
globalThis.fetch = async (url) => ({ ok: true, json: async () => JSON.parse(await readFile(url, "utf-8")) });
const { remember, speak, term, understood } = await import(process.argv[1]);
const [found, texts] = JSON.parse(process.argv[2]);
await speak("zh");
remember(found);
console.log(JSON.stringify([texts.map(understood), term("component.text_encoder", ""), term("component.other", "x")]));
"""


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_nested_message_is_translated_throughout():
    parts = compose_list([compose("took.part", name=compose("took.loading"), seconds="1.0", pace=""), "b"])
    took = compose("took.total_and_parts", total_s="2.0", texts=parts)
    texts = [nested_message(), f"length - {nested_message()}\n", took, "not known", "__proto__"]
    script = f'import {{ readFile }} from "node:fs/promises"; {SCRIPT}'
    module = (locales.ROOT / "web" / "monitor" / "i18n.mjs").as_uri()
    command = [str(NODE), "--input-type=module", "-e", script, module, json.dumps([find_messages(texts), texts])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    said, known, other = json.loads(ended.stdout)
    assert said == [
        "Flow：高度为 7；必须是介于 1 和 5 之间的整数。",
        "length - Flow：高度为 7；必须是介于 1 和 5 之间的整数。\n",
        "用时 2.0 秒：加载 1.0 秒、b",
        "not known",
        "__proto__",
    ]
    assert (known, other) == ("文本编码器", "x")
