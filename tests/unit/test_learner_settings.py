"""The learner's settings: the paper's offsets cannot be mistaken for bounds, and every error teaches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.config import Resolved, load
from app.errors import SetupError
from learner.settings import LearnerSettings, LearnerTable, TrainingSettings


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No riacho.toml but the one that a test writes."""
    monkeypatch.chdir(tmp_path)


def _load(
    env: Mapping[str, str] | None = None, toml: str | None = None, **options: Any
) -> tuple[LearnerTable, Resolved]:
    if toml is not None:
        Path("riacho.toml").write_text(toml, encoding="utf-8")
    settings, resolved = load(LearnerSettings, options, env or {})
    return settings.learner, resolved


def _refused(**sources: Any) -> str:
    with pytest.raises(SetupError) as caught:
        _load(**sources)
    return str(caught.value)


def test_default_band_is_the_papers() -> None:
    """0.3/5.0 as offsets: ratios in (0.7, 6.0)."""
    band = TrainingSettings().band
    assert (band.lower, band.upper) == pytest.approx((0.7, 6.0))


def test_coding_band_is_the_papers() -> None:
    """0.8/3.0 as offsets: ratios in (0.2, 4.0)."""
    band = TrainingSettings(eps_low=0.8, eps_high=3.0).band
    assert (band.lower, band.upper) == pytest.approx((0.2, 4.0))


def test_small_eps_high_is_refused_with_the_band_and_the_papers_values() -> None:
    """The message names the setting, the value, the bound it makes and what the paper uses."""
    message = _refused(env={"RIACHO_LEARNER_EPS_HIGH": "0.2"})
    assert "learner.eps_high = '0.2'" in message
    for part in ("offset", "only up to 1.2 ", "masks bf16 noise", "5.0 (accept up to 6.0)", "3.0 for coding agents"):
        assert part in message


@pytest.mark.parametrize("value", ["0", "-0.3", "1", "1.3", "nan"])
def test_eps_low_outside_zero_to_one_is_refused(value: str) -> None:
    """1 - eps_low has to lie in (0, 1); the message says so with the paper's values."""
    message = _refused(env={"RIACHO_LEARNER_EPS_LOW": value})
    assert f"learner.eps_low = {value!r}" in message
    assert "0.3 (accept above 0.7)" in message


def test_eps_high_that_is_no_number_is_refused() -> None:
    """A band up to NaN would mask every token and learn nothing, without a word."""
    assert "learner.eps_high = 'nan'" in _refused(env={"RIACHO_LEARNER_EPS_HIGH": "nan"})


@pytest.mark.parametrize(
    ("low", "high", "right"), [(0.7, 6.0, ("0.3", "5")), (0.2, 4.0, ("0.8", "3"))], ids=["reasoning", "coding"]
)
def test_bounds_given_as_offsets_are_refused(low: float, high: float, right: tuple[str, str]) -> None:
    """The paper's bounds in the place of its offsets: the message gives the offsets."""
    message = _refused(toml=f"[learner]\neps_low = {low}\neps_high = {high}\n")
    assert f"eps_low = {right[0]}, eps_high = {right[1]}" in message
    assert "bounds" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", "0"),
        ("gamma", "1.1"),
        ("gamma", "nan"),
        ("lambda_alpha", "0"),
        ("critic_steps", "0"),
        ("critic_warmup", "-1"),
        ("rollouts_per_update", "0"),
        ("policy_lr", "0"),
        ("policy_lr", "nan"),
        ("critic_lr", "-1"),
        ("beta2", "1"),
        ("policy_clip", "0"),
        ("rank", "0"),
        ("critic", "half"),
        ("kl_coef", "-0.1"),
        ("kl_estimator", "k1"),
        ("negative_scale", "1.5"),
        ("advantage_scale", "centre"),
        ("shift_pull", "1"),
        ("threads", "0"),
    ],
)
def test_wrong_value_is_named_with_its_key(key: str, value: str) -> None:
    """`learner.key = value: reason`."""
    assert f"learner.{key} = {value!r}: " in _refused(env={f"RIACHO_LEARNER_{key.upper()}": value})


