"""Plans: memory against an independent compile, what fits, what would; and the real programs of every model."""

import functools
import importlib.util
import json
import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.attention.policy import AttentionConfig, AttentionPolicy
from comfyui_tpu.cli.main import main
from comfyui_tpu.sharding.rules import REPLICATED
from comfyui_tpu.tests.plan.products import assert_as_written
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime import memory_errors
from comfyui_tpu.tpu_runtime.cost_model import chips, interconnect
from comfyui_tpu.tpu_runtime.machine import record as machine_record
from comfyui_tpu.tpu_runtime.model_spec import Component, ModelSpec
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS, lookup_spec
from comfyui_tpu.tpu_runtime.plan import advice, compile, findings, plan, process, report
from comfyui_tpu.tpu_runtime.programs import denoise_step
from comfyui_tpu.tpu_runtime.programs.program import Program
from comfyui_tpu.tpu_runtime.units import GIB, MIB
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SPEC = FLAGSHIPS[0]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED = [record for record in json.loads((BENCHMARKS / "predicted.json").read_text()) if "recipe" not in record]


@dataclass(frozen=True, kw_only=True)
class SmallRequest(compile.PlanRequest):
    """Two programs of ours in place of the model's: weights of so many GiB, and a state of half a GiB a frame."""

    weights_gib: tuple[float, float] = (1.0, 1.0)
    grows: bool = False

    def programs(self) -> tuple[Program, ...]:
        mesh = Mesh(np.array(chips.compile_devices(self.topology)).reshape(1, -1, 1), ("dp", "sp", "tp"))
        frames = self.settings.num_frames if self.grows else 1
        sizes = dict(zip(("encode", "denoise"), self.weights_gib, strict=True))
        return tuple(_small(mesh, name, sizes[name], frames) for name in self.stages if name in sizes)


def _small(mesh: Mesh, name: str, weights_gib: float, frames: int) -> Program:
    def shaped(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("sp")))

    def step(weights: dict, state: jax.Array) -> jax.Array:
        return jnp.tanh(state * weights["w"][0])

    return Program(
        name=f"{name}_step",
        fn=step,
        weights={"w": shaped(int(weights_gib * 1024), 1024, 512)},
        components=(name,),
        args=(shaped(frames * 512, 1024, 512),),
        mesh=mesh,
        precision="bfloat16",
        runs=50 if name == "denoise" else 1,
    )


def small(topology: str, **more: object) -> SmallRequest:
    return SmallRequest(spec=SPEC, settings=SPEC.settings(), topology=chips.topology(topology), **more)


def rows_of(request: SmallRequest) -> list[report.ProgramPlan]:
    done = [compile.compile_program(program, request.topology) for program in request.programs()]
    return [plan.plan_program(each, None, {}, request.topology) for each in done]


@pytest.fixture(scope="module")
def small_plan() -> report.Plan:
    return plan.make_plan(small("v6e-8", weights_gib=(2.0, 4.0)))


# --- the report -------------------------------------------------------------------------------------------------------


def test_plan_memory_matches_independent_compile(small_plan: report.Plan):
    program = small("v6e-8", weights_gib=(2.0, 4.0)).programs()[1]
    reported = small_plan.programs[1].memory
    stats = jax.jit(program.fn).lower(*program.arguments).compile().memory_analysis()
    assert reported.arguments == stats.argument_size_in_bytes
    assert reported.temporaries == stats.temp_size_in_bytes
    assert reported.output == stats.output_size_in_bytes
    assert reported.weights == 4 * GIB // 8
    assert reported.peak == reported.arguments + reported.output + reported.temporaries


