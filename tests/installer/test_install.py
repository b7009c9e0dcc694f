"""`setup.py install`, `start`, `update` and `uninstall` with real git, venv and pip, in a world without a network."""

import contextlib
import dataclasses
import getpass
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_tpu.installer import git, install, layout, lock, machine, start, steps, terminal, uninstall, update, venv
from comfyui_tpu.tests.installer import bad_ground, small_world
from comfyui_tpu.tests.support.hosts import free_port

pytestmark = pytest.mark.slow

ROOT = small_world.ROOT
HOME = "a home"  # pip takes what stands in its variables for several words where there are spaces


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Origins, wheels, and an environment with an empty home, where nothing but these can be reached."""
    folder = tmp_path_factory.mktemp("world")
    small_world.repository(folder / "comfyui", small_world.COMFYUI, layout.COMFYUI_TAG)
    small_world.wheels(folder / "wheels")
    (folder / HOME).mkdir()
    (folder / "tmp").mkdir()
    (folder / "bin").mkdir()
    (folder / "bin/uv").symlink_to(Path(sys.executable).with_name("uv"))
    variables = {
        "HOME": str(folder / HOME), "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PIP_NO_INDEX": "1", "UV_OFFLINE": "1",
        "PIP_FIND_LINKS": str(folder / "wheels"), "TMPDIR": str(folder / "tmp"),
        "https_proxy": "http://127.0.0.1:9", "PIP_CONFIG_FILE": os.devnull,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "COMFYUI_", "GIT_"))]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(install, "_report", lambda chosen: None)  # the packages of this world are empty
        yield folder


def run_install(world, *words):
    origins = ["--comfyui-origin", str(world / "comfyui")]
    return install.main([*origins, "--yes", *words])


def killed_after(number, every, done):
    """The steps `every`, each with its name added to `done`, and with that number the last thing that happens."""

    def do(step):
        step.do()
        done.append(step.name)
        if step is every[number]:
            raise KeyboardInterrupt

    return [dataclasses.replace(step, do=lambda step=step: do(step)) for step in every]


@pytest.fixture(scope="module")
def installation(world):
    """An installation that was killed after every step, and twice within one, and went on each time."""
    chosen = layout.layout(None)
    all_steps = steps.steps
    names = [step.name for step in all_steps(chosen)]
    again = {"PyTorch": ["environment", "PyTorch"], "command": ["packages", "command"]}  # after what is broken below
    for number, name in enumerate(names):
        done = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "steps", lambda *given, n=number, done=done: killed_after(n, all_steps(*given), done))
            with pytest.raises(KeyboardInterrupt):
                run_install(world)
        assert done == again.get(name, [name])
        if name == "environment":  # as if it had been killed before pip was in it
            shutil.rmtree(next(chosen.venv.site_packages()[0].glob("pip")))
        if name == "packages":  # as if pip had been killed while it wrote these
            [site] = chosen.venv.site_packages()
            for package in ("gitdb-4.0", "einops-0.8"):
                (site / f"{package}.dist-info" / "INSTALLER").unlink()
            (site / "einops" / "__init__.py").unlink()
    assert run_install(world) == 0
    return chosen


CLONED = ("ComfyUI", "link")


@pytest.fixture
def cloned_installation(world, tmp_path):
    """What an installation without the environment is, for tests that take it apart."""
    chosen = layout.Installation(tmp_path / "a disk" / "ComfyUI", str(world / "comfyui"))
    chosen.comfyui.parent.mkdir()
    for step in steps.steps(chosen):
        if step.name in CLONED:
            step.do()
    return chosen


def test_install_resumes_after_interruptions_and_repeat_changes_nothing(world, installation, monkeypatch, capsys):
    assert sorted(path.name for path in (world / HOME).iterdir()) == ["ComfyUI"]
    assert list((world / "tmp").iterdir()) == []
    assert installation.link.resolve() == ROOT
    [site] = installation.venv.site_packages()
    assert (site / "einops" / "__init__.py").is_file() and (site / "gitdb-4.0.dist-info" / "INSTALLER").is_file()
    versions = installation.venv.versions()
    assert [versions[name] for name in steps.TORCH] == ["2.13.0+cpu", "0.28.0+cpu", "2.11.0+cpu"]
    assert "libtpu" not in versions  # there is no TPU
    assert not (installation.home / "cache").exists() and not installation.temporary.exists()
    assert git.is_unchanged(installation.comfyui) and not installation.manager.exists()
    assert versions["comfyui-manager"] == "4.2.2"
    before = small_world.listing(world / HOME, world / "tmp")
    for module in (git, venv):
        monkeypatch.setattr(module, "run_logged", lambda *_: pytest.fail("pip was run, or git"))
    assert run_install(world) == 0
    assert small_world.listing(world / HOME, world / "tmp") == before
    assert "everything is in place" in capsys.readouterr().out


def test_install_without_uv_gives_same_versions_with_pip(world, installation, monkeypatch, tmp_path):
    """The small world has a wheel of uv's name and nothing in it."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    plain = dataclasses.replace(installation.venv, folder=tmp_path / "venv", log=tmp_path / "log", variables={})
    plain.make()
    plain.install_torch(steps.TORCH)
    plain.install("installing jax", plain.constrained_command(plain.torch_requirement(), "jax"))
    assert plain.uv is None and "-m pip install" in plain.log.read_text()
    names = (*steps.TORCH, "jax")
    assert [plain.versions()[name] for name in names] == [installation.venv.versions()[name] for name in names]


