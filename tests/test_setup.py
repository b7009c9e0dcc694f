"""setup.py's decisions, without a network and without installing anything."""

import ast
import http.server
import importlib.util
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_setup():
    spec = importlib.util.spec_from_file_location("comfyui_tpu_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_setup()


def run_setup(*arguments):
    return subprocess.run([sys.executable, "setup.py", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",)])
def test_without_a_verb_it_only_says_how_to_use_it(arguments):
    done = run_setup(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python3 setup.py VERB")
    assert "demo" in done.stdout and "test" in done.stdout
    assert done.stderr == ""


def test_a_word_that_is_no_verb_is_named_and_ends_in_2():
    done = run_setup("dmeo")
    assert done.returncode == 2
    assert done.stderr.startswith("setup.py: 'dmeo' is not one of demo, test.")


def test_demo_refuses_arguments_before_it_installs_anything():
    done = run_setup("demo", "--fast")
    assert (done.returncode, done.stderr.strip()) == (1, "demo takes no arguments; it got: --fast")


@pytest.fixture
def steps(monkeypatch):
    """What `setup.py` would install and run, in order, instead of doing it."""
    done = []
    monkeypatch.setattr(setup, "once", lambda name, *_: done.append(name))
    monkeypatch.setattr(setup, "install_comfyui_requirements", lambda: done.append("comfyui"))
    monkeypatch.setattr(setup, "run", lambda command, _: done.append(command[1:]) or 0)
    return done


@pytest.mark.parametrize(
    ("arguments", "installed", "words"),
    [
        ([], ["base", "test", "comfyui"], setup.spread([])),
        (["-k", "setup"], ["base", "test", "comfyui"], ["-k", "setup"]),
        (["--fast"], ["base", "test"], [*setup.FAST, *setup.spread([])]),
        (["-x", "--fast"], ["base", "test"], [*setup.FAST, "-x"]),
    ],
)
def test_fast_leaves_comfyui_out_and_the_rest_goes_to_pytest(arguments, installed, words, steps):
    """A choice of tests starts at once; a whole run looks at style first, and with the slow tests at types."""
    assert setup.main(["test", *arguments]) == 0
    looked_at = setup.STYLE if "--fast" in arguments else (*setup.STYLE, *setup.TYPES)
    checks = [] if {*arguments} - {"--fast"} else [list(check[1:]) for check in looked_at]
    assert steps == [*installed, *checks, ["-m", "pytest", *words]]


def test_a_type_error_ends_the_run_before_any_test(steps, monkeypatch):
    monkeypatch.setattr(setup, "run", lambda command, environment: int("basedpyright" in command[0]))
    assert setup.main(["test"]) == 1


@pytest.mark.slow
def test_the_fast_suite_has_a_whole_run_of_every_family_and_no_server():
    families = ("cogvideox", "flux2", "hunyuan15", "wan21", "wan22_i2v")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *setup.FAST, "comfyui", "browser", "models"]
    found = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True).stdout.splitlines()
    for family in families:
        assert any(re.search(rf"test_{family}.py::test_\w*latents_and_\w+_equal_upstreams", line) for line in found), (
            family
        )
    servers = re.compile(r"^(tests/)?browser/|test_(citizen|comfyui)\.py::")
    assert not [line for line in found if servers.search(line)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["egg_info"], True),
        (["--quiet", "dist_info", "--output-dir", "x"], True),
        (["editable_wheel", "--dist-info-dir", "x"], True),
        (["bdist_wheel"], True),
        ([], False),
        (["-h"], False),
        (["demo"], False),
        (["test", "-k", "build"], False),
    ],
)
def test_only_setuptools_commands_are_handed_over(arguments, expected):
    assert setup.is_for_backend(arguments) is expected