def test_compile_program_reuses_stored_result_or_recompiles_damaged(
    small_plan: report.Plan, monkeypatch: pytest.MonkeyPatch
):
    """Families share programs, and plans are repeated; a damaged entry is compiled anew."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
    program = small("v6e-8", weights_gib=(2.0, 4.0)).programs()[1]
    again = compile.compile_program(program, chips.topology("v6e-8"))
    assert again.memory == small_plan.programs[1].memory and again.text
    monkeypatch.undo()
    for entry in compile.STORE.folder.iterdir():
        entry.write_bytes(b"damaged")
    assert compile.compile_program(program, chips.topology("v6e-8")).memory == again.memory


def test_predict_programs_times_programs_of_same_name_separately(small_plan: report.Plan):
    """As forms of one step are."""
    request = small("v6e-8", weights_gib=(2.0, 4.0))
    denoise = request.programs()[1]
    grown = _small(denoise.mesh, "denoise", 4.0, frames=81)
    done = [compile.compile_program(program, request.topology) for program in (denoise, grown)]
    one, longer = plan.predict_programs(done, request.topology, lambda line: None)
    assert one.name == longer.name
    assert one.predicted_s == small_plan.programs[1].predicted_s
    assert one.predicted_s and longer.predicted_s and longer.predicted_s > 10 * one.predicted_s


def test_plan_residency_is_all_weights_plus_largest_remainder(small_plan: report.Plan):
    rest = max(program.memory.peak - program.memory.weights for program in small_plan.programs)
    assert small_plan.residency_bytes == 6 * GIB // 8 + rest
    assert small_plan.fits and small_plan.advice == ()


def test_plan_json_contains_every_field(small_plan: report.Plan):
    read = json.loads(json.dumps(small_plan.to_json()))
    assert read.keys() >= {
        "model", "topology", "chip", "settings", "mesh", "precision", "programs", "residency_bytes", "fits",
        "predicted_total_s", "label", "advice",
    }  # fmt: skip
    assert (read["model"], read["topology"], read["label"]) == (SPEC.name, "v6e:2x4", "predicted by the compiler")
    for program in read["programs"]:
        assert program.keys() >= {
            "name", "runs", "memory", "fits", "compile_s", "xla_cycles", "kernel_cycles", "collectives", "predicted_s",
            "model_flops", "mfu", "ceiling_share",
        }  # fmt: skip
        assert program["memory"].keys() >= {"arguments", "temporaries", "output", "alias", "peak"}
        assert program["xla_cycles"] > 0 and program["predicted_s"] > 0
    once, fifty = (program["predicted_s"] for program in read["programs"])
    assert read["predicted_total_s"] == pytest.approx(once + 50 * fifty)


def test_format_plan_marks_times_as_predicted_and_names_operations(small_plan: report.Plan):
    text = report.format_plan(small_plan, explain=True)
    assert "predicted by the compiler" in text and "nothing was measured" in text
    assert re.search(r"^denoise_step +50 +1x8x1 ", text, re.MULTILINE)
    assert "Memory with all components loaded:" in text and "fits." in text
    assert re.search(r"^This plan took up to \d+\.\d+ GiB of host memory\.$", text, re.MULTILINE)
    assert "denoise_step: the most expensive operations" in text and "test_plan.py:" in text


def test_transfer_start_uses_measurement_of_this_machine(
    small_plan: report.Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path))
    eight, four = chips.topology("v6e:2x4"), chips.topology("v6e:2x2")
    assumed = plan.transfer_start(eight)
    assert assumed == report.TransferStart(seconds=interconnect.START_S, is_measured=False)
    learnt = machine_record.MachineRecord(transfer_start_s=8.25e-6)
    machine_record.write_record(machine_record.machine_key("TPU v6 lite", 8), learnt)
    measured = plan.transfer_start(eight)
    assert (measured.seconds, measured.is_measured) == (8.25e-6, True)
    assert plan.transfer_start(four) == assumed
    text = report.format_plan(replace(small_plan, transfer_start=measured))
    assert "Each collective starts in 8.2 us, as the self-test measured here." in text
    assert "only the start of collectives was measured" in text
    assert "Each collective starts in 5.0 us, an assumption" in report.format_plan(small_plan)


# --- what fits --------------------------------------------------------------------------------------------------------


def test_advice_for_weights_that_fit_separately_names_eviction():
    request = small("v5e-1", weights_gib=(9.0, 10.0))
    (sentence,) = advice.give_advice(request, [replace(row, fits=True) for row in rows_of(request)])
    assert re.search(
        r"need 2\d\.\d\d of 15.75 GiB\. The runtime evicts idle components.* it fits: denoise_step", sentence
    )


def test_advice_for_weights_too_large_names_more_chips():
    request = small("v5e-1", weights_gib=(1.0, 40.0))
    said, would = advice.give_advice(request, rows_of(request))
    assert "denoise_step does not fit: it needs at least 41" in said or "at least 40" in said
    assert "Evicting idle components does not help" in said
    assert re.search(r"as a compile confirmed: 4 chips \(v5e:2x2\) instead of 1 .* needs 10\.\d\d GiB", would)


def test_advice_for_state_too_large_names_fewer_frames():
    request = small("v5e-1", weights_gib=(1.0, 4.0), grows=True)
    said, would = advice.give_advice(request, rows_of(request)[1:])
    assert re.search(r"at least \d\d\.\d\d of 15.75 GiB per device, of which 4.00 are weights", said)
    found = re.search(r"as a compile confirmed: (\d+) frames instead of 81", would)
    assert found and int(found.group(1)) % 4 == 1 and int(found.group(1)) <= 11, would


def test_parse_compile_error_vmem_overflow_names_kernel():
    message = (
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating "
        "on stack for %splash.2 = (f32[2048,128]) custom-call(%x). Scoped allocation with size 21.51M and limit 16.00M "
        "exceeded scoped vmem limit by 5.51M."
    )
    assert memory_errors.parse_compile_error(message).sentence.startswith(
        "kernel splash.2 needs 21.51M of the 16.00M on-chip memory"
    )


def test_compile_program_other_compiler_error_raises_runtime_error(monkeypatch: pytest.MonkeyPatch):
    def compile_(*_: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: something")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    program = small("v6e-1", weights_gib=(0.5, 1.5)).programs()[0]
    with pytest.raises(RuntimeError, match="the TPU's compiler failed: INTERNAL: something"):
        compile.compile_program(program, chips.topology("v6e-1"))


# --- the command ------------------------------------------------------------------------------------------------------


def parse_plan_options(*words: str) -> dict[str, Any]:
    """What the command hands to its process."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process, "make_report", lambda options, host: found.append(options) or "")
        assert main(["plan", *words, "--debug"]) == 0
    return json.loads(json.dumps(found[0]))


