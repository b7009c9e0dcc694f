"""Tests of the cache: trusted files, folders without write access, and eviction."""

import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.tpu_runtime.cache import ownership, store, xla_cache
from comfyui_tpu.tpu_runtime.cache.store import Store
from comfyui_tpu.tpu_runtime.programs import executables
from comfyui_tpu.tpu_runtime.programs.program import Program
from jax._src import compilation_cache, compiler, distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROGRAMS = xla_cache.STORE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a cache folder of this test, inside its own folder for temporary files."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path / "cache"
    store._writable.cache_clear()
    store._say_once.cache_clear()


@pytest.fixture
def fallback_folder(folder: Path) -> Path:
    """Return the fallback folder of the cache; other users can predict its name."""
    folder.write_text("a plain file in the way")
    return folder.parent / f"comfyui-tpu-{os.getuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- location ---------------------------------------------------------------------------------------------------------


def test_cache_folder_fallback_is_private_and_reused(fallback_folder: Path):
    assert store.cache_folder() == fallback_folder and mode(fallback_folder) == 0o700
    PROGRAMS.put("a", b"code")
    store._writable.cache_clear()
    assert store.cache_folder() == fallback_folder and PROGRAMS.get("a") == b"code"


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
def test_cache_folder_fallback_skips_unsafe_path(make, fallback_folder: Path, monkeypatch: pytest.MonkeyPatch):
    make(fallback_folder, monkeypatch)
    used = store.cache_folder()
    assert used != fallback_folder and used.name.startswith(f"comfyui-tpu-{os.getuid()}-") and mode(used) == 0o700
    assert store.cache_folder() == used
    PROGRAMS.put("a", b"code")
    assert used in PROGRAMS.path("a").parents


def test_cache_without_writable_folder_stores_nothing(fallback_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(fallback_folder / "gone"))
    assert store.cache_folder() == fallback_folder.with_name("cache")
    PROGRAMS.put("a", b"code")
    Store("prompts").put("a", b"text")
    assert PROGRAMS.get("a") is None and Store("prompts").get("a") is None


def test_cache_folder_with_unknown_home_uses_fallback(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(store.VARIABLE, "~nobody-of-this-name/cache")
    assert store.cache_folder() == folder.with_name(f"comfyui-tpu-{os.getuid()}")


def test_store_blocked_by_file_leaves_other_stores_usable(folder: Path):
    folder.mkdir()
    PROGRAMS.folder.write_text("in the way")
    PROGRAMS.put("a", b"code")
    assert PROGRAMS.get("a") is None
    Store("prompts").put("a", b"text")
    assert Store("prompts").get("a") == b"text"


# --- trust of programs ------------------------------------------------------------------------------------------------


@pytest.fixture
def add_one() -> Callable[[], Program]:
    """Return a function that builds a program that is not in XLA's cache."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("sp",))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P()))
    number = random.random()
    return lambda: Program(name="add", fn=lambda x: x + number, args=(shape,), mesh=mesh, precision="float32")


@pytest.fixture
def from_here(folder: Path) -> Iterator[None]:
    """Keep XLA's programs in this test's own cache."""
    compilation_cache.reset_cache()
    xla_cache.use_persistent_cache()
    yield
    compilation_cache.reset_cache()


def test_compile_or_load_reuses_entry_and_recompiles_damaged_entry(
    from_here: None, add_one: Callable[[], Program], caplog: pytest.LogCaptureFixture
):
    missed: list[str] = []
    for is_new in (True, False):
        with xla_cache.on_cache_miss(lambda: missed.append("told before it is compiled")):
            assert executables.compile_or_load(add_one())[1] is is_new
    assert len(missed) == 1
    (entry,) = PROGRAMS.folder.glob("jit__lambda-*")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert executables.compile_or_load(add_one())[1] and f"{entry} is dropped: it is damaged" in caplog.text
    assert not executables.compile_or_load(add_one())[1]


def test_compile_or_load_recompiles_unloadable_entry(from_here: None, add_one: Callable[[], Program]):
    """Such as one of another compiler version, which is not part of JAX's key."""
    executables.compile_or_load(add_one())
    (entry,) = PROGRAMS.folder.glob("jit__lambda-*")
    PROGRAMS.put(entry.stem, b"no program")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert executables.compile_or_load(add_one())[1]
    assert not executables.compile_or_load(add_one())[1]


def test_persistent_cache_stores_programs_on_every_host(
    folder: Path, add_one: Callable[[], Program], monkeypatch: pytest.MonkeyPatch
):
    """JAX itself writes only in the first of several processes."""
    compilation_cache.reset_cache()
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)  # is put back
    xla_cache.use_persistent_cache()
    assert [executables.compile_or_load(add_one())[1] for _ in range(2)] == [True, False]
    compilation_cache.reset_cache()


