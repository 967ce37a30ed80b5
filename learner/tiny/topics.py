"""What the tiny model writes about: nouns by category, each category with things its nouns can do."""

from random import Random
from typing import NamedTuple


class Topic(NamedTuple):
    """A noun and the category whose verb phrases fit it."""

    noun: str
    category: str


def words(text: str) -> tuple[str, ...]:
    """The words of a space-separated list: a lighter way to write down long word lists."""
    return tuple(text.split())


NOUNS: dict[str, tuple[str, ...]] = {
    "animal": words(
        "cat dog rabbit fox owl sparrow turtle hamster penguin panda squirrel hedgehog frog duck kitten puppy "
        "deer otter goldfish butterfly bee crow swan horse mouse wolf"
    ),
    "nature": words(
        "moon rain snow river mountain forest sea wind cloud sunrise sunset rainbow flower garden storm autumn "
        "spring winter summer night morning island meadow star thunder waterfall"
    ),
    "food": words(
        "tea coffee bread cake soup noodles rice apple strawberry pancake cookie pumpkin lemon cheese honey "
        "chocolate peach dumpling pie milk candy melon salad pudding curry"
    ),
    "object": words(
        "umbrella bicycle lamp book letter clock train boat violin piano mirror candle key lantern kite sword "
        "pencil map robot computer camera teapot blanket door bell window"
    ),
    "place": words(
        "library school market harbor bridge castle village station kitchen bakery museum temple lighthouse "
        "park street rooftop cafe bookshop desert beach"
    ),
    "person": words(
        "friend teacher baker sailor painter farmer student traveler grandmother doctor gardener musician "
        "knight fisherman singer neighbor poet child"
    ),
}

VERB_PHRASES: dict[str, tuple[str, ...]] = {
    "animal": (
        "naps in the sun", "chases a falling leaf", "hides under the table", "waits by the door",
        "runs across the garden", "drinks from a small bowl", "watches the window", "sleeps on a soft pillow",
        "follows me home", "looks at the stars",
    ),
    "nature": (
        "fills the quiet valley", "changes every hour", "covers the old roofs", "shines over the hills",
        "calls the birds home", "touches the window", "brings a cool breeze", "paints the sky",
        "wakes the little town", "waits behind the trees",
    ),
    "food": (
        "warms my hands", "smells like home", "melts on the tongue", "waits on the table",
        "fills the kitchen with steam", "tastes like summer", "makes the morning better",
        "goes well with friends", "sits in a blue bowl", "disappears too soon",
    ),
    "object": (
        "stands in the corner", "keeps an old secret", "waits for its owner", "shines in the dark",
        "sings in the evening", "travels with me", "remembers my childhood", "works every day",
        "rests on the shelf", "opens a new world",
    ),
    "place": (
        "wakes up early", "is full of voices", "stands near the river", "glows after dark",
        "hides many stories", "smells of old paper", "welcomes every guest", "sleeps under the snow",
        "looks over the sea", "waits for spring",
    ),
    "person": (
        "smiles at everyone", "walks in the rain", "tells a long story", "works until midnight",
        "dreams of the sea", "writes a short letter", "sings by the fire", "carries a heavy bag",
        "laughs at the moon", "bakes a small cake",
    ),
}  # fmt: skip

TOPICS: tuple[Topic, ...] = tuple(Topic(noun, category) for category, nouns in NOUNS.items() for noun in nouns)


def verb_phrase(rng: Random, topic: Topic) -> str:
    """Something the topic's noun can do, such as `naps in the sun`."""
    return rng.choice(VERB_PHRASES[topic.category])