def parse_plan_request(*words: str) -> compile.PlanRequest:
    given = parse_plan_options(*words)
    assert (given.pop("explain"), given.pop("json_file")) == (False, None)
    return plan.parse_request(**given)


@pytest.mark.parametrize("words", [["flux2-dev"], ["--model", "flux2-dev"], ["--steps", "4", "flux2-dev"]])
def test_plan_command_accepts_model_with_or_without_option(words: list[str]):
    assert parse_plan_options(*words)["model"] == "flux2-dev"
    for wrong in ([], [*words, "--model", "flux2-dev", "flux2-dev"]):
        with pytest.raises(SystemExit):
            main(["plan", *wrong])


def test_plan_options_are_parsed_into_request():
    words = ["--topology", "v6e-4", "--num-frames", "41", "--mesh", "1,4,1", "--guidance", "1"]
    words += ["--quality", "int8+sparse"]
    given = parse_plan_options(SPEC.name, *words, "--explain", "--models", "a b", "--models", "c", "--json", "f.json")
    assert (given.pop("explain"), given.pop("json_file"), given["models"]) == (True, "f.json", ["a b", "c"])
    request = plan.parse_request(**given)
    assert request.settings.quality == "int8+sparse"
    assert parse_plan_request("wan2.2-i2v-a14b", "--guidance", "2").settings.guidance_scale_2 == 2.0
    assert (
        parse_plan_request("wan2.2-i2v-a14b", "--guidance", "2", "--guidance-2", "3").settings.guidance_scale_2 == 3.0
    )
    assert (request.topology.name, request.settings.num_frames, request.settings.guidance_scale) == ("v6e:2x2", 41, 1.0)
    assert request.settings.height == SPEC.inputs["height"].default
    assert str(request.mesh_shape) == "dp=1 sp=4 tp=1"


