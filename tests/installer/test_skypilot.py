"""The task files for SkyPilot fit its own schemas.

`skypilot_schema.json` is what `sky.utils.schemas` of the release 0.14.1 gives (Apache-2.0); the package itself would
bring a hundred others. With it installed, `sky.Task.from_yaml("docs/skypilot.yaml")` says the same.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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
def test_a_task_fits_skypilots_schema_and_one_with_a_wrong_word_does_not(task: dict[str, Any]):
    check(task)
    for place in (("set_up",), ("resources", "accelerator")):
        wrong = copy.deepcopy(task)
        (wrong if len(place) == 1 else wrong[place[0]])[place[-1]] = "x"
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_the_task_installs_with_the_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    script = TASK["setup"] + TASK["run"]
    for command in ("git clone https://github.com/comfyui-tpu/ComfyUI-TPU", "python3 setup.py install"):
        assert command in script and command in readme
    version = re.search(r"--version=(\S+)", readme)
    assert version is not None and TASK["resources"]["accelerator_args"]["runtime_version"] == version[1]
    assert len(SHOWN) == 2
