"""The cache: whose files it takes, what it does where it cannot write, and what leaves when it is full."""

import hashlib
import os
import pickle
import random
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.tests.support.comfyui_server import PACK
from comfyui_tpu.tpu_runtime.cache import store, trust
from comfyui_tpu.tpu_runtime.cache.store import Store
from comfyui_tpu.tpu_runtime.programs import executables
from comfyui_tpu.tpu_runtime.programs.program import Program
from comfyui_tpu.tpu_runtime.programs.xla_cache import use_persistent_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROGRAMS = Store("programs", code=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, inside a folder for temporary files of its own."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path / "cache"
    store._writable.cache_clear()
    store._say_once.cache_clear()


@pytest.fixture
def shared(folder: Path) -> Path:
    """Where the cache goes when the wanted folder cannot be written: all users know the name."""
    folder.write_text("a plain file in the way")
    return folder.parent / f"comfyui-tpu-{os.getuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- where it lies ----------------------------------------------------------------------------------------------------


def test_the_fallback_is_for_this_user_alone_and_the_same_again(shared: Path):
    assert store.cache_folder() == shared and mode(shared) == 0o700
    PROGRAMS.put("a", b"code")
    store._writable.cache_clear()
    assert store.cache_folder() == shared and PROGRAMS.get("a") == b"code"


def somebody_elses(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.mkdir(mode=0o700)
    number = os.getuid()
    os.rename(shared, shared.with_name(f"comfyui-tpu-{number + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: number + 1)


def open_to_all(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.mkdir()
    shared.chmod(0o777)


def readable_by_all(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.mkdir()
    shared.chmod(0o755)


def a_link(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shared.with_name("target")
    target.mkdir(mode=0o700)
    shared.symlink_to(target)


def a_plain_file(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.write_text("")


@pytest.mark.parametrize("make", [somebody_elses, open_to_all, readable_by_all, a_link, a_plain_file])
def test_what_lies_in_the_fallbacks_place_is_not_used(make, shared: Path, monkeypatch: pytest.MonkeyPatch):
    make(shared, monkeypatch)
    used = store.cache_folder()
    assert used != shared and used.name.startswith(f"comfyui-tpu-{os.getuid()}-") and mode(used) == 0o700
    assert store.cache_folder() == used
    PROGRAMS.put("a", b"code")
    assert used in PROGRAMS.path("a").parents


def test_nowhere_to_write_costs_only_the_cache(shared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(shared / "gone"))
    assert store.cache_folder() == shared.with_name("cache")
    PROGRAMS.put("a", b"code")
    Store("prompts").put("a", b"text")
    assert (PROGRAMS.get("a"), Store("prompts").get("a"), PROGRAMS.has("a")) == (None, None, False)


def test_a_home_that_nobody_knows_costs_only_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(store.VARIABLE, "~nobody-of-this-name/cache")
    assert store.cache_folder() == folder.with_name(f"comfyui-tpu-{os.getuid()}")


def test_a_plain_file_in_the_place_of_a_kind_costs_only_that_kind(folder: Path):
    folder.mkdir()
    (folder / "programs").write_text("in the way")
    PROGRAMS.put("a", b"code")
    assert PROGRAMS.get("a") is None
    Store("prompts").put("a", b"text")
    assert Store("prompts").get("a") == b"text"


# --- whom a program may come from -------------------------------------------------------------------------------------


def planted(store: Store, key: str, payload: bytes = b"planted") -> None:
    """An entry as whoever knows the format, but not the key, would write it."""
    store.path(key).write_bytes(hashlib.sha256(payload).digest() + payload)


def test_a_program_without_the_caches_seal_is_dropped(folder: Path, caplog: pytest.LogCaptureFixture):
    PROGRAMS.put("a", b"code")
    planted(PROGRAMS, "b")
    shutil.copy(PROGRAMS.path("a"), PROGRAMS.path("c"))  # sound, but another program's
    assert (PROGRAMS.get("a"), PROGRAMS.get("b"), PROGRAMS.get("c")) == (b"code", None, None)
    assert not PROGRAMS.path("b").exists() and "damaged, or of another cache" in caplog.text


class _Trap:
    """Unpickling it makes the file whose path it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


@pytest.fixture
def add_one() -> tuple:
    """What `executables.obtain` takes for a program new to XLA's cache: how to build it, and for which devices."""
    devices = tuple(jax.devices()[:1])
    mesh = Mesh(np.array(devices), ("sp",))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P()))
    number = random.random()
    return lambda: Program(name="add", fn=lambda x: x + number, args=(shape,), mesh=mesh, precision="float32"), devices


def test_a_planted_pickle_is_never_opened(folder: Path, tmp_path: Path, add_one: tuple):
    devices = add_one[1]
    _, is_new = executables.obtain("digest", *add_one)
    assert is_new and executables.is_stored("digest", devices)
    assert not executables.obtain("digest", *add_one)[1]
    planted(executables.STORE, executables._key("digest", devices), pickle.dumps(_Trap(tmp_path / "sprung")))
    assert executables.obtain("digest", *add_one)[1]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("which", ["cache", "programs"])
def test_a_folder_that_others_may_write_gives_and_gets_no_programs(
    which: str, folder: Path, caplog: pytest.LogCaptureFixture
):
    PROGRAMS.put("a", b"code")
    opened = folder if which == "cache" else folder / "programs"
    opened.chmod(0o777)
    assert PROGRAMS.get("a") is None and not PROGRAMS.has("a")
    PROGRAMS.put("b", b"code")
    assert [path.name for path in PROGRAMS.folder.iterdir()] == ["a.bin"]
    assert caplog.text.count(f"other users may write {opened}; forbid it: chmod -R go-w {opened}") == 1
    opened.chmod(0o755)
    assert PROGRAMS.get("a") == b"code"


def test_a_folder_of_another_user_gives_and_gets_no_programs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    PROGRAMS.put("a", b"code")
    os.chown(folder, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert PROGRAMS.get("a") is None and not PROGRAMS.has("a")


def test_an_entry_that_others_may_write_is_passed_over(folder: Path):
    PROGRAMS.put("a", b"code")
    PROGRAMS.path("a").chmod(0o666)
    assert PROGRAMS.get("a") is None


def cut_off(key: Path) -> None:
    key.write_bytes(b"")


def opened(key: Path) -> None:
    key.chmod(0o666)


def linked(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to(key.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [cut_off, opened, linked])
def test_a_key_that_others_may_have_chosen_is_replaced_and_seals_nothing_old(spoil, folder: Path):
    PROGRAMS.put("a", b"code")
    key = folder / "programs.key"
    assert mode(key) == 0o600 and len(key.read_bytes()) == trust.KEY_SIZE
    spoil(key)
    assert PROGRAMS.get("a") is None
    PROGRAMS.put("b", b"code")
    assert PROGRAMS.get("b") == b"code" and mode(key) == 0o600 and not key.is_symlink()


def test_another_machine_that_is_given_the_folder_reads_its_programs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    PROGRAMS.put("a", b"code")
    shutil.copytree(folder, tmp_path / "given")
    for path in (tmp_path / "given").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # as archives without modes leave them
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "given"))
    assert PROGRAMS.get("a") == b"code"


def test_a_users_own_group_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Many systems give every user a group, and every file to it."""
    PROGRAMS.put("a", b"code")
    folder.chmod(0o775)
    assert PROGRAMS.get("a") == b"code"
    monkeypatch.setattr(trust.grp, "getgrgid", lambda number: trust.grp.struct_group(("staff", "", number, ["eve"])))
    assert PROGRAMS.get("a") is None


def test_processes_that_make_a_key_at_once_agree_on_one(folder: Path):
    folder.mkdir()
    key = folder / "programs.key"
    trust._make_key(key, replace=False)
    first = trust.key(key)
    trust._make_key(key, replace=False)
    assert trust.key(key) == first and [path.name for path in folder.iterdir()] == ["programs.key"]


def test_xlas_programs_are_not_kept_where_others_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", asked.__setitem__)
    (folder / "xla").mkdir(parents=True)
    (folder / "xla").chmod(0o777)
    use_persistent_cache()
    assert asked == {}
    (folder / "xla").chmod(0o755)
    use_persistent_cache()
    assert asked["jax_compilation_cache_dir"] == str(folder / "xla")


# --- how much it holds ------------------------------------------------------------------------------------------------


def file(path: Path, size: int, *, written: float, read: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (max(written, read), written))
    return path


def test_xlas_programs_have_a_limit_and_the_longest_unused_leave(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(store.MAX_BYTES, "xla", 250)
    oldest = file(folder / "xla" / "a", 100, written=1)
    read_since = file(folder / "xla" / "b", 100, written=2, read=9)
    newest = file(folder / "xla" / "c", 100, written=5)
    store.trim_xla()
    assert not oldest.exists() and read_since.exists() and newest.exists()


def test_every_compilation_and_every_start_keeps_the_limit(
    folder: Path, add_one: tuple, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(store.MAX_BYTES, "xla", 0)
    entry = file(folder / "xla" / "a", 100, written=1)
    executables.obtain("digest", *add_one)
    assert not entry.exists()
    entry = file(folder / "xla" / "a", 100, written=1)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    use_persistent_cache()
    assert not entry.exists()


def test_a_folder_of_jaxs_own_variable_is_left_to_its_owner(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setitem(store.MAX_BYTES, "xla", 0)
    entry = file(tmp_path / "own" / "a", 100, written=1)
    store.trim_xla()
    assert entry.exists()


def test_the_longest_unused_entries_leave_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(store.MAX_BYTES, "prompts", 450)
    prompts = Store("prompts")
    for number, key in enumerate("abc"):
        prompts.put(key, b"x" * 100)
        os.utime(prompts.path(key), (number, number))
    assert prompts.get("a")  # used again
    prompts.put("d", b"x" * 100)
    assert [key for key in "abcd" if prompts.has(key)] == ["a", "c", "d"]


def test_a_change_of_what_is_not_traced_keeps_compiled_programs(tmp_path: Path):
    for folder in ("attention", "sharding", "tpu_runtime"):
        shutil.copytree(PACK / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def changed(*files: str) -> set[str]:
        before = executables.source_digest(tmp_path)
        found = set()
        for name in files:
            path = tmp_path / name
            source = path.read_text()
            path.write_text(source + "# changed")
            executables.source_digest.cache_clear()
            if executables.source_digest(tmp_path) != before:
                found.add(name)
            path.write_text(source)
        executables.source_digest.cache_clear()
        return found

    rooms = ("plan/plan", "cost_model/hlo", "monitor/feed", "engine/device_cache", "checkpoints/hub", "cache/store")
    assert not changed(*(f"tpu_runtime/{room}.py" for room in rooms))
    traced = {
        "attention/kernel.py",
        "sharding/rules.py",
        "tpu_runtime/spec.py",
        "tpu_runtime/tokens.py",  # of encoded prompts, which have the digest in their key too
        "tpu_runtime/models/text_encoders/mistral3.py",
        "tpu_runtime/models/wan21.py",
        "tpu_runtime/models/autoencoders/wan.py",
        "tpu_runtime/programs/denoise_step.py",
    }
    assert changed(*traced) == traced