@pytest.mark.parametrize(
    "source", [{"toml": "[learner]\nepsilon = 1"}, {"env": {"RIACHO_LEARNER_EPSILON": "1"}}], ids=["file", "variable"]
)
def test_unknown_learner_key_is_an_error(source: dict[str, Any]) -> None:
    """A key that the learner does not know is named."""
    assert "learner.epsilon" in _refused(**source)


def test_unknown_top_key_is_an_error() -> None:
    """A learner's key outside its table is a mistake, not a silent default."""
    assert "'eps_low'" in _refused(toml="eps_low = 0.5")


def test_the_apps_keys_are_left_to_the_app() -> None:
    """One file serves both processes."""
    table, _ = _load(toml="port = 5\nslots = 4\n[learner]\nseed = 7\n")
    assert table.seed == 7


def test_later_sources_win_within_the_table() -> None:
    """A variable replaces one key of the file's table and leaves the others."""
    table, resolved = _load({"RIACHO_LEARNER_SEED": "2"}, "[learner]\nseed = 1\nrank = 16\n")
    assert (table.seed, table.rank) == (2, 16)
    wanted = {"learner.seed": "environment", "learner.rank": "file", "learner.gamma": "default"}
    assert {key: resolved.sources[key] for key in wanted} == wanted
    assert resolved.values["learner.rank"] == 16


def test_option_with_a_dot_reaches_the_table() -> None:
    """`learner.seed` as an option wins over the file."""
    Path("riacho.toml").write_text("[learner]\nseed = 1\nrank = 16\n", encoding="utf-8")
    settings, resolved = load(LearnerSettings, {"learner.seed": 9}, {})
    assert (settings.learner.seed, settings.learner.rank) == (9, 16)
    assert resolved.sources["learner.seed"] == "option"


def test_every_setting_can_be_a_variable() -> None:
    """A list is comma-separated in a variable, as for the addresses of the engines."""
    table, _ = _load({"RIACHO_LEARNER_CRITIC_MODULES": "mlp,experts"})
    assert table.critic_modules == ("mlp", "experts")


def test_rates_scale_with_the_width_of_the_base() -> None:
    """3e-3 and 2e-3 at a hidden size of 128, an eighth of it at 1024; a given rate is used as it is."""
    absent = TrainingSettings()
    assert (absent.resolved_policy_lr(128), absent.resolved_critic_lr(128)) == (3e-3, 2e-3)
    assert (absent.resolved_policy_lr(1024), absent.resolved_critic_lr(1024)) == pytest.approx((3.75e-4, 2.5e-4))
    given = TrainingSettings(policy_lr=1e-6, critic_lr=5e-6)
    assert (given.resolved_policy_lr(1024), given.resolved_critic_lr(1024)) == (1e-6, 5e-6)


def test_policy_epsilon_follows_the_number_of_trained_weights() -> None:
    """A gradient of norm 0.1 over n weights has a root mean square of 0.1 / sqrt(n), and epsilon is 0.3 of it."""
    assert TrainingSettings().resolved_policy_eps(90_000) == pytest.approx(1e-4)
    assert TrainingSettings(policy_eps=1e-8).resolved_policy_eps(90_000) == 1e-8


def test_training_settings_leave_out_how_the_process_runs() -> None:
    """What is stored with a version is what made it: not threads, device or leases."""
    training = LearnerTable(seed=3, threads=8, lease_s=99).training
    assert training == TrainingSettings(seed=3)
    assert type(training) is TrainingSettings


def test_papers_loss_can_be_had() -> None:
    """Each restraint beyond the paper can be switched off."""
    paper = TrainingSettings(kl_coef=0, negative_scale=1, on_shift="none", advantage_scale="none", critic_warmup=10)
    assert (paper.kl_coef, paper.negative_scale, paper.gamma, paper.lambda_alpha, paper.critic_steps) == (
        0,
        1,
        1.0,
        1.5,
        2,
    )
