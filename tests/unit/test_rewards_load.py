"""Finding reward functions by name, and what is said about wrong settings."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.errors import SetupError
from learner.rewards.load import load
from learner.rewards.view import RewardFunction, Scores
from tests.plugins import built_ins, install
from tests.sessions import session, turn

ROOT = Path(__file__).parents[2]
GOOD: dict[str, dict[str, Any]] = {
    "contains": {"literals": ["yes"]},
    "json_schema": {"schema": {"type": "object"}},
    "judge": {"base_url": "http://judge/v1", "model": "m", "rubric": "r"},
    "length": {"max_tokens": 100},
    "tool_calls": {},
}


@pytest.fixture
def riacho(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This project as its metadata installs it, whatever is installed already."""
    install(monkeypatch, tmp_path / "riacho", "riacho", built_ins())


def refusal(name: str, options: Mapping[str, Any]) -> SetupError:
    with pytest.raises(SetupError) as caught:
        load(name, options)
    return caught.value


def a_factory(options: Mapping[str, Any]) -> RewardFunction:
    """A plug-in that tells its options back."""
    return lambda _: Scores(session=options["value"])


def test_the_built_in_reward_functions() -> None:
    """The metadata lists exactly the modules that have a factory."""
    modules = {
        path.stem
        for path in (ROOT / "learner" / "rewards").glob("*.py")
        if re.search(r"^def factory\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert built_ins() == {name: f"learner.rewards.{name}:factory" for name in modules}


@pytest.mark.usefixtures("riacho")
@pytest.mark.parametrize("name", sorted(built_ins()))
def test_each_built_in_loads_by_name(name: str) -> None:
    """With the least options that it needs."""
    assert callable(load(name, GOOD[name]))


@pytest.mark.usefixtures("riacho")
@pytest.mark.parametrize("name", sorted(built_ins()))
def test_an_unknown_option_is_refused(name: str) -> None:
    """A typing mistake is no silent default."""
    error = refusal(name, {**GOOD[name], "waight": 2})
    assert error.param == "options.waight"
    assert "waight = 2" in error.message


@pytest.mark.usefixtures("riacho")
@pytest.mark.parametrize(
    ("name", "options", "param", "words"),
    [
        ("contains", {"literals": []}, "options", "literals and patterns are empty"),
        ("contains", {"patterns": ["("]}, "options.patterns", "is no regular expression"),
        ("contains", {"need": "some"}, "options.need", "'all' or 'any'"),
        ("json_schema", {}, "options.schema", "Field required"),
        ("json_schema", {"schema": {"type": "objct"}}, "options.schema", '"objct" is not valid'),
        ("json_schema", {"schema": "{"}, "options.schema", "Expecting property name"),
        ("json_schema", {"schema": {"$ref": "http://127.0.0.1:1/x"}}, "options.schema", "is no JSON schema"),
        ("judge", {"scale": [5, 1]}, "options.scale", "goes from 5 to 1"),
        ("judge", {"timeout_s": 0}, "options.timeout_s", "timeout_s = 0: Input should be greater than 0"),
        ("judge", {"base_url": "judge:8000"}, "options.base_url", "URL scheme should be 'http' or 'https'"),
        ("judge", {"base_url": "http://me:sk-secret@judge/v1"}, "options.base_url", "api_key_env"),
        ("judge", {"api_key_env": "sk-secret"}, "options.api_key_env", "String should match pattern"),
        ("judge", {"api_key_env": "SK_SECRET"}, "options.api_key_env", "no environment variable of that name"),
        ("judge", {"request": {"model": "other"}}, "options.request", "sets model"),
        ("length", {"min_tokens": 101}, "options", "min_tokens = 101 is above max_tokens = 100"),
        ("tool_calls", {"none": float("nan")}, "options.none", "none = nan"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], param: str, words: str) -> None:
    """With what would be right, and without text that may be a key in the wrong place."""
    good = {} if name in ("contains", "json_schema") else GOOD[name]
    error = refusal(name, {**good, **options})
    assert error.param == param
    assert words in error.message
    assert "secret" not in error.message.lower()


@pytest.mark.usefixtures("riacho")
def test_an_unknown_name_lists_the_known_ones() -> None:
    """All that are installed, in order."""
    assert "known: contains, json_schema, judge, length, tool_calls" in refusal("jugde", {}).message


def test_a_plug_in_of_another_package_gets_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The factory is called with what the settings say."""
    install(monkeypatch, tmp_path, "other", {"telling": f"{__name__}:a_factory"})
    assert load("telling", {"value": 0.25})(session()) == Scores(session=0.25)


def test_two_packages_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which one is meant is not guessed."""
    install(monkeypatch, tmp_path / "1", "other", {"telling": f"{__name__}:a_factory"})
    install(monkeypatch, tmp_path / "2", "another", {"telling": "elsewhere:factory"})
    message = refusal("telling", {}).message
    assert f"elsewhere:factory, {__name__}:a_factory" in message


@pytest.mark.parametrize("value", ["no_such_module_here:factory", "learner.rewards.view:no_such_factory"])
def test_a_plug_in_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    """With the reason, at the start and not at the first session."""
    install(monkeypatch, tmp_path, "other", {"broken": value})
    message = refusal("broken", {}).message
    assert value in message
    assert "no_such" in message


def readme_blocks() -> list[str]:
    """The indented blocks of the README's section on reward functions."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("### Reward functions\n")[1].split("\n### ")[0].split("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip() + "\n" for block in blocks]


def test_the_readme_example_works_as_an_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package as it is written there, found by name, scoring a session."""
    [_, code, metadata, _] = readme_blocks()
    points = tomllib.loads(metadata)["project"]["entry-points"]["riacho.rewards"]
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    install(monkeypatch, tmp_path, "my-rewards", points)
    score = load("brief", {"words": 3})
    assert score(session(turn(output="one two three"))) == Scores(session=1.0)
    assert score(session(turn(output="one two three four"))) == Scores(session=0.0)
    assert refusal("brief", {"words": 0}).param == "options.words"


@pytest.mark.usefixtures("riacho")
def test_the_readme_settings_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scorer in the example of riacho.toml takes its options."""
    monkeypatch.setenv("JUDGE_KEY", "k")
    tables = tomllib.loads(readme_blocks()[0])["rewards"]
    for table in tables.values():
        if "scorer" in table:
            assert callable(load(table["scorer"], table["options"]))
    assert {table.get("scorer") for table in tables.values()} >= {"judge", "tool_calls"}