def test_copied_xla_cache_is_valid_at_another_path(
    from_here: None, folder: Path, tmp_path: Path, add_one: Callable[[], Program], monkeypatch: pytest.MonkeyPatch
):
    """The path is not part of a key."""
    assert executables.compile_or_load(add_one())[1]
    shutil.copytree(folder, tmp_path / "given")
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "given"))
    store._writable.cache_clear()
    xla_cache.use_persistent_cache()
    assert not executables.compile_or_load(add_one())[1]


@pytest.mark.parametrize("which", ["cache", "xla"])
def test_store_folder_writable_by_others_is_not_used(which: str, folder: Path, caplog: pytest.LogCaptureFixture):
    PROGRAMS.put("a", b"code")
    opened = folder if which == "cache" else folder / which
    opened.chmod(0o777)
    assert PROGRAMS.get("a") is None
    PROGRAMS.put("b", b"code")
    assert [path.name for path in PROGRAMS.folder.iterdir()] == ["a.bin"]
    assert caplog.text.count(f"other users may write {opened}; forbid it: chmod -R go-w {opened}") == 1
    opened.chmod(0o755)
    assert PROGRAMS.get("a") == b"code"


def test_store_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    PROGRAMS.put("a", b"code")
    os.chown(folder, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert PROGRAMS.get("a") is None


def test_store_entry_writable_by_others_is_ignored(folder: Path):
    PROGRAMS.put("a", b"code")
    PROGRAMS.path("a").chmod(0o666)
    assert PROGRAMS.get("a") is None


def test_copied_store_without_file_modes_is_readable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    PROGRAMS.put("a", b"code")
    shutil.copytree(folder, tmp_path / "given")
    for path in (tmp_path / "given").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # as archives without modes leave them
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "given"))
    assert PROGRAMS.get("a") == b"code"


def test_store_folder_writable_by_own_group_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Many systems create a group for each user, which owns the user's files."""
    PROGRAMS.put("a", b"code")
    folder.chmod(0o775)
    assert PROGRAMS.get("a") == b"code"
    monkeypatch.setattr(
        ownership.grp, "getgrgid", lambda number: ownership.grp.struct_group(("staff", "", number, ["eve"]))
    )
    assert PROGRAMS.get("a") is None


def test_xla_cache_writable_by_others_is_not_used(from_here: None, folder: Path, add_one: Callable[[], Program]):
    PROGRAMS.folder.mkdir(parents=True)
    PROGRAMS.folder.chmod(0o777)
    assert [executables.compile_or_load(add_one())[1] for _ in range(2)] == [True, True]
    assert not list(PROGRAMS.folder.iterdir())
    PROGRAMS.folder.chmod(0o755)
    assert [executables.compile_or_load(add_one())[1] for _ in range(2)] == [True, False]


# --- size limits ------------------------------------------------------------------------------------------------------


def file(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_xla_cache_follows_jax_compilation_cache_dir(
    folder: Path, tmp_path: Path, add_one: Callable[[], Program], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    compilation_cache.reset_cache()
    xla_cache.use_persistent_cache()
    missed: list[str] = []
    for is_new in (True, False):
        with xla_cache.on_cache_miss(lambda: missed.append("told before it is compiled")):
            assert executables.compile_or_load(add_one())[1] is is_new
    assert len(missed) == 1
    assert list((tmp_path / "own").glob("jit__lambda-*-cache")) and not PROGRAMS.folder.exists()
    compilation_cache.reset_cache()


def test_store_evicts_least_recently_used_entries(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(store.MAX_BYTES, "prompts", 450)
    prompts = Store("prompts")
    for number, key in enumerate("abc"):
        prompts.put(key, b"x" * 100)
        os.utime(prompts.path(key), (number, number))
    assert prompts.get("a")  # used again
    prompts.put("d", b"x" * 100)
    assert [key for key in "abcd" if prompts.path(key).is_file()] == ["a", "c", "d"]
