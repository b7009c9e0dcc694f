"""Weights of later stages are read from the disk while the chips are opened and while other stages run."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from comfyui_tpu.tests.support.host import Cancelled, Host, Runner, new_prompt
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, hub, prefetch, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, PlannedGeneration
from comfyui_tpu.tpu_runtime.checkpoints.prefetch import FilePrefetch
from comfyui_tpu.tpu_runtime.engine import lifecycle, stage_functions
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("Wan21")
LATER = ("denoise", "decode")
OTHER = ModelRef(spec_name=SPEC.name, model_id="another")


@pytest.fixture(scope="module")
def model() -> ModelRef:
    """A checkpoint in a folder, as a user has one."""
    return ModelRef(spec_name=SPEC.name, model_id=str(tiny.ensure_random(SPEC)))


class Disk:
    """What the background reads; `pause` makes each file wait after its first chunk until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Path] = []
        self.read: Counter[Path] = Counter()  # bytes
        self.ended: set[Path] = set()
        self.is_read = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        real = Path.open

        def open_(path: Path, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
            found = real(path, mode, buffering, **more)
            # The reader also looks at the host's memory.
            is_read_ahead = not buffering and threading.current_thread().name == prefetch.THREAD
            return Watched(self, path, found) if is_read_ahead else found

        monkeypatch.setattr(Path, "open", open_)

    def pause(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def note(self, path: Path, count: int) -> None:
        self.read[path] += count
        if not count:
            self.ended.add(path)
        self.is_read.set()
        assert self._goes_on.wait(60)


class Watched:
    """A file that tells the disk what is read of it."""

    def __init__(self, disk: Disk, path: Path, file: Any) -> None:
        self.disk, self.path, self.file = disk, path, file
        disk.opened.append(path)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def readinto(self, piece: bytearray) -> int:
        count = self.file.readinto(piece)
        self.disk.note(self.path, count)
        return count


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    one = Disk(monkeypatch)
    yield one
    one.go_on()
    until_idle()


def until_idle() -> None:
    until(lambda: all(thread.name != prefetch.THREAD for thread in threading.enumerate()))


def files_of(model: ModelRef, *parts: str) -> list[Path]:
    """The weight files of a checkpoint's folders, by default of denoiser and decoder, in order; no encoder's."""
    found = []
    for part in parts or ("transformer", "vae"):
        (index,) = Path(model.model_id, part).glob("*.index.json")
        weights = json.loads(index.read_text())["weight_map"]
        names = {file for name, file in weights.items() if not name.startswith(("encoder.", "quant_conv."))}
        found += [index.parent / name for name in sorted(names)]
    return found


def open_chips(monkeypatch: pytest.MonkeyPatch, during: Callable[[], None]) -> None:
    """Make the process new: no engine, and chips that take as long as `during`."""

    def opens(*_: Any) -> Any:
        during()
        return tuple(jax.devices()[:2])

    monkeypatch.setattr(lifecycle, "_engine", None)
    monkeypatch.setattr(lifecycle, "open_devices", opens)


# --- a new process ----------------------------------------------------------------------------------------------------


def test_weights_are_read_while_the_chips_are_opened_and_only_once(
    model: ModelRef, disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    wanted = files_of(model)
    open_chips(monkeypatch, lambda: until(lambda: set(wanted) <= disk.ended))
    api.announce_generations([PlannedGeneration(model=model, stages=LATER)], progress=SilentProgress())
    api.encode_prompt(model, new_prompt(), "", progress=SilentProgress())
    until_idle()
    assert disk.opened == wanted  # the denoiser's first
    assert disk.read == {path: path.stat().st_size for path in wanted}


@pytest.mark.parametrize(
    "arguments", [{"prediction": None}, {"decoded": (1,)}, {"encoded": (1,)}], ids=lambda x: [*x][0]
)
def test_weights_of_single_calls_are_read_while_the_chips_are_opened(
    model: ModelRef, disk: Disk, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
):
    wanted = files_of(model, "transformer" if "prediction" in arguments else "vae")
    prepared: list[ModelRef] = []
    monkeypatch.setattr(stage_functions, "precompile_call", lambda stage, **_: prepared.append(stage.model))
    open_chips(monkeypatch, lambda: until(lambda: set(wanted) <= disk.ended))

    def calls() -> Iterator[tuple[ModelRef, dict[str, Any]]]:
        yield model, {}
        yield model, arguments
        raise ArithmeticError("of a node that nobody knows")

    api.precompile_calls(calls(), progress=SilentProgress())
    until(lambda: len(prepared) == 2)
    until_idle()
    assert disk.read == {path: path.stat().st_size for path in wanted}


def test_reading_ends_where_opening_is_cancelled(model: ModelRef, disk: Disk, monkeypatch: pytest.MonkeyPatch):
    disk.pause()

    def interrupt() -> None:
        assert disk.is_read.wait(60)
        raise Cancelled

    open_chips(monkeypatch, interrupt)
    with pytest.raises(Cancelled):
        api.announce_generations([PlannedGeneration(model=model, stages=LATER)], progress=SilentProgress())
    disk.go_on()
    until_idle()
    assert disk.opened == files_of(model)[:1] and lifecycle.current_engine() is None


@pytest.mark.parametrize("model_id", ["/nowhere", "no/such-model-here", "tiny/nothing", "", SPEC.miniature.random_id])
def test_a_model_that_is_not_here_keeps_no_chip_from_being_opened(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, model_id: str
):
    def download(*_: Any) -> Any:
        raise AssertionError("no request is made before a stage runs")

    monkeypatch.setattr(hub, "resolve_snapshot", download)
    open_chips(monkeypatch, lambda: None)
    lost = ModelRef(spec_name=SPEC.name, model_id=model_id)
    api.announce_generations([PlannedGeneration(model=lost, stages=LATER)], progress=SilentProgress())
    until_idle()
    assert lifecycle.current_engine() is not None and disk.opened == []


def test_files_in_the_hubs_cache_are_found_without_a_request(model: ModelRef, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "resolve_snapshot", lambda *_: pytest.fail("a request"))
    monkeypatch.setattr(hub, "find_cached", lambda model_id: Path(model.model_id))
    found = checkpoint.locate(SPEC, SPEC.published.hub_id)
    assert prefetch.list_files(found, LATER) == files_of(model)


# --- while a stage runs -----------------------------------------------------------------------------------------------


def test_the_denoiser_and_the_decoder_are_read_while_the_text_encoder_runs(model: ModelRef, disk: Disk):
    """The text encoder's stage does not end before both are read."""

    class Waits(Host):
        def text(self, message: str) -> None:
            if not self.said:
                until(lambda: set(files_of(model)) <= disk.ended)
            super().text(message)

    engine, host = Runner(jax.devices()[:2]), Waits()
    engine.expect([PlannedGeneration(model=model, stages=LATER)])
    engine.encode(model, new_prompt(), "", host)
    assert host.said and disk.opened == files_of(model)
    engine.encode(model, new_prompt(), "", host)
    until_idle()
    assert disk.opened == files_of(model)  # once for one announcement


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [({"prediction": None}, ["transformer"]), ({"decoded": (1,)}, ["vae"]), ({"encoded": (1,)}, ["vae"]), ({}, [])],
    ids=["sampler", "decoder", "encoder", "text"],
)
def test_weights_of_single_calls_are_read_while_their_programs_are_made(
    model: ModelRef, disk: Disk, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], parts: list[str]
):
    wanted, made = [path for part in parts for path in files_of(model, part)], threading.Event()

    def precompile(*_: Any, **__: Any) -> None:
        until(lambda: set(wanted) <= disk.ended)
        made.set()

    monkeypatch.setattr(stage_functions, "precompile_call", precompile)
    engine = Runner(jax.devices()[:2])
    engine.prepare([(model, arguments)])
    assert made.wait(60)
    until_idle()
    assert disk.opened == wanted


def test_a_failed_stage_ends_reading(model: ModelRef, disk: Disk):
    class Stops(SilentProgress):
        def text(self, message: str) -> None:
            assert disk.is_read.wait(60)
            raise Cancelled

    disk.pause()
    engine = Runner(jax.devices()[:2])
    engine.expect([PlannedGeneration(model=model, stages=LATER)])
    with pytest.raises(Cancelled):
        engine.encode(model, new_prompt(), "", Stops())
    disk.go_on()
    until_idle()
    assert disk.opened == files_of(model)[:1]


def test_what_is_on_the_chips_is_not_read(model: ModelRef):
    found = model.locate()
    transformer, vae = files_of(model, "transformer"), files_of(model, "vae")
    assert prefetch.list_files(found, LATER, {SPEC.denoiser.experts[0]}) == vae
    assert prefetch.list_files(found, ("decode",)) == vae and prefetch.list_files(found, ("encode",)) == []
    assert prefetch.list_files(found, ("denoise",), {SPEC.vae.component}) == transformer


# --- the reader -------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(bytes(3000))
    return paths


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CHUNK_BYTES", 1000)


@pytest.mark.parametrize(("available", "number"), [(18_000, 3), (17_999, 2), (12_000, 2), (5_999, 0), (None, 0)])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_model_takes_half_of_the_memory_however_it_is_requested(
    files: list[Path], disk: Disk, monkeypatch: pytest.MonkeyPatch, available: int | None, number: int, requests: int
):
    monkeypatch.setattr(prefetch, "available_bytes", lambda: available)
    reading = FilePrefetch()
    for begin in range(0, 3, 3 // requests):
        reading.request(OTHER, files[begin : begin + 3 // requests])
        until_idle()
    assert disk.read == dict.fromkeys(files[:number], 3000)


def test_what_was_read_is_not_read_again_and_a_part_is_continued(files: list[Path], disk: Disk, chunks: None):
    reading = FilePrefetch()
    disk.pause()
    reading.request(OTHER, files[:2])
    assert disk.is_read.wait(60)
    reading.request(OTHER, files)
    reading.cancel(keep=[OTHER])
    disk.go_on()
    until_idle()
    assert disk.read == dict.fromkeys(files, 3000)


def test_a_cancelled_model_is_forgotten_and_another_is_read_on(files: list[Path], disk: Disk, chunks: None):
    kept = ModelRef(spec_name=SPEC.name, model_id="kept")
    reading = FilePrefetch()
    disk.pause()
    reading.request(OTHER, files[:2])
    reading.request(kept, files[2:])
    assert disk.is_read.wait(60)
    reading.cancel(keep=[kept])
    disk.go_on()
    until_idle()
    assert disk.read == {files[0]: 1000, files[2]: 3000}
    reading.request(OTHER, files[:1])
    until_idle()
    assert disk.read[files[0]] == 4000


def test_a_lost_file_is_passed_over(files: list[Path], disk: Disk):
    files[0].unlink()
    FilePrefetch().request(OTHER, files)
    until_idle()
    assert disk.opened == files[1:]
