"""What libtpu 0.0.42.1 says of what it does not take, in its own words, and the rung below each."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.diagnostics.selftest import memory
from comfyui_tpu.kernels import attention_config, attention_reference, dispatch, registry, residual_norm
from comfyui_tpu.kernels.dispatch import KernelFallbacks
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.engine import engine
from comfyui_tpu.tpu_runtime.machine import fallbacks, record
from comfyui_tpu.tpu_runtime.machine.fallbacks import Fallbacks, Unsupported
from comfyui_tpu.tpu_runtime.programs import executables
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget, Program, shape_struct, step_compiler_options

# As libtpu 0.0.42.1 and jax 0.10.2 said them of programs made for it.
NO_OPTION = "INVALID_ARGUMENT: No such compile option: 'xla_tpu_enable_async_all_to_all'"
NO_VALUE = "INVALID_ARGUMENT: Failed to parse 'maybe' into flag xla_tpu_scoped_vmem_limit_kib: "
SCRATCH = (
    "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation2 [shape = "
    "'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped, tag = 'input window allocation for operator input 0.'] "
    ":: attention_with_rerun.1"
)
LABEL = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 128.00M of "
    '127.94M vmem.\n  1. Size: 64.00M\n     Operator: op_name="jit(f)/attention_join/pallas_call"\n     XLA label: '
    'attention_join.1 = custom-call(x.1), custom_call_target="tpu_custom_call"'
)
NAMELESS = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %fusion.2 = bf16[8] "
    "fusion(), with size 21.51M and limit 16.00M"
)
# As users of other programs reported it.
HALT = (
    "INTERNAL: Accelerator device halted prematurely, perhaps due to an on-device check-failure. Core halted "
    "unexpectedly: INTERNAL: Accelerator device halted: HLO: %convolution.7"
)


@pytest.mark.parametrize(
    ("said", "kind", "named"),
    [
        (NO_OPTION, "option", ("xla_tpu_enable_async_all_to_all",)),
        (NO_VALUE, "option", ("xla_tpu_scoped_vmem_limit_kib",)),
        (SCRATCH, "kernel", (registry.ATTENTION,)),
        (LABEL, "kernel", (registry.PROLOGUE,)),
        (NAMELESS, "option", ("xla_tpu_scoped_vmem",)),
        ("INTERNAL: Mosaic failed to compile TPU kernel: Bad lhs type", "kernel", registry.KERNELS),
    ],
    ids=["option", "value", "scratch", "label", "no kernel", "no name"],
)
def test_classify_compile_error_names_refused_option_or_kernel(said: str, kind: str, named: tuple[str, ...]):
    error = jax.errors.JaxRuntimeError(said)
    found = fallbacks.classify_compile_error(error, "the step", ["xla_tpu_scoped_vmem_limit_kib"])
    assert found is not None and (found.kind, found.names) == (kind, named)
    assert said.splitlines()[0][:100].strip() in str(found)


@pytest.mark.parametrize(
    "said",
    ["RESOURCE_EXHAUSTED: Used 54.12G of 31.25G hbm", "INTERNAL: something else", "%attention.3 is fine", NAMELESS],
)
def test_classify_other_errors_return_none(said: str):
    error = jax.errors.JaxRuntimeError(said)
    assert (
        fallbacks.classify_compile_error(error, "the step") is None
        and fallbacks.classify_halt(error, "the step", ()) is None
    )


def test_classify_compile_error_ignores_python_type_error():
    with pytest.raises(TypeError) as error:
        residual_norm.residual_norm_kernel(*(None,) * 6, eps=1e-6)  # type: ignore[arg-type]
    assert fallbacks.classify_compile_error(error.value, "the step") is None


def test_classify_halt_names_kernel_or_all_kernels_of_program():
    named = fallbacks.classify_halt(jax.errors.JaxRuntimeError(HALT), "decode", ["attention"])
    assert named is not None and named.names == (registry.CONVOLUTION,)
    error = jax.errors.JaxRuntimeError("INTERNAL: TPU program continuator has halted")
    unnamed = fallbacks.classify_halt(error, "denoise_step", [registry.RESIDUAL_NORM, registry.ATTENTION])
    assert unnamed is not None and unnamed.names == (registry.ATTENTION, registry.RESIDUAL_NORM)


def down(start: Fallbacks, failure: Unsupported) -> Fallbacks | None:
    found = fallbacks.next_fallback(start, failure)
    return found and start | found[0]


def test_kernel_fallback_uses_small_tiles_then_xla():
    failure = Unsupported("kernel", "the step", (registry.ATTENTION,), "no room")
    first = down(Fallbacks(), failure)
    assert first == Fallbacks(kernels=KernelFallbacks(small=(registry.ATTENTION,)))
    second = down(first, failure)
    assert second == Fallbacks(kernels=KernelFallbacks(small=(registry.ATTENTION,), off=(registry.ATTENTION,)))
    assert down(second, failure) is None
    halt = Unsupported("halt", "the step", (registry.CONVOLUTION,), "halted")
    assert down(Fallbacks(), halt) == Fallbacks(kernels=KernelFallbacks(off=(registry.CONVOLUTION,)))


def test_option_fallback_removes_option_once():
    failure = Unsupported("option", "the step", ("xla_tpu_enable_async_all_to_all",), "unknown")
    first = down(Fallbacks(), failure)
    assert first is not None and down(first, failure) is None
    given = {"xla_tpu_enable_async_all_to_all": "true", "xla_tpu_scoped_vmem_limit_kib": "1"}
    assert first.left(given) == {"xla_tpu_scoped_vmem_limit_kib": "1"}


# --- what the owner switches off --------------------------------------------------------------------------------------


def test_fallbacks_from_environment_disable_kernels_and_options():
    environ = {"COMFYUI_TPU_KERNELS": "-attention, -prologue", "COMFYUI_TPU_OPTIONS": "-sparsecore,-vmem"}
    found = fallbacks.fallbacks_from_environment(environ)
    assert found.kernels == KernelFallbacks(off=("attention", "attention_prologue"))
    options = step_compiler_options(make_mesh(chips.compile_devices(chips.topology("v6e:2x4")), MeshShape(dp=2, sp=4)))
    assert len(options) == 5 and set(found.left(options)) == {"xla_tpu_enable_async_all_to_all"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("COMFYUI_TPU_KERNELS", "attention"), ("COMFYUI_TPU_KERNELS", "-splash"), ("COMFYUI_TPU_OPTIONS", "-attention")],
)
def test_environment_fallback_unknown_name_raises_value_error(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, value)
    with raises_message(ValueError, "machine.switch_unknown", variable=variable, word=f"'{value}'"):
        CompileTarget(devices=tuple(jax.devices()[:1]), precision="float32")


# --- smaller tiles ----------------------------------------------------------------------------------------------------


def test_small_tiles_use_half_of_vmem():
    call = {"q_seq": 9472, "kv_rows": [75600], "heads": 5, "head_dim": 128, "itemsize": 2}
    fastest = functools.partial(attention_config.choose_config, "TPU v6 lite", "sampled", **call)
    with dispatch.use_fallbacks(KernelFallbacks(small=(registry.ATTENTION,))):
        small = fastest()
    usual = fastest()
    assert 2 * small.vmem_mib <= usual.vmem_mib
    sizes = [attention_config.estimate_vmem_bytes(form, 9472, [75600], 128, 2) for form in (small, usual)]
    assert sizes[0] <= small.vmem_mib * 2**20 < sizes[1]


@pytest.mark.parametrize(
    "rungs",
    [KernelFallbacks(), KernelFallbacks(small=registry.KERNELS), KernelFallbacks(off=registry.KERNELS)],
    ids=str,
)
def test_residual_norm_matches_reference_under_every_fallback(rungs: KernelFallbacks):
    generator = np.random.default_rng(0)
    x, update, vector = (
        jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in ((1, 300, 256),) * 2 + ((1, 256),)
    )
    run = functools.partial(residual_norm.residual_norm, eps=1e-6, interpret=True)
    with dispatch.use_fallbacks(rungs):
        found = run(x, update, vector, vector, vector, kernel=True)
    wanted = residual_norm.residual_norm_reference(x, update, vector, vector, vector, None, eps=1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert difference(one, other) <= 1e-6


def in_float16(x: jax.Array) -> jax.Array:
    return jnp.sqrt(x.astype(jnp.float16)).astype(jnp.float32)  # a TPU has none


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "harm"),
    [
        ("Mosaic failed to compile", lambda monkeypatch: monkeypatch.setattr(jax.lax, "rsqrt", in_float16)),
        ("divisible by 8", lambda monkeypatch: monkeypatch.setattr(residual_norm, "BLOCK_BYTES", 250)),
        ("memory space vmem", lambda monkeypatch: monkeypatch.setattr(residual_norm, "_vmem_bytes", lambda *_: 2**10)),
    ],
    ids=["by Mosaic", "by JAX", "by XLA"],
)
def test_compile_or_load_refused_kernel_raises_unsupported(
    said: str, harm: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    """Only XLA names it: JAX ends the traceback of the others in the kernel's file."""

    def step(x: jax.Array, vector: jax.Array) -> jax.Array:  # of its own, so that JAX traces it
        return residual_norm.residual_norm(x, x, vector, vector, vector, eps=1e-6, kernel=True)[1]

    mesh = make_mesh(chips.compile_devices(chips.topology("v6e:1x1")), MeshShape())
    args = (shape_struct(mesh, (1, 1000, 256), jnp.bfloat16), shape_struct(mesh, (1, 256), jnp.float32))
    program = Program(name="step", fn=step, mesh=mesh, precision="bfloat16", args=args)
    harm(monkeypatch)
    with raises_message(Unsupported, "machine.unsupported", reason=re.compile(said)) as error:
        executables.compile_or_load(program)
    assert (error.value.kind, error.value.names) == ("kernel", (registry.RESIDUAL_NORM,))


