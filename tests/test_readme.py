"""The READMEs and the pages that both languages have: every command is run by a test or says what it needs, and both
say the same.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from comfyui_tpu.cli.main import _parser

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
READMES = (ENGLISH, CHINESE)
# Of `docs`, in English, and of `docs/zh-CN`.
BOTH = ("install", "usage", "troubleshooting", "separate_packs", "exactness", "packages")
PAGES = {ENGLISH: (ENGLISH, *(f"docs/{name}.md" for name in BOTH))}
PAGES[CHINESE] = (CHINESE, *(f"docs/zh-CN/{name}.md" for name in BOTH))
NETWORK, TPU = "network", "TPU"
# What stands beside a command that no test runs.
MARKS = {
    ENGLISH: {NETWORK: "(needs the network)", TPU: "(needs a TPU)"},
    CHINESE: {NETWORK: "（需要网络）", TPU: "（需要 TPU）"},
}
HERE = "tests/test_readme.py::test_cli_verbs_have_options_shown_in_readme"
BENCH = "tests/cli/test_bench.py::test_bench_times_and_records_every_program_of_tiny_model"
VERIFY = "tests/diagnostics/test_verify.py::test_verify_tiny_model_variants_agree_and_are_recorded"
DOCTOR = "tests/cli/test_doctor.py::test_doctor_on_healthy_machine_reports_ready"
DOCTOR_JSON = "tests/cli/test_doctor.py::test_doctor_json_lists_findings_and_advice_exits_zero"
DOCTOR_START = "tests/cli/test_doctor.py::test_check_jax_start_reports_devices_or_abort"
DOWNLOAD = "tests/checkpoints/test_download.py::test_download_to_folder_fetches_needed_files_only"
COMPARE = "tests/cli/test_compare.py::test_compare_renders_workflow_in_each_quality"
PLAN = "tests/plan/test_plan.py::test_make_report_prints_progress_and_writes_json"
SELFTEST = "tests/diagnostics/selftest/test_selftest.py::test_selftest_on_eight_chips_passes"
FIRST_RUN = "tests/diagnostics/selftest/test_first_run.py::test_first_run_report_matches_schema_and_precedes_each_check"
STAGES = "tests/nodes/test_stages.py::test_stage_commands_match_single_run_also_in_another_process"
WARMUP = "tests/cli/test_warmup.py::"
INSTALLER = "tests/installer/test_install.py::"
# The test that runs a command, or the mark that stands beside it.
SHOWN = {
    "gcloud compute tpus tpu-vm create comfyui --zone=us-east5-b --accelerator-type=v6e-8 --version=v2-alpha-tpuv6e": (
        NETWORK
    ),
    "gcloud compute tpus tpu-vm ssh comfyui --zone=us-east5-b -- -L 8188:127.0.0.1:8188": NETWORK,
    "gcloud compute tpus tpu-vm delete comfyui --zone=us-east5-b": NETWORK,
    "python3 setup.py demo": NETWORK,
    "python3 setup.py test": NETWORK,
    "git clone https://github.com/comfyui-tpu/ComfyUI-TPU": NETWORK,
    "python -m pip install -r requirements.txt": NETWORK,
    "python -m pip install --no-deps -e .": NETWORK,
    "python3 setup.py install": INSTALLER + "test_install_resumes_after_interruptions_and_repeat_changes_nothing",
    "python3 setup.py start": INSTALLER + "test_start_runs_comfyui_with_flags_and_environment",
    "python3 setup.py start --port 8189": INSTALLER + "test_start_runs_comfyui_with_flags_and_environment",
    "python3 setup.py update": INSTALLER + "test_update_moves_own_clone_and_keeps_user_changes",
    "python3 setup.py uninstall": INSTALLER + "test_uninstall_removes_installed_files_and_keeps_user_files",
    "comfyui-tpu doctor": DOCTOR,
    "python ~/ComfyUI/custom_nodes/comfyui-tpu doctor": (
        "tests/test_entry_points.py::test_folder_runs_as_command_without_installation"
    ),
    "comfyui-tpu doctor [--model NAME] [--json] [--start]": DOCTOR_JSON,
    "comfyui-tpu doctor --start": DOCTOR_START,
    "comfyui-tpu selftest --first-run --report first_run.json": FIRST_RUN,
    "comfyui-tpu selftest [--first-run] [--quick] [--one-process] [--model NAME] [--report FILE]": FIRST_RUN,
    "comfyui-tpu selftest --report FILE": SELFTEST,
    "comfyui-tpu bench wan2.1-t2v-14b": BENCH,
    "comfyui-tpu bench MODEL [--quality NAME] [--json FILE]": BENCH,
    "comfyui-tpu bench MODEL --verify [--json FILE]": VERIFY,
    "comfyui-tpu download wan2.1-t2v-14b": NETWORK,
    "comfyui-tpu download MODEL [--to DIR]": DOWNLOAD,
    "comfyui-tpu download MODEL": DOWNLOAD,
    "comfyui-tpu run examples/api/wan21_t2v_720p.json": TPU,
    (
        ".venv/bin/comfyui-tpu run examples/api/wan21_t2v_720p.json --tiny "
        '--set 1.prompt="a yellow triangle moves up on black"'
    ): ("tests/nodes/test_examples.py::test_example_runs_headless_on_tiny_model"),
    "comfyui-tpu run WORKFLOW.json [--set NODE.INPUT=VALUE ...] [--tiny] [--out DIR]": (
        "tests/nodes/test_examples.py::test_example_runs_headless_on_tiny_model"
    ),
    "comfyui-tpu batch WORKFLOW.json --set-from prompts.jsonl --out DIR [--ray ADDRESS]": (
        "tests/distributed/fleet/test_same_results.py::test_batch_results_equal_single_runs"
    ),
    "comfyui-tpu compare WORKFLOW.json [--quality A,B] [--set NODE.INPUT=VALUE] [--out DIR] [--tiny]": COMPARE,
    "comfyui-tpu compare": COMPARE,
    "comfyui-tpu convert WORKFLOW.json [--back] [--to FILE]": (
        "tests/nodes/test_loaders.py::test_convert_command_writes_file_and_prints_changes"
    ),
    "comfyui-tpu serve": "tests/distributed/fleet/test_same_results.py::test_serve_command_answers_requests",
    "comfyui-tpu serve [--host 127.0.0.1] [--port 8190] [--models DIR]": (
        "tests/distributed/fleet/test_same_results.py::test_serve_command_answers_requests"
    ),
    "comfyui-tpu encode --folder DIR": STAGES,
    "comfyui-tpu denoise --folder DIR": STAGES,
    "comfyui-tpu decode --folder DIR": STAGES,
    "comfyui-tpu plan MODEL --topology v6e:2x4 [--json FILE] [--explain]": PLAN,
    "comfyui-tpu plan MODEL --topology v6e:2x4": PLAN,
    "comfyui-tpu warmup WORKFLOW.json": WARMUP + "test_warmup_example_uses_sizes_of_workflow",
    "comfyui-tpu warmup --model NAME": WARMUP + "test_warmup_model_uses_tiny_or_given_sizes",
    "comfyui-tpu monitor [--url http://127.0.0.1:8188] [--once] [--interval 1]": (
        "tests/cli/test_monitor.py::test_monitor_switches_to_server_that_starts_later"
    ),
    "comfyui-tpu follow [--coordinator HOST:PORT --process N --of M]": (
        "tests/distributed/multihost/test_hosts.py::test_two_hosts_match_one_process_and_report_cancel_and_lost_host"
    ),
    "comfyui-tpu calibrate MODEL [--model-id ID] [--prompt TEXT]": (
        "tests/programs/test_mag_cache.py::test_cli_calibrate_saves_curve_used_by_denoise"
    ),
    "comfyui-tpu COMMAND --help": HERE,
    "hf auth login": NETWORK,
}
STARTS = ("comfyui-tpu ", "python3 ", "python ", "git ", "pip ", "hf ")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def whole(name: str) -> str:
    """The README of a language with its pages."""
    return "\n".join(map(text, PAGES[name]))


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Every command of a page with the line that it stands in: lines of code blocks, and code within a text."""
    in_block = False
    for line in page.splitlines():
        if line.startswith("```"):
            in_block = not in_block
        elif in_block:
            command = re.split(r"\s+#", line)[0].strip()
            if command and not command.startswith(("cd ", "export ")):
                yield command, line
        else:
            yield from ((code, line) for code in re.findall(r"`([^`]+)`", line) if code.startswith(STARTS))


