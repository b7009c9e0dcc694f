"""Runs all checks in order, and prints them as lines, or as JSON for programs and bug reports."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from importlib.util import find_spec

from ...tpu_runtime.models import NAME_HELP, lookup_spec
from . import chips, comfyui, disk, host
from .machine import Finding, HostMachine, Inspection

CHECKS: tuple[Inspection, ...] = (
    host.check_pack, host.check_python, host.check_conflicting_packages, host.check_tokenizer,
    chips.check_chips, chips.check_device_permissions, chips.check_holders, chips.check_hugepages,
    chips.check_locked_memory, chips.check_variables, chips.check_flags, chips.check_memory_limit,
    chips.check_fallbacks,
    host.check_caches, host.check_downloaded_models, disk.check_free_space, disk.check_read_rate, host.check_token,
    host.check_memory, host.check_pip,
    comfyui.check_version, comfyui.check_this_pack, comfyui.check_other_packs, comfyui.check_manager,
    comfyui.check_running,
)  # fmt: skip


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verb.add_argument("--json", action="store_true", help="a list of {topic, found, remedy, advice}, for programs")
    verb.add_argument(
        "--model", default="", metavar="MODEL",
        help=f"also check with the Hub whether this model fits on the disk (needs the network): {NAME_HELP}",
    )  # fmt: skip
    verb.add_argument("--start", action="store_true", help="also start JAX, which occupies the chips for a moment")


def run(options: argparse.Namespace, machine: HostMachine | None = None) -> int:
    """Print the report; return 1 when something needs fixing. Advice does not count."""
    if options.model:
        lookup_spec(options.model)
    findings = report(machine or HostMachine(model=options.model), is_started=options.start)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.topic:<22} {finding.found}")
            if finding.remedy:
                print(f"{'':<22} {'if wanted:' if finding.advice else '->'} {finding.remedy}")
        print(f"\n{verdict(findings)}")
    return 1 if any(finding.is_fault for finding in findings) else 0


def verdict(findings: Sequence[Finding]) -> str:
    """Return the summary of a report in a sentence."""
    faults = [finding.topic for finding in findings if finding.is_fault]
    if not faults:
        return "This machine is ready: nothing has to be fixed."
    things = "1 thing has" if len(faults) == 1 else f"{len(faults)} things have"
    return f"{things} to be fixed, by the command after each ->: {', '.join(faults)}."


def report(machine: HostMachine, *, is_started: bool = False) -> list[Finding]:
    """Return all findings about this machine. Starts no device unless `is_started`."""
    pack, python, *others = CHECKS
    if find_spec("packaging") is None:
        missing, checks = [Finding("packaging", "not installed", "pip install packaging")], others
    else:
        from . import packages

        missing, checks = [], [*packages.CHECKS, *others]
    return [
        *pack(machine),
        *python(machine),
        *missing,
        *(finding for check in checks for finding in check(machine)),
        *(chips.check_jax_start(machine) if is_started else ()),
    ]
