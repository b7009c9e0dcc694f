"""`raises_message` and `assert_message` fail on another key, parameter, type, and on an error without a key."""

import re

import pytest
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.messages import compose, compose_list, compose_term

RULE = compose("settings.multiple", multiple_of=16, rule="")
PROBLEM = compose("settings.breaks_rule", value=88, rule=RULE, nearest=compose_list(["80", "96"], "or"))
MESSAGE = compose("settings.input", title="Wan", name=compose_term("input", "height"), problem=PROBLEM)
GRID = Expected("settings.breaks_rule", value=88, rule=Expected("settings.multiple", multiple_of=16))


def check(error: Exception, expected_type: type[Exception], key: str, **parameters: object) -> None:
    with raises_message(expected_type, key, **parameters):
        raise error


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"title": "Wan"},
        {"title": re.compile("^W"), "name": "input.height"},
        {"problem": "settings.breaks_rule"},
        {"problem": GRID},
        {"problem": re.compile("88.*16")},
        {"problem": Expected("settings.breaks_rule", nearest=[80, re.compile("^9")])},
    ],
)
def test_raises_message_passes_on_same_key_and_parameters(parameters: dict[str, object]):
    check(ValueError(MESSAGE), ValueError, "settings.input", **parameters)
    check(CheckpointError(MESSAGE), ValueError, "settings.input", **parameters)
    assert_message(MESSAGE, Expected("settings.input", **parameters))


@pytest.mark.parametrize(
    ("key", "parameters", "said"),
    [
        ("settings.outside", {}, r"the message has the key 'settings.input', not 'settings.outside'"),
        ("settings.input", {"title": "Wa"}, "title of settings.input is 'Wan', not 'Wa'"),
        ("settings.input", {"value": 88}, "value of settings.input is not a parameter; there are title, name, problem"),
        ("settings.input", {"title": re.compile("x")}, "title of settings.input is 'Wan', without 'x'"),
        ("settings.input", {"title": "Wan", "name": "height"}, "has the key 'input.height', not 'height'"),
        ("settings.input", {"title": GRID}, "title of settings.input has no key, 'settings.breaks_rule' is expected"),
        ("settings.input", {"problem": "settings.outside"}, "has the key 'settings.breaks_rule', not 'settings.outs"),
        ("settings.input", {"problem": str(PROBLEM)[:]}, "problem of settings.input has the key"),
        (
            "settings.input",
            {"problem": Expected("settings.breaks_rule", value=89)},
            "value of settings.breaks_rule is '88', not '89'",
        ),
        (
            "settings.input",
            {"problem": Expected("settings.breaks_rule", nearest=[80])},
            "nearest of settings.breaks_rule has 2 items, not 1",
        ),
        (
            "settings.input",
            {"problem": Expected("settings.breaks_rule", nearest=[80, 97])},
            "nearest of settings.breaks_rule, item 1 is '96', not '97'",
        ),
        ("settings.input", {"title": ["Wan"]}, "title of settings.input is not a list of messages"),
    ],
)
def test_raises_message_fails_on_other_key_or_parameter(key: str, parameters: dict[str, object], said: str):
    with pytest.raises(pytest.fail.Exception, match=re.escape(said)):
        check(ValueError(MESSAGE), ValueError, key, **parameters)


def test_raises_message_fails_on_error_without_key():
    with pytest.raises(pytest.fail.Exception, match="the message has no key, 'settings.input' is expected: 'Wan"):
        check(ValueError(str(MESSAGE)[:]), ValueError, "settings.input")
    with pytest.raises(pytest.fail.Exception, match="the message has no key"):
        assert_message(None, "settings.input")


def test_raises_message_does_not_catch_another_type():
    with pytest.raises(ValueError, match="Wan"):
        check(ValueError(MESSAGE), CheckpointError, "settings.input")


def test_raises_message_fails_without_error():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), raises_message(ValueError, "settings.input"):
        pass