def problems(page: str, marks: dict[str, str]) -> list[str]:
    """What is wrong with a page's commands: those that nobody vouches for, and those that are not there any more."""
    found = list(commands(page))
    said = [
        f"{command}: in which test does it run, or what does it need?" for command, _ in found if command not in SHOWN
    ]
    for command, line in found:
        if (mark := marks.get(SHOWN.get(command, ""))) and mark not in line:
            said.append(f"{command}: {mark} is missing beside it")
    return said + [f"{command}: no longer shown" for command in SHOWN.keys() - {command for command, _ in found}]


@pytest.mark.parametrize("name", READMES)
def test_readme_commands_are_tested_or_marked(name: str):
    page = whole(name)
    assert problems(page, MARKS[name]) == []
    mark = MARKS[name][TPU]
    assert problems(page.replace(mark, "", 1), MARKS[name]) == [
        f"comfyui-tpu run examples/api/wan21_t2v_720p.json: {mark} is missing beside it"
    ]
    assert len(problems(page + "\n```\ncomfyui-tpu paint\n```\n", MARKS[name])) == 1
    assert len(problems(page.replace("comfyui-tpu decode", "comfyui-tpu paint"), MARKS[name])) == 2


@pytest.mark.parametrize("evidence", sorted({value for value in SHOWN.values() if "::" in value}))
def test_readme_evidence_test_exists(evidence: str):
    path, _, name = evidence.partition("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def options_of(command: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", command)


