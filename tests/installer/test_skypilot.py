"""The task files for SkyPilot fit its own schemas.

`skypilot_schema.json` is what `sky.utils.schemas` of the release 0.14.1 gives (Apache-2.0); the package itself would
bring a hundred others. With it installed, `sky.Task.from_yaml("docs/skypilot.yaml")` says the same.
"""

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from comfyui_tpu.tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCHEMAS = json.loads((Path(__file__).parent / "skypilot_schema.json").read_text())
TASK = yaml.safe_load((ROOT / "docs" / "skypilot.yaml").read_text())
SHOWN = [
    yaml.safe_load(block)
    for block in re.findall(
        r"```yaml\n(# \w+\.yaml: sky .*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL
    )
]


def check(task: Any) -> None:
    jsonschema.validate(task, SCHEMAS["task"])
    jsonschema.validate(task["resources"], SCHEMAS["resources"])


@pytest.mark.parametrize("task", [TASK, *SHOWN], ids=lambda task: task.get("name") or next(iter(task)))
def test_skypilot_schema_accepts_task_and_rejects_unknown_keys(task: dict[str, Any]):
    check(task)
    for place in (("set_up",), ("resources", "accelerator")):
        wrong = copy.deepcopy(task)
        (wrong if len(place) == 1 else wrong[place[0]])[place[-1]] = "x"
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_skypilot_task_uses_readme_install_commands():
    readme = (ROOT / "README.md").read_text("utf-8")
    script = TASK["setup"] + TASK["run"]
    for command in ("git clone https://github.com/comfyui-tpu/ComfyUI-TPU", "python3 setup.py install"):
        assert command in script and command in readme
    version = re.search(r"--version=(\S+)", readme)
    assert version is not None and TASK["resources"]["accelerator_args"]["runtime_version"] == version[1]
    assert len(SHOWN) == 2


# In the place of the server and of a minute; what the server says of its queue and the last prompt, minute by minute.
STANDS_FOR = """
    cd() { :; }
    python3() { command sleep 600; }
    sleep() { echo minute >> minutes; }
    curl() { sed -n "$(wc -l < minutes)p" answers; }
"""


@pytest.mark.parametrize(
    ("said", "minutes"),
    [
        ([], 4),  # it never answers: the first minute is already as it was before
        (["none"] * 9, 5),
        (["", "", *["0 of a"] * 9], 7),  # it starts
        (["0 of a", "1 of a", "1 of a", "1 of a", "1 of a", "1 of a", *["0 of b"] * 9], 11),
        (["0 of a", "0 of b", "0 of c", *["0 of d"] * 9], 8),  # prompts that take less than a minute
    ],
)
def test_skypilot_job_ends_after_idle_minutes(tmp_path: Path, said: list[str], minutes: int):
    """SkyPilot deletes no VM on which a job runs, and a server alone never ends."""
    autostop = TASK["resources"]["autostop"]
    assert autostop == {"idle_minutes": autostop["idle_minutes"], "wait_for": "jobs", "down": True}
    answers = [re.sub(r"(\d) of (.*)", r'{"exec_info": {"queue_remaining": \1}}{"\2": {}}', one) for one in said]
    (tmp_path / "answers").write_text("\n".join(answers) + "\n")
    (tmp_path / "minutes").touch()
    environment = {**os.environ, **TASK["envs"], "IDLE_MINUTES": "4"}
    assert int(TASK["envs"]["IDLE_MINUTES"]) >= 30
    script = STANDS_FOR + TASK["run"]
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=PATIENCE_S)
    assert len((tmp_path / "minutes").read_text().splitlines()) == minutes