FRAMES = Expected("settings.grid", multiple_of=4, plus=1)
SPARSE = Expected("settings.others_have", who="Wan, but not TI2V, and HunyuanVideo")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--num-frames", "80"],
            refused_input("num_frames", "settings.breaks_rule", value=80, rule=FRAMES, nearest=[77, 81]),
        ),
        (["--topology", "v6e:9x9"], Expected("plan.no_topology", name="'v6e:9x9'", known=re.compile("^v6e:1x1"))),
        (["--mesh", "2x4"], Expected("plan.mesh_malformed", text="'2x4'")),
        (
            ["--model", "z-image-turbo", "--quality", "int8+sparse"],
            refused_input("quality", "settings.not_an_option", others=SPARSE),
        ),
        (
            ["--stages", "denoise,paint"],
            Expected("plan.stages_unknown", stages="'denoise,paint'", allowed=re.compile("^encode")),
        ),
    ],
)
def test_plan_invalid_option_raises_value_error_with_allowed_values(words: Sequence[str], expected: Expected):
    with raises_message(ValueError, expected):
        parse_plan_request(*([] if "--model" in words else [SPEC.name]), *words)


def test_plan_step_cache_of_model_without_it_raises_value_error():
    """A text of the command line alone, without a key."""
    with pytest.raises(ValueError, match="this model has no step_cache. Leave --step-cache out."):
        parse_plan_request("--model", "z-image-turbo", "--step-cache")


def test_make_report_prints_progress_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "parse_request", lambda **asked: small("v6e-1"))
    written: list[str] = []
    text = plan.make_report(written.append, json_file=str(tmp_path / "plan.json"))
    assert written[0] == "compiles 2 programs for v6e:1x1, which may take minutes each"
    assert [line.partition(":")[0] for line in written[1:3]] == ["1 of 2, encode_step", "2 of 2, denoise_step"]
    assert "denoise_step" in text and written[-1] == f"written: {tmp_path / 'plan.json'}"
    assert json.loads((tmp_path / "plan.json").read_text())["topology"] == "v6e:1x1"


# --- the benchmark ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    found = importlib.util.spec_from_file_location("benchmark_predict", BENCHMARKS / "predict.py")
    module = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)
        found.loader.exec_module(module)
    return module


def test_predict_script_inserts_table_between_markers(benchmark: ModuleType, small_plan: report.Plan):
    record = {**small_plan.to_json(), "title": "Small"}
    readme = benchmark.insert(
        "before\n<!-- predicted:begin -->\nold\n<!-- predicted:end -->\nafter\n", benchmark.section([record])
    )
    assert readme.startswith("before\n<!-- predicted:begin -->\nPredicted by the compiler (libtpu ")
    assert readme.endswith(" |\n<!-- predicted:end -->\nafter\n") and "old" not in readme
    assert re.search(r"^\| Small \| 1280x720 \| 81 \| 50 \| 1x8x1 \| \d", readme, re.MULTILINE)
    with pytest.raises(ValueError, match="must contain <!-- predicted:begin -->"):
        benchmark.insert("no markers", "")