def test_cli_verbs_have_options_shown_in_readme(capsys: pytest.CaptureFixture[str]):
    """`comfyui-tpu VERB --help` of every verb, which must be all that the tables list."""
    verbs: dict[str, set[str]] = {}
    for command in SHOWN:
        if command.startswith("comfyui-tpu ") and "COMMAND" not in command:
            verbs.setdefault(command.split()[1], set()).update(options_of(command))
    (table,) = (action.choices for action in _parser()._actions if action.dest == "==SUPPRESS==" or action.choices)
    assert set(table) == set(verbs), "the README's table lacks a verb, or has one too many"
    for verb, options in verbs.items():
        with pytest.raises(SystemExit) as end:
            _parser().parse_args([verb, "--help"])
        said = capsys.readouterr().out
        assert end.value.code == 0 and options <= set(options_of(said)), verb


@pytest.mark.parametrize("verb", ["install", "start", "update", "uninstall"])
def test_setup_verb_has_options_shown_in_readme(verb: str):
    run = subprocess.run([sys.executable, "setup.py", verb, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shown = {
        option for command in SHOWN if command.startswith(f"python3 setup.py {verb}") for option in options_of(command)
    }
    said = {"install": {"--comfyui", "--dry-run", "--yes"}}.get(verb, set())
    assert shown | said <= set(options_of(run.stdout)) and all(f"`{option}" in whole(ENGLISH) for option in said)


@pytest.mark.parametrize("name", READMES)
def test_readme_costs_equal_price_times_predicted_seconds(name: str):
    predicted = {
        record.get("recipe", record["model"]): record
        for record in json.loads((ROOT / "benchmarks" / "predicted.json").read_text())
    }
    keys = (
        "wan2.1-t2v-14b", "Wan 2.2 T2V, 4 steps, v6e:2x4", "Wan 2.1 T2V 1.3B, 50 steps, v6e:1x1",
        "FLUX.2 klein 4B, 4 steps, v6e:1x1",
    )  # fmt: skip
    page = text(name)
    _, _, *lines = page.partition("<!-- costs:begin -->\n")[2].partition("<!-- costs:end -->")[0].splitlines()
    (price,) = {float(found) for found in re.findall(r"\$([0-9.]+)", page)}
    for key, line in zip(keys, lines, strict=True):
        record, (result, chips, an_hour, seconds, a_result) = predicted[key], line.strip("| ").split(" | ")
        settings = record["settings"]
        assert f"{settings['width']}x{settings['height']}" in result and str(settings["num_inference_steps"]) in result
        assert chips == f"v6e-{record['chips']}" and float(an_hour) == round(price * record["chips"], 2)
        assert float(seconds) == pytest.approx(record["predicted_total_s"], rel=5e-3)
        cost = record["predicted_total_s"] / 3600 * price * record["chips"]
        assert float(a_result) == pytest.approx(cost, rel=0.2 if cost < 0.001 else 0.02)


def headings(page: str) -> list[int]:
    """Levels in order, without code blocks."""
    return [len(line) - len(line.lstrip("#")) for line in _prose(page) if line.startswith("#")]


def _prose(page: str) -> Sequence[str]:
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()


def rows(page: str) -> list[int]:
    """The tables' sizes in order: lines, and columns."""
    lines = [line.count(" | ") if line.startswith("|") else None for line in _prose(page)]
    return [lines.count(None), *[count for count in lines if count is not None]][1:]


def places(name: str) -> list[str]:
    """Where pictures and links to pages lead, seen from the root, but for those to the other language."""
    found = re.findall(
        r"\]\(([^)\s#]+)(?:#[^)]*)?\)", re.sub(r"^\[(English|中文)\].*$", "", text(name), flags=re.MULTILINE)
    )
    return [os.path.normpath(Path(name).parent / target) for target in found if "://" not in target]


@pytest.mark.parametrize(("english", "chinese"), zip(PAGES[ENGLISH], PAGES[CHINESE], strict=True))
def test_readme_languages_have_same_structure(english: str, chinese: str):
    one, other = text(english), text(chinese)
    assert headings(one) == headings(other) and headings(one)
    assert [command for command, _ in commands(one)] == [command for command, _ in commands(other)]
    assert rows(one) == rows(other)
    translated = dict(zip(PAGES[ENGLISH], PAGES[CHINESE], strict=True))
    assert [translated.get(place, place) for place in places(english)] == places(chinese)


def test_readme_is_short_and_lists_every_page():
    """One screen leads to a first image and one to a video. The README lists all pages but the engineering log."""
    page = text(ENGLISH)
    assert max(len(text(name).splitlines()) for name in READMES) <= 120
    for first, then in (("Try it", "From a bare VM to a video"), ("From a bare VM to a video", "Models")):
        assert page.partition(f"\n## {first}\n")[2].partition(f"\n## {then}\n")[0].count("\n") < 60, first
    listed = {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} - {"docs/LOG.md"}
    assert listed == {place for place in places(ENGLISH) if place.startswith("docs/") and place.endswith(".md")}


@pytest.mark.parametrize(
    "name", [*READMES, "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
)
def test_docs_links_lead_to_existing_files(name: str):
    folder = (ROOT / name).parent
    for target in re.findall(
        r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```|`[^`\n]*`", "", text(name), flags=re.DOTALL)
    ):
        assert "://" in target or (folder / target).exists(), target
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text(name)):
        assert (folder / picture).stat().st_size < 150_000, picture