def test_attention_reference_splits_queries_into_blocks(monkeypatch: pytest.MonkeyPatch):
    """At a model's size all scores at once are more than a chip has; a block's are the same numbers. A chip has room
    for more of them than a CPU is given.
    """
    generator = np.random.default_rng(0)
    q, k, v = (jnp.asarray(generator.normal(size=(2, rows, 3 * 40)), jnp.float32) for rows in (37, 50, 50))
    keys = [attention_reference.keys_of_length(k, v, jnp.array([50, 31]))]
    run = functools.partial(attention_reference.flat_attention, q, keys, head_dim=40, log_sums=True)
    wanted = run()
    monkeypatch.setattr(attention_reference, "MAX_SCORE_BYTES_CPU", 8 * 2 * 3 * 50 * 4)  # eight queries, of 37
    for found, one in zip(run(), wanted, strict=True):
        assert found is not None and one is not None
        assert difference(found, one) <= 1e-6
    text = jax.jit(run).lower().as_text()
    assert "2x3x37x50xf32" not in text and "2x3x8x50xf32" in text
    monkeypatch.setattr(attention_reference, "device_kind", lambda: "TPU v6 lite")
    assert "2x3x37x50xf32" in jax.jit(lambda: run()).lower().as_text()


# --- machine.json -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path))
    return tmp_path


