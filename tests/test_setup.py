"""setup.py, its demo and its tests, without installing anything; `tests/installer` has the rest."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_tpu.installer import demo_and_tests, machine, terminal, venv
from comfyui_tpu.setup import list_packages
from comfyui_tpu.tpu_runtime import versions

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
def test_setup_without_verb_prints_usage(arguments):
    done = run_setup(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python3 setup.py VERB")
    said = [line.split()[0] for line in done.stdout.splitlines() if line.endswith("(needs the network)")]
    assert said == ["install", "update", "demo", "test"]
    assert done.stderr == ""


def test_setup_unknown_verb_exits_2():
    done = run_setup("dmeo")
    assert done.returncode == 2
    assert done.stderr.startswith("setup.py: 'dmeo' is not one of install, start, update, uninstall, demo, test.")


def test_setup_demo_with_arguments_is_refused():
    done = run_setup("demo", "--fast")
    assert (done.returncode, done.stderr.strip()) == (1, "demo takes no arguments; it got: --fast")


@pytest.fixture
def steps(monkeypatch):
    """What `setup.py` would install and run, in order, instead of doing it."""
    done = []
    monkeypatch.setattr(demo_and_tests, "once", lambda name, *_: done.append(name))
    monkeypatch.setattr(demo_and_tests, "install_comfyui_requirements", lambda: done.append("comfyui"))
    monkeypatch.setattr(demo_and_tests, "run", lambda command: done.append(command[1:]) or 0)
    return done


@pytest.mark.parametrize(
    ("arguments", "installed", "words"),
    [
        ([], ["base", "test", "comfyui"], demo_and_tests.spread([])),
        (["-k", "setup"], ["base", "test", "comfyui"], ["-k", "setup"]),
        (["--fast"], ["base", "test"], [*demo_and_tests.FAST, *demo_and_tests.spread([])]),
        (["-x", "--fast"], ["base", "test"], [*demo_and_tests.FAST, "-x"]),
    ],
)
def test_setup_test_fast_omits_comfyui_and_passes_arguments_to_pytest(arguments, installed, words, steps):
    """A choice of tests starts at once; a full run looks at style first, and with the slow tests at types."""
    assert demo_and_tests.test(arguments) == 0
    looked_at = demo_and_tests.STYLE if "--fast" in arguments else (*demo_and_tests.STYLE, *demo_and_tests.TYPES)
    checks = [] if {*arguments} - {"--fast"} else [list(check[1:]) for check in looked_at]
    assert steps == [*installed, *checks, ["-m", "pytest", *words]]


def test_setup_test_stops_after_type_error(steps, monkeypatch):
    monkeypatch.setattr(demo_and_tests, "run", lambda command: int("basedpyright" in command[0]))
    assert demo_and_tests.test([]) == 1


@pytest.mark.slow
def test_setup_fast_suite_covers_every_family_without_servers():
    families = ("cogvideox", "flux2", "hunyuan15", "qwen_image", "wan21", "wan22_i2v", "z_image")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        *demo_and_tests.FAST,
        "comfyui",
        "browser",
        "models",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    found = done.stdout.splitlines()
    for family in families:
        assert any(re.search(rf"test_{family}.py::test_\w+_latents_and_\w+_match_diffusers", line) for line in found), (
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
def test_is_for_backend_accepts_only_setuptools_commands(arguments, expected):
    assert setup.is_for_backend(arguments) is expected


def test_setup_egg_info_writes_metadata(tmp_path):
    done = run_setup("egg_info", "--egg-base", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [metadata] = tmp_path.glob("*.egg-info/PKG-INFO")
    text = metadata.read_text()
    assert "Name: comfyui-tpu\n" in text
    assert "Requires-Dist: torchax==0.0.13\n" in text
    assert "Requires-Dist: torch==" not in text


def option(command, name):
    return command[command.index(name) + 1]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment without uv, in which no other is there either; what its pip is set to is in a file."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setattr(venv.shutil, "which", lambda name: None)
    site = tmp_path / "venv/lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    return venv.Venv(folder=tmp_path / "venv", log=tmp_path / "install.log", root=ROOT)


@pytest.fixture
def uv(environment):
    path = environment.folder / "bin/uv"
    path.write_text("")
    return str(path)


def test_torch_commands_use_cpu_index_first_with_constraints(environment):
    first, second = environment.torch_commands(["torch"])
    assert option(first, "--index-url") == "https://download.pytorch.org/whl/cpu"
    assert (option(first, "--timeout"), option(first, "--retries")) == ("5", "0")
    assert "--index-url" not in second
    for command in (first, second):
        assert command[:3] == [environment.python, "-m", "pip"]
        assert option(command, "-c") == str(environment.constraints)
        # PyPI has no build of this version: gigabytes for CUDA are refused before they are downloaded.
        assert environment.pins(["torch"])[0] + "+cpu" in command and "--no-deps" in command


def test_uv_torch_commands_use_same_index_and_constraints(environment, uv):
    first, second = environment.torch_commands(["torch", "torchvision"])
    assert option(first, "--default-index") == "https://download.pytorch.org/whl/cpu"
    assert {"UV_HTTP_TIMEOUT=5", "UV_HTTP_RETRIES=0"} <= set(first)
    assert "--default-index" not in second and not any("=5" in word for word in second)
    for command in (first, second):
        assert command[command.index("pip") - 1] == uv and option(command, "--python") == environment.python
        assert option(command, "-c") == str(environment.constraints)
        assert {"--no-deps", *environment.pins(["torchvision"])} <= set(command)
        assert environment.pins(["torch"])[0] + "+cpu" in command


PIP_CONF = """[global]
index-url = https://mirror.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /wheels /more
cert = /etc/company.pem
trusted-host = mirror.example
[install]
constraint = /etc/cap.txt
find-links = /install
[freeze]
find-links = /elsewhere
"""


def test_uv_command_includes_pip_configuration(environment, uv, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    command = environment.install_command("x")
    pairs = list(zip(command, command[1:], strict=False))
    for pair in [
        ("--default-index", "https://mirror.example/simple"), ("--index", "https://one.example/simple"),
        ("--index", "https://two.example/simple"), ("--find-links", "/install"), ("--constraints", "/etc/cap.txt"),
        ("--allow-insecure-host", "mirror.example"), ("--index-strategy", "unsafe-best-match"),
    ]:  # fmt: skip
        assert pair in pairs, pair
    assert command.count("--find-links") == 1 and "SSL_CERT_FILE=/etc/company.pem" in command
    assert "--no-index" not in command and command[-1] == "x"
    cpu = environment.install_command("x", index="https://cpu.example")
    assert option(cpu, "--default-index") == "https://cpu.example" and cpu.count("--default-index") == 1
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    command = venv.Venv(folder=environment.folder, log=environment.log, root=ROOT).install_command("x")
    assert [after for before, after in zip(command, command[1:], strict=False) if before == "--find-links"] == [
        "/a",
        "/b",
    ]
    assert "--no-index" in command


def test_venv_make_without_uv_uses_pip(environment, monkeypatch, capsys):
    monkeypatch.setattr(venv.Venv, "is_usable", lambda *_, **__: True)
    monkeypatch.setattr(venv.Venv, "run", lambda self, command: ran.append(command) or 1)
    ran = []
    environment.make()
    assert ran == [environment.pip("install", "-c", str(environment.constraints), "uv")]
    assert "pip is used instead" in capsys.readouterr().out
    assert environment.install_command("x") == environment.pip("install", "x")


@pytest.mark.parametrize(("minor", "name"), [(11, ""), (12, "-newest"), (13, "-newest")])
def test_venv_constraints_match_python_version(minor, name, environment):
    site = next(environment.folder.glob("lib/python3*"))
    site.rename(site.with_name(f"python3.{minor}"))
    assert environment.constraints == ROOT / f"constraints{name}.txt" and environment.constraints.is_file()
    assert all(environment.pins(["torch", "torchvision", "torchaudio"]))


def test_venv_pip_uses_python_of_venv():
    words = [str(ROOT / ".venv" / "bin" / "python"), "-m", "pip", "install", "x"]
    assert demo_and_tests.VENV.pip("install", "x") == words


def test_find_pin_reads_version_from_constraints():
    assert venv.find_pin("torch", "# torch==1\ntorchax==0.0.13\ntorch==2.13.0\n") == "torch==2.13.0"
    with pytest.raises(terminal.SetupError, match=r"pin torch 0 times; they must once, as torch==VERSION"):
        venv.find_pin("torch", "torchax==0.0.13\n")


def test_environment_contains_no_cuda_build():
    assert venv.cuda_traces(sys.executable) == ""


def test_cuda_traces_detects_cuda_build_without_import(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    for name, library in (("torchvision", b"libcudart.so.13"), ("torchaudio", b"libc.so.6")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")
        (tmp_path / name / "_C.so").write_bytes(library)
    (tmp_path / "nvidia_cublas-1.dist-info").mkdir()
    (tmp_path / "nvidia_cublas-1.dist-info" / "METADATA").write_text("Name: nvidia-cublas\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert venv.cuda_traces(sys.executable) == "torch for CUDA 13.0, torchvision for CUDA, nvidia-cublas"


def test_once_runs_again_only_for_changed_key(tmp_path):
    ran = []
    for key in ("a", "a", "b", "b", "a"):
        demo_and_tests.once("base", key, lambda key=key: ran.append(key), venv=tmp_path)
    assert ran == ["a", "b", "a"]


def test_once_runs_again_after_failure(tmp_path):
    def fail():
        raise terminal.SetupError("no")

    ran = []
    demo_and_tests.once("base", "a", lambda: ran.append(1), venv=tmp_path)
    with pytest.raises(terminal.SetupError):
        demo_and_tests.once("base", "b", fail, venv=tmp_path)
    demo_and_tests.once("base", "a", lambda: ran.append(2), venv=tmp_path)
    assert ran == [1, 2]


def test_install_key_depends_on_files_folder_and_extras(tmp_path, monkeypatch):
    keys = {demo_and_tests.install_key(), demo_and_tests.install_key("test")}
    constraints = demo_and_tests.VENV.constraints.name
    for name in ("pyproject.toml", "requirements.txt", "supported.txt", constraints):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(demo_and_tests, "ROOT", tmp_path)
    keys.add(demo_and_tests.install_key())
    (tmp_path / constraints).write_text("torch==0\n")
    keys.add(demo_and_tests.install_key())
    assert len(keys) == 4
    assert demo_and_tests.install_key() == demo_and_tests.install_key()


def test_comfyui_requirements_omit_torch_and_torchvision_dependents():
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
    assert demo_and_tests.comfyui_requirements(text) == [
        "comfyui-frontend-package==1.2.3",
        "torchsde",
        "kornia_rs",
        "pydantic~=2.0",
        "av>=16.0.0",
    ]


def test_comfyui_folder_follows_environment_variable(tmp_path):
    assert machine.comfyui_folder({"COMFYUI_PATH": str(tmp_path)}) == tmp_path
    assert machine.comfyui_folder({"COMFYUI_PATH": ""}) == Path.home() / "ComfyUI"
    assert machine.comfyui_folder({}) == Path.home() / "ComfyUI"


def test_run_returns_exit_code_or_signal_number():
    assert demo_and_tests.run([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert demo_and_tests.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"]) == 143


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("no matching distribution", "line 39\nno matching distribution\n\nThis failed: installing x. The full"),
        ("OSError: [Errno 28] No space left on device", "This failed, because the disk is full: installing x. Free"),
        ("[Errno -3] Temporary failure in name resolution", "This failed, because the index of packages could not be"),
        ("error: error sending request for url (x)", "This failed, because the index of packages could not be reached"),
    ],
)
def test_venv_install_failure_logs_output_and_shows_end(last, said, environment, capsys):
    program = f"print('\\n'.join(f'line {{n}}' for n in range(40))); print({last!r}); raise SystemExit(1)"
    with pytest.raises(terminal.SetupError) as caught:
        environment.install("installing x", [sys.executable, "-c", program], advice="Do y.")
    message = str(caught.value)
    assert said in message and "line 2\n" not in message
    assert f"The full output is in {environment.log}." in message
    assert "line 2\n" in environment.log.read_text()
    assert capsys.readouterr().out == "[setup] installing x\n"


def test_every_package_of_the_tree_is_in_the_wheel():
    # The root's other folders are not part of the package, and the installer runs without one.
    others = ("tests", "benchmarks", "tools", "docs", "installer", "build")
    roots = [folder for folder in ROOT.iterdir() if folder.name not in others and not folder.name.startswith(".")]
    found = {file.parent.relative_to(ROOT) for root in roots for file in root.rglob("*.py") if file.parent != ROOT}
    assert {"comfyui_tpu", *(".".join(("comfyui_tpu", *folder.parts)) for folder in found)} == set(list_packages())


def test_requirements_contain_no_torch():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    names = {demo_and_tests.project_name(line) for line in lines}
    assert not names & {"torch", "torchvision", "torchaudio"}
    assert all("==" not in line.partition(";")[0] for line in lines if not line.startswith(("torchax", "jax")))


def test_requirements_upper_bounds_have_reasons():
    """Where nothing is known to break, supported.txt says what was run: pip takes no newer version away from others."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    bounded = [
        n for n, line in enumerate(lines) if not line.startswith("#") and re.search("<|==", line.partition(";")[0])
    ]
    assert {demo_and_tests.project_name(lines[number]) for number in bounded} == {"jax", "torchax"}
    reasons = [next(line for line in reversed(lines[:number]) if line.startswith("#")) for number in bounded]
    assert all(re.search(r"changed something used here|repairs the tables of this release", one) for one in reasons)