def test_merged_record_keeps_unpredicted_stages_and_drops_old_programs(benchmark: ModuleType, small_plan: report.Plan):
    old = small_plan.to_json()
    program = old["programs"][0]
    weights = {"memory": {**program["memory"], "weights": 2**30, "peak": 3 * 2**30}, "weights": ["vae_decoder"]}
    decode = {**program, **weights, "name": "decode", "runs": 2, "predicted_s": 0.5, "mesh": "1x2x1"}
    new = {**old, "programs": [{**program, "predicted_s": 1.0}], "predicted_total_s": 0.0, "residency_bytes": 0}
    gone = {**program, "name": f"{program['name'].partition('.')[0]}.first", "predicted_s": 9.0}
    found = benchmark.merged(new, {**old, "programs": [gone, program, decode]})
    assert [(each["name"], each["predicted_s"]) for each in found["programs"]] == [
        (program["name"], 1.0),
        ("decode", 0.5),
    ]
    assert found["predicted_total_s"] == program["runs"] * 1.0 + 2 * 0.5
    assert found["residency_bytes"] == program["memory"]["weights"] + 2**30 + 2 * 2**30
    assert found["mesh"] == {program["name"]: program["mesh"], "decode": "1x2x1"} and found["fits"]


def test_predicted_records_cover_every_flagship_and_fit():
    records = {record["model"]: record for record in RECORDED}
    assert list(records) == [spec.name for spec in FLAGSHIPS]
    for spec in FLAGSHIPS:
        record, asked = records[spec.name], json.loads(json.dumps(vars(spec.settings())))
        assert record["topology"] == "v6e:2x4" and record["fits"], spec.name
        assert all(program["fits"] and program["predicted_s"] > 0 for program in record["programs"]), spec.name
        assert record["settings"] == {name: asked[name] for name in record["settings"]}, spec.name


def test_predicted_records_cover_every_recipe_and_match_docs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    recipes = runpy.run_path(str(BENCHMARKS / "recipes.py"))
    records = {
        record["recipe"]: record for record in json.loads((BENCHMARKS / "predicted.json").read_text())[len(RECORDED) :]
    }
    assert list(records) == [recipe.key for recipe in recipes["RECIPES"]]
    for recipe in recipes["RECIPES"]:
        record, asked = records[recipe.key], vars(lookup_spec(recipe.model).settings(**recipe.widgets))
        assert (record["model"], record["topology"]) == (recipe.model, recipe.topology)
        assert all(program["fits"] and program["predicted_s"] > 0 for program in record["programs"]), recipe.key
        assert all(record["settings"][name] == asked[name] for name in recipe.widgets), recipe.key
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text("utf-8")
    assert recipes["section"](list(records.values())) in page


@pytest.mark.recorded
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda record: record["model"])
def test_denoiser_prediction_matches_record(recorded: dict):
    spec = lookup_spec(recorded["model"])
    request = compile.PlanRequest(
        spec=spec, settings=spec.settings(), topology=chips.topology(recorded["topology"]), stages=("denoise",)
    )
    (again,) = plan.make_plan(request).programs
    (before,) = (program for program in recorded["programs"] if program["name"] == again.name)
    assert again.predicted_s == pytest.approx(before["predicted_s"], rel=0.05)
    assert again.memory.peak == pytest.approx(before["memory"]["peak"], rel=0.05)


# --- the real programs ------------------------------------------------------------------------------------------------


def request_of(spec: ModelSpec, stages: tuple[str, ...], **sizes: int) -> compile.PlanRequest:
    settings = spec.settings(**sizes)
    return compile.PlanRequest(spec=spec, settings=settings, topology=chips.topology("v6e-8"), stages=stages)


def is_small(spec: ModelSpec, stages: tuple[str, ...]) -> bool:
    """Whether `programs_of` takes a small size. The compiler's time grows with it, its choices hardly change."""
    return "decode" in stages or spec.name != SPEC.name


def programs_of(spec: ModelSpec, stages: tuple[str, ...]) -> tuple[Program, ...]:
    """Networks of blocks are the real ones: scanned, their depth costs no compile time. Small is 320x448 for them:
    attention scores are then larger than what is made of a text alone. A VAE has no scan, so it is tiny, and a decoder
    has one residual block for each size.
    """
    sizes = dict(spec.miniature.inputs)
    if "decode" in stages:
        tiny = [replace(part, config={**part.config, **shallow(part)}) for part in spec.components if not part.blocks]
        spec = replace(spec, components=(*(part for part in spec.components if part.blocks), *tiny))
    else:
        sizes |= {name: 4 * sizes[name] for name in ("height", "width")}
    return request_of(spec, stages, **(sizes if is_small(spec, stages) else {})).programs()


