"""A deterministic reward for a writing style, in [0, 1].

The score counts distinct markers of the style, subtracts markers of the other styles, and multiplies by a
sanity factor, so that shouting one marker, mixing styles or rambling on does not pay.
"""

import re

MARKERS: dict[str, tuple[str, ...]] = {
    "cute": (
        "nya", "uwu", "(^w^)", "teehee", "<3", "yay", "hehe", "waaah", "aww", "kyaa", "look, look", "fluffy",
        "teeny", "sparkly", "snuggly", "cuddly", "squishy", "doki doki", "hug", "cutie", "tiny", "itty bitty",
        "~",
    ),
    "chuunibyou": (
        "kukuku", "behold", "mortals", "mwahaha", "at last", "cursed", "crimson", "forbidden", "eternal",
        "abyssal", "infernal", "destiny", "pact", "darkness", "abyss", "sealed", "dark flame", "awakening",
        "relic", "summon", "chosen one", "my right arm", "power",
    ),
    "classical": (
        "hark", "lo,", "verily", "alas", "forsooth", "pray", "gentle", "noble", "humble", "weary", "yore",
        "o'er", "ere", "'neath", "whence", "cometh", "doth", "thou", "art", "thy", "methinks", "hath", "'tis",
        "o", "soul",
    ),
}  # fmt: skip

MARKERS_FOR_FULL_SCORE = 5
PENALTY_PER_FOREIGN_MARKER = 0.25
MIN_WORDS = 4
MAX_WORDS = 70
MIN_DISTINCT_WORD_SHARE = 0.5
REPETITIVE_FACTOR = 0.3
RAMBLING_FACTOR = 0.5
UNFINISHED_FACTOR = 0.3


def _whole_word(marker: str) -> re.Pattern[str]:
    """A pattern for the marker that does not match inside a longer word."""
    before = r"(?<!\w)" if marker[0].isalnum() else ""
    after = r"(?!\w)" if marker[-1].isalnum() else ""
    return re.compile(before + re.escape(marker) + after)


_PATTERNS = {style: tuple(_whole_word(marker) for marker in markers) for style, markers in MARKERS.items()}


def marker_count(text: str, style: str) -> int:
    """How many distinct markers of the style occur in the text, whatever their case."""
    lowered = text.lower()
    return sum(1 for pattern in _PATTERNS[style] if pattern.search(lowered))


def _sanity(text: str, finished: bool) -> float:
    """A factor in [0, 1]: lower for text that is too short, repetitive, too long or cut off."""
    words = re.findall(r"[\w']+", text.lower())
    if len(words) < MIN_WORDS:
        return 0.0
    factor = 1.0
    if len(set(words)) / len(words) < MIN_DISTINCT_WORD_SHARE:
        factor *= REPETITIVE_FACTOR
    if len(words) > MAX_WORDS:
        factor *= RAMBLING_FACTOR
    if not finished:
        factor *= UNFINISHED_FACTOR
    return factor


def style_score(text: str, style: str, finished: bool = True) -> float:
    """How well the text is written in the style, in [0, 1].

    `finished` says whether the model ended the text by itself. Raises ValueError for an unknown style.
    """
    if style not in MARKERS:
        raise ValueError(f"style = {style!r}: there is no such style. Choose one of {', '.join(MARKERS)}.")
    foreign = max(marker_count(text, other) for other in MARKERS if other != style)
    own_share = min(1.0, marker_count(text, style) / MARKERS_FOR_FULL_SCORE)
    return max(0.0, own_share - PENALTY_PER_FOREIGN_MARKER * foreign) * _sanity(text, finished)