def test_the_back_end_gets_the_metadata(tmp_path):
    done = run_setup("egg_info", "--egg-base", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [metadata] = tmp_path.glob("*.egg-info/PKG-INFO")
    text = metadata.read_text()
    assert "Name: comfyui-tpu\n" in text
    assert "Requires-Dist: torchax==0.0.13\n" in text
    assert "Requires-Dist: torch==" not in text


def option(command, name):
    return command[command.index(name) + 1]


def test_torch_is_asked_from_its_cpu_index_first_and_always_constrained():
    first, second = setup.torch_commands("torch==2.13.0", index_reachable=True)
    assert option(first, "--index-url") == "https://download.pytorch.org/whl/cpu"
    assert (option(first, "--timeout"), option(first, "--retries")) == ("5", "0")
    assert "--index-url" not in second
    for command in (first, second):
        assert option(command, "-c") == str(ROOT / "constraints.txt")
        assert "torch==2.13.0" in command and "--no-deps" in command
    assert setup.torch_commands("torch==2.13.0", index_reachable=False) == [second]


def test_pip_is_the_one_of_the_venv():
    assert setup.pip("install", "x") == [str(ROOT / ".venv" / "bin" / "python"), "-m", "pip", "install", "x"]


def test_a_pin_is_read_from_the_constraints():
    assert setup.pinned("torch", "# torch==1\ntorchax==0.0.13\ntorch==2.13.0\n") == "torch==2.13.0"
    with pytest.raises(setup.SetupError, match=r"pins torch 0 times; it must do so once, as torch==VERSION"):
        setup.pinned("torch", "torchax==0.0.13\n")


def test_what_needs_no_network_is_not_waited_for():
    started = time.monotonic()
    assert not setup.is_reachable("http://127.0.0.1:9/", 600)  # the discard port: refused at once
    assert time.monotonic() - started < 300


def test_a_server_that_refuses_is_reachable_and_one_that_is_silent_is_not(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    silence = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            if self.path == "/silent":
                silence.wait(600)
            self.send_error(403)

        def log_message(self, *arguments):
            """Nothing to the terminal."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert setup.is_reachable(f"{address}/refused", 600)
        assert not setup.is_reachable(f"{address}/silent", 0.3)
        silence.set()
        server.shutdown()


def test_this_environment_holds_no_cuda_build():
    assert setup.cuda_traces(sys.executable) == ""


def test_a_cuda_build_is_seen_without_importing_torch(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    (tmp_path / "nvidia_cublas-1.dist-info").mkdir()
    (tmp_path / "nvidia_cublas-1.dist-info" / "METADATA").write_text("Name: nvidia-cublas\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert setup.cuda_traces(sys.executable) == "torch for CUDA 13.0, nvidia-cublas"


def test_an_installation_runs_once_for_a_key_and_again_for_another(tmp_path):
    ran = []
    for key in ("a", "a", "b", "b", "a"):
        setup.once("base", key, lambda key=key: ran.append(key), venv=tmp_path)
    assert ran == ["a", "b", "a"]


def test_an_installation_that_failed_runs_again_even_for_the_key_before(tmp_path):
    def fail():
        raise setup.SetupError("no")

    ran = []
    setup.once("base", "a", lambda: ran.append(1), venv=tmp_path)
    with pytest.raises(setup.SetupError):
        setup.once("base", "b", fail, venv=tmp_path)
    setup.once("base", "a", lambda: ran.append(2), venv=tmp_path)
    assert ran == [1, 2]


def test_the_key_follows_files_folder_and_extras(tmp_path, monkeypatch):
    keys = {setup.install_key(), setup.install_key("test")}
    for name in ("pyproject.toml", "requirements.txt", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    keys.add(setup.install_key())
    (tmp_path / "constraints.txt").write_text("torch==0\n")
    keys.add(setup.install_key())
    assert len(keys) == 4
    assert setup.install_key() == setup.install_key()


def test_comfyui_requirements_lose_what_needs_torchvision_and_nothing_else():
    text = """comfyui-frontend-package==1.2.3
torch
torchsde
torchvision>=0.1
TorchAudio
kornia_rs
kornia>=0.7.1
spandrel  # upscalers

#non essential dependencies:
pydantic~=2.0
av>=16.0.0 # video
"""
    assert setup.comfyui_requirements(text) == [
        "comfyui-frontend-package==1.2.3",
        "torchsde",
        "kornia_rs",
        "pydantic~=2.0",
        "av>=16.0.0",
    ]


def test_comfyui_is_looked_for_where_the_environment_says(tmp_path):
    assert setup.comfyui_folder({"COMFYUI_PATH": str(tmp_path)}) == tmp_path
    assert setup.comfyui_folder({"COMFYUI_PATH": ""}) == Path.home() / "ComfyUI"
    assert setup.comfyui_folder({}) == Path.home() / "ComfyUI"


def test_an_exit_code_passes_and_a_signal_becomes_the_shells_number():
    assert setup.run([sys.executable, "-c", "import os; raise SystemExit(int(os.environ['CODE']))"], {"CODE": "7"}) == 7
    assert setup.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], {}) == 143


def test_pip_output_goes_to_the_log_and_its_end_to_the_user(tmp_path, monkeypatch, capsys):
    log = tmp_path / "install.log"
    monkeypatch.setattr(setup, "LOG", log)
    program = "print('\\n'.join(f'line {n}' for n in range(40))); raise SystemExit(1)"
    with pytest.raises(setup.SetupError) as caught:
        setup.install("installing x", [sys.executable, "-c", program], advice="Do y.")
    message = str(caught.value)
    assert "line 39" in message and "line 2\n" not in message
    assert message.endswith(f"This failed: installing x. pip's whole output is in {log}. Do y.")
    assert "line 2\n" in log.read_text()
    assert capsys.readouterr().out == "[setup] installing x\n"


def test_every_package_of_the_tree_is_named_in_pyproject():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = ("attention", "cli", "nodes", "sharding", "tpu_runtime")
    found = {file.parent.relative_to(ROOT) for root in roots for file in (ROOT / root).rglob("*.py")}
    assert {"comfyui_tpu", *(".".join(("comfyui_tpu", *folder.parts)) for folder in found)} == set(packages)


def test_requirements_leave_comfyuis_own_torch_alone():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    names = {setup.project_name(line) for line in lines}
    assert not names & {"torch", "torchvision", "torchaudio"}
    assert all("==" not in line.partition(";")[0] for line in lines if not line.startswith(("torchax", "jax")))


def test_an_older_python_reads_the_file_far_enough_to_say_so():
    tree = ast.parse((ROOT / "setup.py").read_text(), feature_version=(3, 7))
    _, first_import, check = tree.body[:3]
    assert ast.unparse(first_import) == "import sys"
    assert ast.unparse(check).startswith("if sys.version_info < (3, 11):\n    sys.exit(")


def test_the_root_imports_in_milliseconds_and_brings_nothing_heavy(tmp_path):
    program = (
        "import importlib.util, sys, time\n"
        f"spec = importlib.util.spec_from_file_location('strange name', {str(ROOT / '__init__.py')!r},"
        f" submodule_search_locations=[{str(ROOT)!r}])\n"
        "module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module\n"
        "started = time.process_time(); spec.loader.exec_module(module); elapsed_s = time.process_time() - started\n"
        "assert elapsed_s < 0.1, elapsed_s\n"
        "assert not {'torch', 'jax', 'comfy_api'} & set(sys.modules)\n"
        "assert sorted(module.__all__) == ['WEB_DIRECTORY', 'comfy_entrypoint']\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
