"""A machine that refuses options, halts, hangs, forgets and lies about memory: a layer in the place of PJRT.

It knows JAX alone, not the pack, so the same faults meet an engine in this process (`Layer.install`), a ComfyUI server
and the self-test's children (`environment`, through `sitecustomize`). Programs are known by their text. For a step's
compiler options, and kernels in interpret mode, it changes two names of the pack as the pack's modules are imported.
"""

import fcntl
import functools
import importlib.abc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "FAKE_PJRT"
# Where it runs out of memory, or whatever else it says.
POINTS = ("compile", "load", "run", "put")
NO_ROOM = "RESOURCE_EXHAUSTED: Error allocating device buffer: no room of that size is left."
BUSY = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 3411."
LOST = "INTERNAL: Accelerator device halted prematurely: the chips were lost before"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At `at`, of the programs whose text `holds` a pattern ("": of all), with `option` given if one is named, the
    machine raises what it `says`. What is put onto a chip has its type for a text, such as `float32[2,3]`.

    `does`: "raise"; "halt", so that each later run of the process raises too; "hang"; "linger", which hangs with its
    pipes closed; "die"; "leave", with exit code 0; "nonsense", after which a program says that its values are not
    finite; "flip", after which each number of a program is another in its last bit. `times`: how often in a process, 0
    for always; `after`: not the first ones.
    """

    at: str
    says: str = ""
    holds: str = ""
    option: str | None = None
    does: str = "raise"
    times: int = 0
    after: int = 0


@dataclass(kw_only=True)
class Layer:
    """`limit_bytes` is what a chip says that it has, `room_bytes` what it has; it says `drift_bytes` more than it uses,
    and that `reserved_bytes` are reserved, where that is not 0.
    `options` are those of a denoising step; `pallas`: programs have kernels, in interpret mode. `sets` are attributes
    of the pack's modules, by `module:name`, the module by how its name ends. `device` is a file that one process at a
    time can open, as a chip; `max_opens` is how many processes can ever open it, 0 for any number.
    """

    faults: Sequence[Fault] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    pallas: bool = False
    sets: Mapping[str, Any] = field(default_factory=dict)
    limit_bytes: int = 0
    room_bytes: int = 0
    drift_bytes: int = 0
    reserved_bytes: int = 0
    device: str = ""
    max_opens: int = 0
    _counts: dict[int, int] = field(default_factory=dict)
    _is_lost: bool = False
    _holds: list[Any] = field(default_factory=list)
    _texts: dict[int, tuple[Any, str]] = field(default_factory=dict)
    _given: dict[int, tuple[Any, list[str]]] = field(default_factory=dict)

    def to_json(self) -> str:
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return json.dumps({**public, "faults": [asdict(fault) for fault in self.faults]})

    # -- what happens --------------------------------------------------------------------------------------------------

    def meet(self, at: str, text: Callable[[], str] = str, options: Sequence[str] = ()) -> str:
        """Whatever the machine does at this point to a program of this `text`, and what it does to its results."""
        from jax.errors import JaxRuntimeError

        if at == "run" and self._is_lost:
            raise JaxRuntimeError(LOST)
        for index, fault in enumerate(self.faults):
            if fault.at != at or (fault.option and fault.option not in options):
                continue
            if fault.holds and not re.search(fault.holds, text()):
                continue
            count = self._counts[index] = self._counts.get(index, 0) + 1
            if count <= fault.after or (fault.times and count > fault.after + fault.times):
                continue
            if fault.does == "linger":
                os.closerange(3, 1000)
            if fault.does in ("hang", "linger"):
                time.sleep(10_000)
            if fault.does == "die":
                os.abort()
            if fault.does == "leave":
                os._exit(0)
            if fault.does in ("nonsense", "flip"):
                return fault.does
            self._is_lost = self._is_lost or fault.does == "halt"
            raise JaxRuntimeError(fault.says)
        return ""

    def open_chip(self) -> None:
        """Hold the chip until this process ends. Raise what JAX and libtpu raise if another process holds it."""
        if not self.device or self._holds:
            return
        file = open(self.device, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            is_used_up = 0 < self.max_opens <= len(file.read())
        except BlockingIOError:
            is_used_up = True
        if is_used_up:
            file.close()
            raise RuntimeError(BUSY)
        file.write("x")
        file.flush()
        self._holds.append(file)

    # -- where it happens ----------------------------------------------------------------------------------------------

    def install(self, put: Callable[[Any, str, Any], None] = setattr) -> None:
        """Takes PJRT's place; `put` sets an attribute, such as a monkeypatch's `setattr`."""
        import jax
        from jax._src import compilation_cache, compiler, pjit, xla_bridge
        from jax._src.interpreters import pxla

        compile_, load, run = (
            compiler.backend_compile_and_load, compilation_cache.get_executable_and_time,
            pxla.ExecuteReplicated.__call__,
        )  # fmt: skip
        place = pxla.batched_device_put

        def compiles(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
            if backend.platform == "cpu":
                given = [name for name, _ in options.env_option_overrides]
                if self.options and given:
                    print("FAKE_PJRT options", json.dumps(given), flush=True)
                self.meet("compile", lambda: module.operation.get_asm(enable_debug_info=True), given)
                # A TPU's compiler's; this one's knows none of them.
                options.env_option_overrides = [
                    (name, value) for name, value in options.env_option_overrides if not name.startswith("xla_tpu_")
                ]
                found = compile_(backend, module, devices, options, callbacks)
                self._given[id(found)] = found, given
                return found
            return compile_(backend, module, devices, options, callbacks)

        def loads(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            if found[0] is not None:
                self.meet("load", lambda: self.text_of(found[0]))
                options = next((one for one in args if hasattr(one, "env_option_overrides")), None)
                given = [name for name, _ in options.env_option_overrides] if options else []
                self._given[id(found[0])] = found[0], given
            return found

        def runs(program: Any, *args: Any) -> Any:
            executable = program.xla_executable
            _, given = self._given.get(id(executable), (None, []))
            harm = self.meet("run", lambda: self.text_of(executable), given)
            found = run(program, *args)
            if harm == "nonsense":
                found = [jax.numpy.zeros_like(one) if one.dtype == bool else one for one in found]
            if harm == "flip":
                found = [one if one.dtype == bool else flip(one) for one in found]
            if self.room_bytes and self.held() > self.room_bytes:
                jax.block_until_ready(found)
                from jax.errors import JaxRuntimeError

                raise JaxRuntimeError(NO_ROOM)
            return found

        def puts(aval: Any, *args: Any, **kwargs: Any) -> Any:
            self.meet("put", lambda: str(aval))
            return place(aval, *args, **kwargs)

        backends = xla_bridge.backends

        def opens() -> Any:
            self.open_chip()
            return backends()

        put(xla_bridge, "backends", opens)
        put(compiler, "backend_compile_and_load", compiles)
        put(compilation_cache, "get_executable_and_time", loads)
        put(pxla.ExecuteReplicated, "__call__", runs)
        put(pxla, "batched_device_put", puts)
        # Programs whose way leads past Python are seen by nobody.
        put(pxla.MeshExecutable, "create_cpp_call", lambda *_: None)
        put(pjit, "_get_fastpath_data", lambda *_, **__: None)
        if self.limit_bytes:
            from jaxlib import _jax

            put(_jax.Device, "memory_stats", lambda device: self.stats())

    def held(self) -> int:
        """Bytes of live arrays on the first device."""
        import jax

        first = jax.devices()[0]
        return sum(
            shard.data.nbytes
            for array in jax.live_arrays()
            if first in array.sharding.device_set
            for shard in array.addressable_shards
            if shard.device == first
        )

    def stats(self) -> dict[str, int]:
        held = self.held()
        reserved = {name: self.reserved_bytes for name in ("bytes_reserved", "peak_bytes_reserved")}
        return {
            **(reserved if self.reserved_bytes else {}),
            "bytes_limit": self.limit_bytes,
            "bytes_in_use": held + (self.drift_bytes if held > self.limit_bytes // 10 else 0),
            "peak_bytes_in_use": held,
        }

    def text_of(self, executable: Any) -> str:
        """Of a compiled program, which is held, so that its number stays its own."""
        if id(executable) not in self._texts:
            text = "".join(module.to_string() for module in executable.hlo_modules())
            self._texts[id(executable)] = executable, text
        return self._texts[id(executable)][1]


def flip(array: Any) -> Any:
    """The array with the last bit of each number changed."""
    import jax
    import numpy as np

    words = np.asarray(array)
    changed = words.view(f"u{words.dtype.itemsize}") ^ 1
    return jax.device_put(changed.view(words.dtype), array.sharding)


# --- in another process -----------------------------------------------------------------------------------------------


def environment(layer: Layer, folder: Path) -> dict[str, str]:
    """For a process that is to run on that machine; `folder` gets the module that Python imports at its start."""
    start = folder / "sitecustomize.py"
    folder.mkdir(parents=True, exist_ok=True)
    before = start.read_text() if start.exists() else ""
    start.write_text(
        f"{before}\nimport importlib.util, sys\n"
        f"_spec = importlib.util.spec_from_file_location('fake_pjrt', {__file__!r})\n"
        "_module = sys.modules['fake_pjrt'] = importlib.util.module_from_spec(_spec)\n"
        "_spec.loader.exec_module(_module)\n_module.begin()\n"
    )
    return {VARIABLE: layer.to_json(), "PYTHONPATH": str(folder)}


def begin() -> None:
    """Lets the layer of the environment take PJRT's place once JAX is imported."""
    given = json.loads(os.environ[VARIABLE])
    layer = Layer(**{**given, "faults": [Fault(**fault) for fault in given["faults"]]})
    sys.meta_path.insert(0, Finder({"jax": lambda module: layer.install(), **names(layer)}))