def test_install_torch_refuses_cuda_build(world, installation, monkeypatch, tmp_path):
    """What PyPI has under the version that is pinned: the build for CUDA, without a local part."""
    small_world.torch(tmp_path, installation.venv.pins(["torch"])[0].partition("==")[2], cuda="13.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    before = installation.venv.versions()
    for uv in (True, False):
        each = dataclasses.replace(installation.venv, log=tmp_path / f"log {uv}")
        monkeypatch.setenv("PATH", os.environ["PATH"] if uv else "/usr/bin:/bin")
        assert (each.uv is not None) is uv
        each.run(each.pip("uninstall", "-y", "torch"))
        with pytest.raises(terminal.SetupError, match="PIP_FIND_LINKS=FOLDER python3 setup.py"):
            each.install_torch()
        assert "torch" not in each.versions()
        each.run(each.pip("install", "--no-deps", "--find-links", str(world / "wheels"), f"torch=={before['torch']}"))
    assert installation.venv.versions() == before


def test_constraints_keep_cpu_build_in_later_installations(world, installation, monkeypatch):
    """As Manager installs: pip as a process of ComfyUI, in its environment."""
    newer = world / "newer"
    newer.mkdir()
    small_world.torch(newer, "2.15.0", cuda="13.2")
    small_world.wheel(newer, "wants-newer", "1.0", requires=["torch>=2.15"])
    small_world.wheel(newer, "wants-any", "1.0", requires=["torch"])
    environment = {**install.start_environment(installation), "PIP_FIND_LINKS": f"{newer} {world / 'wheels'}"}

    def pip(*words):
        command = [installation.venv.python, "-m", "pip", "install", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert pip("--upgrade", "--upgrade-strategy=eager", "torch", "wants-any").returncode == 0
    refused = pip("wants-newer")
    assert refused.returncode == 1 and "conflict" in refused.stdout + refused.stderr
    assert installation.venv.versions()["torch"] == "2.13.0+cpu"
    installation.venv.run(installation.venv.pip("uninstall", "-y", "wants-any"))


def run_setup(*words):
    return subprocess.run([sys.executable, "setup.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_start_runs_comfyui_with_flags_and_environment(installation, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    port = str(free_port())
    done = run_setup("start", "--port", port, "--", "--verbose", "DEBUG")
    *said, last = done.stdout.splitlines()
    words, folder, environment = json.loads(last)
    assert words == [
        "main.py", "--cpu", "--preview-method", "auto", "--listen", "127.0.0.1", "--port", port, "--enable-manager",
        "--verbose", "DEBUG",
    ]  # fmt: skip
    assert folder == str(installation.comfyui)
    assert environment["PIP_CONSTRAINT"] == environment["UV_CONSTRAINT"] == installation.constraints.as_uri()
    assert environment["TMPDIR"] == os.environ["TMPDIR"] and not installation.temporary.exists()
    assert environment["COMFYUI_PATH"] == str(installation.comfyui) and environment["COMFYUI_TPU_RESTARTS"] == "1"
    assert "PYTHONPATH" not in environment
    assert f"http://127.0.0.1:{port}" in said[0] and f"ssh -N -L {port}:127.0.0.1:{port} " in said[1]
    assert "WARNING" not in "\n".join(said)
    assert "can run programs here as you" in run_setup("start", "--listen", "0.0.0.0", "--port", port).stdout


@pytest.mark.parametrize(
    ("hosts", "place"),
    [([], []), (["1/2@10.0.0.2:8476"], ["--coordinator", "10.0.0.2:8476", "--process", "1", "--of", "2"])],
)
def test_start_with_hosts_runs_follow_command(installation, tmp_path, monkeypatch, hosts, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(command))
    started: list[list[str]] = []
    start.main(["--port", str(free_port()), "--hosts", *hosts])
    assert started[0][: 4 + len(place)] == [
        installation.venv.program("comfyui-tpu"), "follow", *place, "--", installation.venv.python,
    ]  # fmt: skip
    with pytest.raises(terminal.SetupError, match=r"^--hosts here: it must be N/M@HOST:PORT such as "):
        start.main(["--port", str(free_port()), "--hosts", "here"])


def test_start_refuses_busy_port_bad_option_and_missing_install(world, installation, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(terminal.SetupError, match=r"^Port \d+ is in use, perhaps by a ComfyUI .* with --port N\.$"):
            start.main(["--port", str(other.getsockname()[1])])
    with pytest.raises(terminal.SetupError, match="^--port is an option of `setup.py start` itself"):
        start.main(["--", "--port=1"])
    with pytest.raises(terminal.SetupError, match=r"^Nothing is installed in .*: python3 setup.py install --comfyui"):
        start.main(["--comfyui", str(world / "nowhere")])


# --- bad ground -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ground", "sentence"),
    [
        (
            bad_ground.no_network,
            r".*gone could not be cloned: fatal: repository .* does not exist\. .*, and run the same command again",
        ),
        (
            bad_ground.no_space,
            r"This needs about 4\.\d GB in .*, and 2\.0 GB are free: free some space, or choose another folder with",
        ),
        (
            bad_ground.too_old,
            r".* is ComfyUI 0\.3\.75, and the pack needs 0\.3\.76 or newer: update it \(git pull\), or choose",
        ),
        (bad_ground.says_no_version, r".* is a ComfyUI without a version, and the pack needs 0\.3\.76 or newer"),
        (
            bad_ground.no_comfyui,
            r".* is not empty and not a ComfyUI \(it has no main.py\): choose another folder with --comfyui",
        ),
        (
            bad_ground.another_copy,
            r".*custom_nodes/tpu is another copy of this pack, and ComfyUI would load both: remove it, or",
        ),
        (
            bad_ground.another_link,
            r".*custom_nodes/ComfyUI-TPU is a link to .*, not to this folder: remove it, or run that folder",
        ),
        (bad_ground.no_git, r"git is needed to clone ComfyUI, and is not installed: sudo apt install git$"),
    ],
)
def test_install_obstacle_raises_setup_error_and_changes_nothing(ground, sentence, world, monkeypatch):
    words = ground(world, monkeypatch)
    before = small_world.listing(world)
    try:
        with pytest.raises(terminal.SetupError, match=f"^{sentence}") as caught:
            run_install(world, *words)
        assert "\n" not in str(caught.value)
        after = small_world.listing(world)
        after.pop(str(world / "new"), None)
        assert after == before
    finally:
        shutil.rmtree(world / "bad", ignore_errors=True)
        shutil.rmtree(world / "new", ignore_errors=True)


def test_install_dry_run_or_without_terminal_changes_nothing(world, capsys):
    target = world / "new" / "ComfyUI"
    origins = ["--comfyui-origin", str(world / "comfyui")]
    assert install.main([*origins, "--comfyui", str(target), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"In {target}, this will be done:\n" in said
    for name in ("ComfyUI", "environment", "PyTorch", "constraints", "packages", "command", "link"):
        assert f"\n  {name} " in said
    done = run_setup("install", *origins, "--comfyui", str(target))
    assert done.returncode == 1 and "No terminal to ask at: add --yes" in done.stderr
    assert not target.parent.exists()


# --- later ------------------------------------------------------------------------------------------------------------


def test_update_moves_own_clone_and_keeps_user_changes(world, installation, monkeypatch, capsys):
    monkeypatch.setattr(update, "_why_not_pulled", lambda: "this is a test")
    newer = {"new.py": "", "manager_requirements.txt": "comfyui_manager==4.3\n"}
    small_world.commit(world / "comfyui", newer, "v99")
    small_world.wheel(world / "wheels", "comfyui-manager", "4.3")
    monkeypatch.setattr(install, "require_comfyui", lambda _: pytest.fail("a ComfyUI of ours may be too old before"))
    monkeypatch.setattr(update, "COMFYUI_TAG", "v99")
    mine = installation.comfyui / "comfyui_version.py"
    theirs = mine.read_text()
    mine.write_text(f"{theirs}# mine\n")
    assert update.main(["--yes"]) == 0
    assert not (installation.comfyui / "new.py").exists() and mine.read_text().endswith("# mine\n")
    assert f"{installation.comfyui} stays unchanged: it was changed" in capsys.readouterr().out
    mine.write_text(theirs)
    assert update.main(["--yes"]) == 0
    assert (installation.comfyui / "new.py").is_file() and installation.venv.versions()["comfyui-manager"] == "4.3"
    before = small_world.listing(world / HOME)
    assert update.main(["--yes"]) == 0
    assert small_world.listing(world / HOME) == before


def test_install_keeps_user_files_left_by_uninstall(world, monkeypatch):
    chosen = layout.Installation(world / "left", comfyui_origin=str(world / "comfyui"))
    mine = [chosen.comfyui / name for name in ("models/x.safetensors", "input/b.png")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    clone, *_ = steps.steps(chosen)
    with monkeypatch.context() as patch:
        patch.setattr(git, "write_missing_files", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            clone.do()
    assert not (chosen.comfyui / "main.py").exists() and layout.is_remainder(chosen.comfyui) and clone.todo()
    clone.do()
    assert not clone.todo() and git.is_unchanged(chosen.comfyui)
    assert chosen.record().comfyui == git.find_commit(chosen.comfyui)
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_uninstall_removes_installed_files_and_keeps_user_files(cloned_installation, capsys):
    mine = ["models/diffusers/x.safetensors", "output/a.mp4", "input/b.png", "user/c.json", "custom_nodes/other/d.py"]
    for name in mine:
        (cloned_installation.comfyui / name).parent.mkdir(parents=True, exist_ok=True)
        (cloned_installation.comfyui / name).write_text("mine")
    where = ["--comfyui", str(cloned_installation.comfyui)]
    before = small_world.listing(cloned_installation.comfyui)
    assert uninstall.main([*where, "--dry-run"]) == 0
    assert small_world.listing(cloned_installation.comfyui) == before
    assert uninstall.main([*where, "--yes"]) == 0
    left = [path for path in cloned_installation.comfyui.rglob("*") if not path.is_dir()]
    assert sorted(str(path.relative_to(cloned_installation.comfyui)) for path in left) == sorted(mine)
    assert f"left: {cloned_installation.comfyui / 'models'} (1 files" in capsys.readouterr().out
    with pytest.raises(terminal.SetupError, match="^Nothing is installed in "):
        uninstall.main([*where, "--yes"])
    assert Path(ROOT / "setup.py").is_file()


def test_uninstall_keeps_linked_folders_and_old_manager_config(cloned_installation, tmp_path, capsys):
    small_world.repository(
        cloned_installation.manager, {"__init__.py": "", "requirements.txt": "GitPython\n"}, "3.39.3"
    )
    cloned_installation.note(manager=git.find_commit(cloned_installation.manager))
    elsewhere, tracked = tmp_path / "disk", Path("models/checkpoints/put_checkpoints_here")
    shutil.move(cloned_installation.comfyui / "models", elsewhere)
    (cloned_installation.comfyui / "models").symlink_to(elsewhere)
    mine = cloned_installation.manager / "config.ini"
    mine.write_text("mine")
    assert uninstall.main(["--comfyui", str(cloned_installation.comfyui), "--yes"]) == 0
    assert (elsewhere / tracked.relative_to("models")).is_file() and (
        cloned_installation.comfyui / "models"
    ).is_symlink()
    assert mine.read_text() == "mine" and [path.name for path in cloned_installation.manager.iterdir()] == [mine.name]
    assert not (cloned_installation.comfyui / "main.py").exists() and not cloned_installation.home.exists()
    assert f"left: {cloned_installation.comfyui / 'models'} (a link to {elsewhere})" in capsys.readouterr().out


@pytest.mark.parametrize("again", ["uninstall", "install"])
@pytest.mark.parametrize("at", ["a file", "the end"])
def test_interrupted_uninstall_resumes_or_is_reinstalled(cloned_installation, world, monkeypatch, at, again):
    last = cloned_installation.home if at == "the end" else cloned_installation.comfyui / "requirements.txt"

    def cut_off(module, name):
        real = getattr(module, name)

        def remove(path, *words, **options):
            if Path(path) == last:
                raise KeyboardInterrupt
            real(path, *words, **options)

        return module, name, remove

    where = ["--comfyui", str(cloned_installation.comfyui), "--yes"]
    with monkeypatch.context() as patch:
        for place in ((shutil, "rmtree"), (Path, "unlink")):
            patch.setattr(*cut_off(*place))
        with pytest.raises(KeyboardInterrupt):
            uninstall.main(where)
    assert not (cloned_installation.comfyui / "main.py").exists()
    if again == "uninstall":
        assert uninstall.main(where) == 0
        assert not cloned_installation.comfyui.exists()
    else:
        every = steps.steps
        monkeypatch.setattr(steps, "steps", lambda *given: [one for one in every(*given) if one.name in CLONED])
        assert run_install(world, *where[:2]) == 0
        assert (cloned_installation.comfyui / "main.py").is_file() and git.is_unchanged(cloned_installation.comfyui)
        assert cloned_installation.link.resolve() == ROOT


# --- one at a time ----------------------------------------------------------------------------------------------------

IN_USE = "is in use: its ComfyUI runs, or another install, update or uninstall does. End that, or wait for it"
HOLDS = """
import sys
from pathlib import Path
from comfyui_tpu.installer import layout, lock
with lock.lock_exclusively(layout.Installation(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def running_process(command, **options):
    """A process that has said something and runs until the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as process:
        assert any('"main.py"' in line or line == "held\n" for line in process.stdout)
        yield
        process.stdin.close()
        process.stdout.read()
    assert process.returncode == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_concurrent_install_raises_setup_error(world, cloned_installation, tmp_path, is_first):
    target = tmp_path / "new" / "ComfyUI" if is_first else cloned_installation.comfyui
    target.parent.mkdir(exist_ok=True)
    before = small_world.listing(target.parent)
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with running_process([sys.executable, "-c", HOLDS, str(target)], env={**os.environ, **paths}):
        with pytest.raises(terminal.SetupError, match=IN_USE):
            run_install(world, "--comfyui", str(target))
        assert small_world.listing(target.parent) == before
    with lock.lock_exclusively(layout.Installation(target)):
        pass


def test_update_and_uninstall_refuse_while_comfyui_runs(world, installation, monkeypatch):
    monkeypatch.setattr(update, "_pull", lambda _: pytest.fail("the repository was pulled"))

    def started():
        command = [sys.executable, "setup.py", "start", "--port", str(free_port())]
        return running_process(command, cwd=ROOT, env={**os.environ, "HOLD": "1"})

    with started(), started():
        for change in (update.main, uninstall.main):
            with pytest.raises(terminal.SetupError, match=IN_USE):
                change(["--yes"])
        assert uninstall.main(["--dry-run"]) == 0
    with lock.lock_exclusively(installation):
        pass


# --- strange machines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("uid not found: 5"), OSError("No username set in the environment")])
def test_start_without_user_name_or_home_succeeds(installation, monkeypatch, capsys, error):
    def nobody(*_):
        raise error

    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.chdir(ROOT)
    start.main(["--port", str(free_port())])
    assert " USER@HOST, then open " in capsys.readouterr().out
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # raises KeyError
    monkeypatch.delenv("HOME")
    assert machine.comfyui_folder({}).name == "ComfyUI"


@pytest.mark.parametrize(("name", "is_copy"), [("other", False), ("comfyui-tpu", True)])
def test_refuse_other_copies_reads_pyproject_in_any_encoding(cloned_installation, name, is_copy):
    other = cloned_installation.comfyui / "custom_nodes" / "other"
    other.mkdir()
    (other / "pyproject.toml").write_bytes(f'[project]\nname = "{name}"\nauthors = ["Jos\u00e9"]\n'.encode("latin-1"))
    with pytest.raises(terminal.SetupError, match="another copy") if is_copy else contextlib.nullcontext():
        steps.refuse_other_copies(cloned_installation)
