"""`raises_message` and `assert_message` fail on another key, parameter, type, and on an error without a key."""

import re

import pytest
from comfyui_tpu.tests.support.messages import Expected, assert_message, describe_error, raises_message
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.messages import compose, compose_list, compose_term, read_message

RULE = compose("settings.multiple", multiple_of=16, rule="")
PROBLEM = compose("settings.breaks_rule", value=88, rule=RULE, nearest=compose_list(["80", "96"], "or"))
MESSAGE = compose("settings.input", title="Wan", name=compose_term("input", "height"), problem=PROBLEM)
OTHER = compose("settings.breaks_rule", value=89, rule=RULE, nearest="80")
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
        {"problem": PROBLEM},
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
        ("settings.input", {"problem": OTHER}, "value of settings.breaks_rule is '88', not '89'"),
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


def test_raises_message_compares_items_of_list():
    lines = ValueError(compose_list([MESSAGE, RULE], "line"))
    with raises_message(ValueError, [Expected("settings.input", title="Wan"), "settings.multiple"]):
        raise lines
    with pytest.raises(pytest.fail.Exception, match="the message has 2 items, not 1"):
        assert_message(lines, ["settings.input"])
    with pytest.raises(pytest.fail.Exception, match="item 1 has the key 'settings.multiple', not 'settings.grid'"):
        assert_message(lines, ["settings.input", "settings.grid"])


def test_described_error_is_read_with_same_message():
    assert_message(read_message(describe_error(ValueError(MESSAGE))), "settings.input", problem=PROBLEM)
    with pytest.raises(pytest.fail.Exception, match="the message has no key"):
        assert_message(read_message(describe_error(ValueError("plain"))), "settings.input")


def test_raises_message_does_not_catch_another_type():
    with pytest.raises(ValueError, match="Wan"):
        check(ValueError(MESSAGE), CheckpointError, "settings.input")


def test_raises_message_fails_without_error():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), raises_message(ValueError, "settings.input"):
        pass
