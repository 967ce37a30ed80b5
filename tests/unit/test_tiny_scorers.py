"""The style scorer: what it rewards, and what it refuses to reward."""

from random import Random

import pytest

from learner.tiny.scorers import marker_count, style_score
from learner.tiny.styles import STYLE_NAMES, STYLES, sentence
from learner.tiny.topics import TOPICS

FIVE_CUTE = "Hehe~ the fluffy cat naps in the sun, uwu! I want to hug it."
EVERY_TEMPLATE = [(name, template) for name, style in STYLES.items() for template in style.templates]


def test_five_distinct_markers_give_the_full_score() -> None:
    """hehe, ~, fluffy, uwu and hug are five markers, and no other style has any."""
    assert style_score(FIVE_CUTE, "cute") == 1.0


def test_the_score_grows_by_a_fifth_with_each_marker() -> None:
    """`behold` and `crimson` are two of the five markers that the full score needs."""
    assert style_score("Behold! The crimson moon is here.", "chuunibyou") == pytest.approx(2 / 5)


def test_a_repeated_marker_counts_once() -> None:
    """Saying `uwu` three times is one marker."""
    assert style_score("uwu the cat uwu the dog uwu", "cute") == pytest.approx(1 / 5)


def test_a_marker_inside_a_longer_word_does_not_count() -> None:
    """`there` holds `ere`, `farther` holds `art`, and `powerful` holds `power`."""
    text = "The powerful farther one was there today."
    assert [marker_count(text, style) for style in STYLE_NAMES] == [0, 0, 0]


def test_markers_are_found_in_any_case() -> None:
    """Capital letters change nothing."""
    assert style_score(FIVE_CUTE.upper(), "cute") == style_score(FIVE_CUTE, "cute")


def test_each_marker_of_another_style_costs_a_quarter() -> None:
    """`hath` belongs to the classical style: 1 - 0.25."""
    assert style_score(FIVE_CUTE + " It hath a bed.", "cute") == pytest.approx(0.75)


def test_only_the_most_present_other_style_is_subtracted() -> None:
    """One classical and one chuunibyou marker cost one quarter, not two."""
    assert style_score(FIVE_CUTE + " It hath a cursed bed.", "cute") == pytest.approx(0.75)


def test_foreign_markers_never_push_the_score_below_zero() -> None:
    """One cute marker against five classical ones is 0."""
    assert style_score("Hark, thou hath a noble and humble hug.", "cute") == 0.0


def test_fewer_than_four_words_score_nothing() -> None:
    """Three markers without a sentence around them are no text."""
    assert style_score("Hehe~ fluffy uwu!", "cute") == 0.0


def test_repetitive_text_keeps_three_tenths() -> None:
    """Three distinct words of eight, one marker: 0.2 * 0.3."""
    assert style_score("the fluffy cat the fluffy cat the cat", "cute") == pytest.approx(0.2 * 0.3)


def test_rambling_text_keeps_a_half() -> None:
    """Seventy-one distinct words, one marker: 0.2 * 0.5."""
    words = " ".join(f"word{index}" for index in range(70))
    assert style_score(f"fluffy {words}", "cute") == pytest.approx(0.2 * 0.5)


def test_seventy_words_are_not_rambling() -> None:
    """The limit itself is still allowed."""
    words = " ".join(f"word{index}" for index in range(69))
    assert style_score(f"fluffy {words}", "cute") == pytest.approx(0.2)


def test_a_cut_off_text_keeps_three_tenths() -> None:
    """A model that does not end its answer earns less for it."""
    assert style_score(FIVE_CUTE, "cute", finished=False) == pytest.approx(0.3)


def test_an_unknown_style_is_refused_with_the_choices() -> None:
    """The error names the styles that exist."""
    with pytest.raises(ValueError, match="cute, chuunibyou, classical"):
        style_score(FIVE_CUTE, "baroque")


@pytest.mark.parametrize(("name", "template"), EVERY_TEMPLATE)
def test_a_template_scores_highest_for_its_own_style(name: str, template: str) -> None:
    """Averaged over its fillings, no template pays more in another style than in its own."""
    rng = Random(0)
    texts = [sentence(rng, template, rng.choice(TOPICS), STYLES[name]) for _ in range(200)]
    means = {style: sum(style_score(text, style) for text in texts) / len(texts) for style in STYLE_NAMES}
    assert max(means, key=means.__getitem__) == name
    assert means[name] > 0