RECORD = record.MachineRecord(
    fallbacks=Fallbacks(
        kernels=KernelFallbacks(off=("attention",), small=("convolution",)), options=("xla_tpu_scoped_vmem",)
    ),
    sentences=("The kernel …",),
    reserve_share=0.08,
    compilers_behind=1,
    transfer_start_s=4.5e-6,
    overlap={"0123456789abcdef": True, "fedcba9876543210": False},
    keeps_programs=False,
    rates={"to_chips": 12.5},
)


def test_machine_record_round_trips_through_file(folder: Path):
    record.write_record("8 x TPU v6 lite", RECORD)
    record.write_record("1 x TPU v5 lite", record.MachineRecord())
    assert (
        record.read_record("8 x TPU v6 lite") == RECORD
        and record.read_record("1 x TPU v5 lite") == record.MachineRecord()
    )
    assert record.read_record("another") == record.MachineRecord()
    assert list(record.read_all()) == ["8 x TPU v6 lite", "1 x TPU v5 lite"]
    assert [path.name for path in folder.iterdir()] == ["machine.json"]


STRANGE = {
    "kernels_off": ["x", 3], "kernels_small": {}, "options_off": ["xla_dump_to"], "sentences": 1, "reserve_share": 1.5,
    "compilers_behind": True, "keeps_programs": "no", "rates": {"to_chips": -1, "x": 2},
    "transfer_start_s": 0.01, "overlap": {"0123456789abcdef": "yes", "../x": True, "A" * 16: True, "": False},
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 10_000, b'{"8 x TPU v6 lite": 3}', b" " * (2**20 + 1),
        json.dumps({"8 x TPU v6 lite": STRANGE}).encode(),
    ],
    ids=["empty", "list", "cut off", "no text", "deep", "no record", "too long", "strange names"],
)  # fmt: skip
def test_machine_record_from_invalid_file_is_empty(folder: Path, content: bytes):
    (folder / "machine.json").write_bytes(content)
    assert record.read_record("8 x TPU v6 lite") == record.MachineRecord()
    record.write_record("8 x TPU v6 lite", RECORD)
    assert record.read_record("8 x TPU v6 lite") == RECORD


