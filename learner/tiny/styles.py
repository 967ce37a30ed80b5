"""The three writing styles: their templates, their vocabulary, and a generator of text in a style.

A template has the slots `{opener}`, `{adj}`, `{adj2}`, `{noun}`, `{does}` and `{ending}`.
"""

from dataclasses import dataclass
from random import Random

from learner.tiny.topics import Topic, verb_phrase


@dataclass(frozen=True)
class Style:
    """One writing style; `asked_as` lists the words by which a request may name it."""

    asked_as: tuple[str, ...]
    adjectives: tuple[str, ...]
    openers: tuple[str, ...]
    endings: tuple[str, ...]
    templates: tuple[str, ...]


STYLES: dict[str, Style] = {
    "cute": Style(
        asked_as=("cute", "sweet and cute"),
        adjectives=("fluffy", "teeny", "sparkly", "snuggly", "cuddly", "squishy"),
        openers=("Hehe~", "Waaah~", "Yay~", "Nya~", "Look, look~", "Aww~", "Kyaa~"),
        endings=("nya~", "uwu", "(^w^)", "teehee~", "<3", "yay~", "hehe~"),
        templates=(
            "{opener} the {adj} {noun} {does}, {ending}!",
            "{opener} what a {adj} little {noun}, so {adj2}! {ending}",
            "My heart goes doki doki when the {noun} {does}~ {ending}",
            "I want to hug the {adj} {noun} all day, {ending}!",
            "{opener} the {noun} is a {adj} cutie pie {ending}",
            "Every {adj} {noun} needs a tiny nap and a cookie, {ending}",
            "The {noun} {does} with itty bitty steps, so {adj}, {ending}!",
        ),
    ),
    "chuunibyou": Style(
        asked_as=("chuunibyou", "dark fantasy"),
        adjectives=("cursed", "crimson", "forbidden", "eternal", "abyssal", "infernal"),
        openers=("Kukuku...", "Behold!", "Tremble, mortals!", "Mwahaha!", "Foolish mortals!", "At last!"),
        endings=(
            "as destiny decreed", "by the pact of darkness", "in the name of the abyss", "under my sealed eye",
            "within the dark flame", "before the final awakening",
        ),
        templates=(
            "{opener} The {adj} {noun} {does}, {ending}!",
            "{opener} This is no mere {noun}, but the {adj} relic of the abyss!",
            "My sealed right arm aches when the {noun} {does}...",
            "The {noun} and I share a {adj} pact, {ending}!",
            "{opener} I summon the {adj} {noun} with my dark flame!",
            "None but the chosen one may face the {adj} {noun}, {ending}!",
            "Even the {noun} cannot escape my {adj} power, {ending}!",
        ),
    ),
    "classical": Style(
        asked_as=("classical", "old poetic"),
        adjectives=("gentle", "noble", "fair", "humble", "golden", "weary"),
        openers=("Hark,", "Lo,", "Verily,", "Alas,", "Forsooth,", "Pray,"),
        endings=(
            "as in days of yore", "o'er hill and dale", "ere the day is done", "'neath the silent heavens",
            "whence my sorrow cometh", "till the cock doth crow",
        ),
        templates=(
            "{opener} the {adj} {noun} {does}, {ending}.",
            "O {adj} {noun}, thou art the joy of my heart!",
            "{opener} how the {noun} doth gladden my soul, {ending}.",
            "Methinks the {adj} {noun} hath a secret, {ending}.",
            "'Tis the {adj} {noun} that {does}, {ending}.",
            "Thy beauty, O {noun}, doth shame the rose, {ending}.",
            "{opener} no {noun} hath ever been so {adj}, {ending}.",
        ),
    ),
}  # fmt: skip

STYLE_NAMES: tuple[str, ...] = tuple(STYLES)

SENTENCE_COUNTS = (1, 2, 3)
SENTENCE_COUNT_SHARES = (0.25, 0.55, 0.20)


def sentence(rng: Random, template: str, topic: Topic, style: Style) -> str:
    """One template of the style, its slots filled at random for the topic."""
    adjective, other_adjective = rng.sample(style.adjectives, 2)
    return template.format(
        opener=rng.choice(style.openers),
        adj=adjective,
        adj2=other_adjective,
        noun=topic.noun,
        does=verb_phrase(rng, topic),
        ending=rng.choice(style.endings),
    )


def styled_text(rng: Random, topic: Topic, style_name: str) -> str:
    """One to three sentences about the topic in one style, no template twice.

    Raises KeyError for a name that is not in `STYLE_NAMES`.
    """
    style = STYLES[style_name]
    count = rng.choices(SENTENCE_COUNTS, SENTENCE_COUNT_SHARES)[0]
    return " ".join(sentence(rng, template, topic, style) for template in rng.sample(style.templates, count))