def names(layer: Layer) -> dict[str, Callable[[Any], None]]:
    """What is changed in the pack's modules, by how their names end."""

    def options(module: Any) -> None:
        if layer.options:
            module.step_compiler_options = lambda mesh: dict(layer.options)

    def kernels(module: Any) -> None:
        if layer.pallas:
            made = module.Engine.__init__

            def init(self: Any, chips: Any = None, kernel: Any = None, *rest: Any, **more: Any) -> None:
                made(self, chips, "pallas", *rest, **more)

            module.Engine.__init__ = init

    found = {"tpu_runtime.programs.program": options, "tpu_runtime.engine.engine": kernels}
    for where in layer.sets:
        module = where.partition(":")[0]
        values = {key.partition(":")[2]: value for key, value in layer.sets.items() if key.startswith(f"{module}:")}
        found[module] = functools.partial(_set, values=values)
    return found


def _set(module: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, tuple(value) if isinstance(value, list) else value)


class Finder(importlib.abc.MetaPathFinder):
    """Calls a function with a module, by how its name ends, as soon as that is imported."""

    def __init__(self, after: Mapping[str, Callable[[Any], None]]) -> None:
        self._after = after

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        found = [function for end, function in self._after.items() if name == end or name.endswith(f".{end}")]
        if not found:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                loader, execute = spec.loader, spec.loader.exec_module
                loader.exec_module = functools.partial(_execute, execute, found)
                return spec
        return None


def _execute(execute: Callable[[Any], None], after: Sequence[Callable[[Any], None]], module: Any) -> None:
    execute(module)
    for function in after:
        function(module)