# ComfyUI's requirements.txt, and what those and diffusers and accelerate bring.
COMFYUIS = {"numpy", "transformers", "sentencepiece", "safetensors", "tqdm", "psutil", "av", "pillow", "aiohttp"}
BROUGHT = COMFYUIS | {"huggingface-hub", "jinja2", "packaging", "protobuf", "pyyaml"}


def test_requirements_accept_versions_of_comfyui():
    """Whatever an environment has of these satisfies us: pip leaves it. Their ranges are what doctor compares."""
    own = {each.name: each for each in versions.read_requirements(ROOT / "requirements.txt")}
    ranged = {each.name for each in versions.read_requirements(ROOT / "supported.txt")}
    assert BROUGHT <= own.keys() and ranged - BROUGHT == {"torch", "diffusers", "tpu-info"}
    assert {name for name in BROUGHT if str(own[name].specifier)} == set()
    assert {package.name for package in versions.list_packages() if not str(package.range)} <= {
        "pillow",
        "pyyaml",
        "tqdm",
    }
    comfyui = demo_and_tests.comfyui_folder(os.environ) / "requirements.txt"
    if comfyui.is_file():
        asked = {demo_and_tests.project_name(line) for line in demo_and_tests.comfyui_requirements(comfyui.read_text())}
        assert own.keys() & asked <= BROUGHT
