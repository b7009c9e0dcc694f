"""All checks in order, and how they are shown: lines, or JSON for programs and bug reports."""

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable, Iterator

from . import chips, comfyui, folders, packages
from .machine import Finding, Machine

Check = Callable[[Machine], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    packages.versions_here,
    packages.builds,
    packages.companions,
    packages.twice,
    packages.tokenizer,
    chips.plugged_in,
    chips.rights,
    chips.holders,
    chips.host,
    chips.variables,
    folders.caches,
    folders.models,
    folders.token,
    folders.memory,
    folders.pip,
    comfyui.version,
    comfyui.requirements,
    comfyui.this_pack,
    comfyui.other_packs,
    comfyui.manager,
    comfyui.environment,
    comfyui.running,
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="a list of {topic, found, remedy, advice}, for programs")
    verb.add_argument("--start", action="store_true", help="also start JAX: it takes the chips for a moment")


def run(options: argparse.Namespace, machine: Machine | None = None) -> int:
    """Prints the report. Exit code 1 when something needs mending; advice does not."""
    findings = report(machine or Machine(), is_started=options.start)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.topic:<22} {finding.found}")
            if finding.remedy:
                print(f"{'':<22} {'if wanted:' if finding.advice else '->'} {finding.remedy}")
    return 1 if any(finding.is_fault for finding in findings) else 0


def report(machine: Machine, *, is_started: bool = False) -> list[Finding]:
    """Everything about this machine that matters to the pack. Starts no device unless asked to."""
    found = [Finding(topic="Python", found=f"{platform.python_version()} on {platform.system()}")]
    for check in CHECKS:
        found += check(machine)
    return [*found, *chips.start(machine)] if is_started else found