def test_machine_record_sanitizes_sentences_and_reserve(folder: Path):
    given = {"sentences": ["\x1b[2J\x1b]0;title\x07\nall is well" + "x" * 5000], "reserve_share": 0.9}
    (folder / "machine.json").write_text(json.dumps({"8 x \x1b[2J": given}))
    ((key, found),) = record.read_all().items()
    (sentence,) = found.sentences
    assert key == "8 x  [2J"
    assert sentence.isprintable() and "all is well" in sentence and len(sentence) == record.MAX_SENTENCE
    assert found.reserve_share is None and max(memory.RESERVES) <= record.MAX_RESERVE


def test_machine_record_union_merges_fallbacks_and_newer_numbers():
    newer = record.MachineRecord(
        fallbacks=Fallbacks(kernels=KernelFallbacks(off=("modulation",))), sentences=("another",), reserve_share=0.12
    )
    both = RECORD | newer
    assert both.fallbacks.kernels == KernelFallbacks(off=("attention", "modulation"), small=("convolution",))
    assert (both.reserve_share, both.compilers_behind, both.keeps_programs) == (0.12, 1, False)
    assert both.sentences == (*RECORD.sentences, "another") and both.rates == RECORD.rates


def test_engine_uses_recorded_measurements(folder: Path, monkeypatch: pytest.MonkeyPatch):
    devices = jax.devices()[:2]
    record.write_record(record.machine_key(devices[0].device_kind, 2), RECORD)
    used = mock.Mock()
    monkeypatch.setattr(engine.xla_cache, "use_persistent_cache", used)
    found = engine.Engine(devices)
    assert not used.called and found.ladder.fallbacks == RECORD.fallbacks
    assert found.program_cache._max_behind == 1 and found.device_cache._reserve_share == 0.08
    another = engine.Engine(jax.devices()[:1])
    assert used.called and another.program_cache._max_behind == 2 and another.device_cache._reserve_share == 0.04