def shallow(part: Component) -> dict[str, Any]:
    """The tiny config; a decoder's with as few residual blocks as upstream can build."""
    depth = {"AutoencoderKLWan": "num_res_blocks"}.get(part.class_name, "layers_per_block")
    return {**part.tiny, depth: 0} if part.name == "vae_decoder" else dict(part.tiny)


SHORT = AttentionConfig(maximum="zero", block_q=128, step=128, unroll=2)
# Bytes: scores of a small program have more, a layer's result for a text at most 16 MiB.
SMALL_SCORES = 20 * MIB
# Of a language model, which has no kernel: those of two prompts of 512 tokens and all 32 heads.
TEXT_SCORES = 64 * MIB
# Programs that were compiled and had nothing wrong with them.
SOUND: set[str] = set()
# Blocks and autoencoder are those of another flagship, from the same file.
SIBLINGS = ("wan2.2-i2v-a14b", "hunyuanvideo1.5-i2v-720p")
ALIKE = (
    *(f"{name}-{stage}" for name in SIBLINGS for stage in ("denoise", "decode")),
    # Autoencoders with the layers of FLUX.2's, and of Wan's.
    "flux2-dev-decode",
    "z-image-turbo-decode",
    "qwen-image-2512-decode",
    # Steps that are sharded as Wan's and FLUX.2's are, and decoders whose layers are split as its are.
    "cogvideox1.5-5b-denoise",
    "qwen-image-2512-denoise",
    "z-image-turbo-denoise",
    "cogvideox1.5-5b-decode",
    "hunyuanvideo1.5-t2v-720p-decode",
)
EVERY = [
    pytest.param(spec, stages, id=name, marks=[pytest.mark.recorded] if name in ALIKE else [])
    for spec in FLAGSHIPS
    for stages in (("encode", "denoise"), ("image", "decode"))
    for name in [f"{spec.name}-{stages[-1]}"]
]


def is_declared(spec: ModelSpec, program: Program, finding: str) -> bool:
    """Whether the weight that a finding names is one that the model's rules leave on every chip."""
    (name,) = re.findall(r"\['(.+?)'\]", finding)
    rules = (rule for component in program.components for rule in spec.component(component).rules)
    return next((rule.axes for rule in rules if rule.matches(name)), None) == REPLICATED


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", slower(FLAGSHIPS, *(spec for spec in FLAGSHIPS if spec.name in SIBLINGS)), ids=lambda spec: spec.name
)
def test_programs_replicate_only_declared_weights(spec: ModelSpec):
    for program in request_of(spec, ("encode", "denoise")).programs():
        found = findings.find_replicated_weights(program)
        assert [each for each in found if not is_declared(spec, program, each)] == []
        assert findings.find_huge_matmuls(program) == []


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "stages"), EVERY)
def test_programs_compile_without_scatters_or_float32_scores(
    spec: ModelSpec, stages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    # Kernels with little code: what is asked for is around them.
    monkeypatch.setattr(denoise_step, "AttentionPolicy", functools.partial(AttentionPolicy, form=SHORT))
    limit = {"limit": SMALL_SCORES} if is_small(spec, stages) else {}
    multiplied = []
    for program in programs_of(spec, stages):
        lowered = program.lower()
        source = lowered.as_text()
        if source in SOUND:
            continue  # families share encoders and VAEs
        multiplied.append(assert_as_written(program))
        # The least effort: a third of the time, and the same structure.
        quick = {"exec_time_optimization_effort": -1.0}
        text = lowered.compile(compiler_options=quick).as_text()
        assert findings.find_scatters(text) == [], program.name
        own = {"limit": TEXT_SCORES} if program.name.startswith("text_encoder") else limit
        assert findings.find_float32_scores(text, **own) == [], program.name
        SOUND.add(source)
    assert any(multiplied) or not multiplied
