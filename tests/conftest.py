"""Eight simulated chips, a cache of the session's own, ComfyUI servers, and the comparison that parity tests print."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Tensors are tiny: more threads would wait for each other, at the cost of the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA divides sums among as many threads as it finds cores, and no fewer than there are devices in the process: what is
# compared to the bit between processes holds where all have the same number, so this one is for them all.
os.environ.setdefault("PJRT_NPROC", "8")
# For workers and servers: glibc gives large buffers back to the kernel after every program, and clears new ones.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**32))
# Tracing makes objects by the million, most of them for long.
gc.set_threshold(50_000)

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from comfyui_tpu.tests.support import closeness, comfyui_server, disk  # noqa: E402
from comfyui_tpu.tests.support.durations import Durations  # noqa: E402

pytest_plugins = ["pytester"]

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {comfyui_server.FLAGS}".strip()

# The same examples in every run and on every machine, whatever it takes; what fails is written into a test, not kept.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this run: nothing comes from earlier runs, nothing is left behind.

    What one worker or server has compiled serves all the others.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    folder.mkdir(exist_ok=True)
    names = ("COMFYUI_TPU_CACHE", "JAX_COMPILATION_CACHE_DIR", "XDG_CONFIG_HOME", "COMFYUI_TPU_TOKEN")
    saved = {name: os.environ.get(name) for name in names}
    os.environ["COMFYUI_TPU_CACHE"] = str(folder)
    os.environ |= {"XDG_CONFIG_HOME": str(folder / "settings"), "COMFYUI_TPU_TOKEN": "of the tests"}
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    yield folder
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[None]:
    """Gives back what a module's tests took: programs that JAX keeps, and what glibc keeps of it (see above).

    Without it one process that runs the whole suite grows to 13 GB. What outlives the first, mostly imports, is not
    looked at again: half a million objects, a third of a second each time.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()
    _trim()


@pytest.fixture(scope="module", autouse=True)
def delete_module_folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """Delete the files that a module's fixtures wrote, unless one of its tests failed."""
    base = tmp_path_factory.getbasetemp()
    kept, failed = set(base.iterdir()), request.session.testsfailed
    yield
    if request.session.testsfailed == failed:
        disk.delete_module_folders(base, kept)


def _trim() -> None:
    """Only glibc has it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="module")
def start_comfyui(
    tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Iterator[Callable[..., comfyui_server.Server]]:
    """Starts ComfyUI servers, each in a folder of its own unless `base` is given; ends them with the module.

    An idle server keeps up to a gigabyte. The other arguments are those of `comfyui_server.prepare`.
    """
    started = []

    def start(base: Path | None = None, **options: Any) -> comfyui_server.Server:
        base = base or tmp_path_factory.mktemp("comfyui")
        server = comfyui_server.prepare(base, **{"cache": cache, **options})
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist's workers
        config.pluginmanager.register(Durations(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--attention",
        choices=("auto", "pallas"),
        default="auto",
        help="pallas: the models' tests with the attention kernel in interpret mode (minutes more)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a ComfyUI, as every browser test does, is slow: the quick part installs nothing for it."""
    for item in items:
        needs = comfyui_server.needs_comfyui.mark in item.iter_markers("skipif")
        if needs or "start_comfyui" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    size = disk.count_bytes(folder) if folder else 0
    yield
    disk.check_size(size)


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Prints how close `ours` is to `oracle`, and asserts it; `closeness.py` says in what, and chooses `error`.

    `error` bounds the largest error and, unless `overall` does, that of all values together. The slope catches what a
    coarse bound forgives: a small scale factor on everything.
    """

    def check(
        what: str, ours: Any, oracle: Any, *,
        error: float = closeness.PIPELINE, overall: float | None = None, slope: float = 1e-3,
    ) -> None:  # fmt: skip
        ours, oracle = (np.asarray(x, np.float64) for x in (ours, oracle))
        assert ours.shape == oracle.shape, f"{what}: {ours.shape} instead of {oracle.shape}"
        wrong = np.count_nonzero(~np.isfinite(ours))
        assert not wrong, f"{what}: {wrong} of {ours.size} values are not finite"
        found = closeness.measure(ours, oracle)
        with capsys.disabled():
            print(f"\n  {what}: {found}", end="")
        assert found.largest <= error, f"{what}: {found}; {error:.1e} may be rounding"
        all_together = error if overall is None else overall
        assert found.overall <= all_together, f"{what}: {found}; {all_together:.1e} may be rounding overall"
        assert abs(found.slope - 1) <= slope, f"{what}: {found}"

    return check
