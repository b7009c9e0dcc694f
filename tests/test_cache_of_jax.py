"""A JAX that lacks a private function which the cache replaces, or has another: that costs a feature, never a run."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comfyui_tpu.tpu_runtime.cache import store, xla_cache
from jax._src import compilation_cache, compiler, distributed

PRIVATE = (xla_cache._OPEN, xla_cache._PUT, xla_cache._WRITE)
GONE = xla_cache._Private("jax._src.compilation_cache", "no_such_function", ())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """XLA's part of a cache of the test's own; JAX's private functions and settings are put back."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    xla_cache._warn_once.cache_clear()
    compilation_cache.reset_cache()
    update = jax.config.update
    yield tmp_path / "cache" / "xla"
    store._writable.cache_clear()
    compilation_cache.reset_cache()
    update("jax_compilation_cache_max_size", -1)


@pytest.fixture
def second_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    return folder


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == xla_cache.log.name]


def is_compiled(number: int) -> bool:
    """Whether XLA compiled a program of this number; its result is checked."""
    before = xla_cache.count_compilations().cached
    jax.clear_caches()
    assert jax.jit(lambda x: x * number)(jnp.ones(3)).tolist() == [number] * 3
    return xla_cache.count_compilations().cached == before


@pytest.mark.parametrize("private", PRIVATE, ids=lambda private: private.name)
def test_installed_jax_has_replaced_function(private: Any):
    assert private.find() is not None


@pytest.mark.parametrize(
    ("function", "is_found"),
    [
        (lambda cache_key, executable: 0, True),
        (lambda cache_key, executable, host_callbacks: 0, True),
        (lambda executable, cache_key, more=None: 0, True),
        (lambda cache_key, executable, more: 0, False),
        (lambda cache_key: 0, False),
        (lambda key, executable: 0, False),
        (lambda *given: 0, False),
        ("no function", False),
    ],
    ids=["as it was", "optional", "more, with a default", "one more", "one less", "renamed", "any", "no function"],
)
def test_private_function_is_matched_by_parameters(function: Any, is_found: bool, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("jax._src.stand_in")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    private = xla_cache._Private(module.__name__, "_write", ("cache_key", "executable"), optional=("host_callbacks",))
    assert private.find() is None
    module._write = function  # type: ignore[attr-defined]
    assert (private.find() is not None) is is_found
    assert xla_cache._Private("jax._src.no_such", "_write", ()).find() is None


def test_xla_cache_without_open_function_uses_jax_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(compilation_cache, "get_file_cache", _jaxs(compilation_cache.get_file_cache))
    monkeypatch.setattr(xla_cache, "_OPEN", GONE)
    for _ in range(2):
        xla_cache.use_persistent_cache()
    assert [is_compiled(4711), is_compiled(4711)] == [True, False]
    assert list(folder.glob("*-cache")) and not folder.stat().st_mode & 0o077
    (warning,) = warnings(caplog)
    assert "no jax._src.compilation_cache.no_such_function" in warning and "JAX writes its files itself" in warning


def test_xla_cache_writable_by_others_leaves_jax_config_unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(xla_cache, "_OPEN", GONE)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    asked: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", asked.__setitem__)
    xla_cache.use_persistent_cache()
    assert asked == {}


@pytest.mark.parametrize("name", ["_WRITE", "_PUT"])
def test_xla_cache_without_write_function_recompiles_on_second_host(
    name: str, second_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(xla_cache, name, GONE)
    for _ in range(2):
        xla_cache.use_persistent_cache()
    assert [is_compiled(4712), is_compiled(4712)] == [True, True]
    (warning,) = warnings(caplog)
    assert "no_such_function" in warning and "compiles its programs again at every start" in warning


@pytest.mark.parametrize("given", [(), ("key", 1.0, "name", "backend", "executable", "callbacks", "more")])
def test_cache_write_with_other_arguments_skips_entry(
    given: tuple, second_host: Path, caplog: pytest.LogCaptureFixture
):
    xla_cache.use_persistent_cache()
    compiler._cache_write(*given)
    assert [sentence.partition(" (")[0] for sentence in warnings(caplog)] == ["a compiled program was not stored"]


@pytest.mark.parametrize("error", [AttributeError, ValueError])
def test_xla_cache_missing_jax_setting_only_warns(
    error: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(name: str, value: object) -> None:
        raise error(f"Unrecognized config option: {name}")

    monkeypatch.setattr(jax.config, "update", refuse)
    xla_cache.use_persistent_cache()
    assert len(warnings(caplog)) == 4 and "rejects jax_compilation_cache_dir" in warnings(caplog)[0]


def _jaxs(function: Callable) -> Callable:
    return getattr(function, "jaxs", function)
