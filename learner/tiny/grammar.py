"""A check that a text is language of the corpus: every sentence an instance of a style's template.

The scorer alone would reward a heap of markers; this tells such a heap from sentences.
"""

import re
from collections.abc import Iterable

from learner.tiny.styles import STYLES, Style
from learner.tiny.topics import TOPICS, VERB_PHRASES


def _one_of(alternatives: Iterable[str]) -> str:
    """A pattern for any of the literals; the longest first, so that no prefix shadows a longer one."""
    ordered = sorted(set(alternatives), key=lambda text: (-len(text), text))
    return f"(?:{'|'.join(re.escape(text) for text in ordered)})"


def _sentence_pattern(style: Style) -> str:
    """A pattern for one sentence in the style."""
    slots = {
        "opener": _one_of(style.openers),
        "adj": _one_of(style.adjectives),
        "adj2": _one_of(style.adjectives),
        "noun": _one_of(topic.noun for topic in TOPICS),
        "does": _one_of(phrase for phrases in VERB_PHRASES.values() for phrase in phrases),
        "ending": _one_of(style.endings),
    }
    templates = []
    for template in style.templates:
        pattern = re.escape(template)
        for slot, alternatives in slots.items():
            pattern = pattern.replace(re.escape(f"{{{slot}}}"), alternatives)
        templates.append(pattern)
    return f"(?:{'|'.join(templates)})"


def _text_pattern(sentence: str) -> re.Pattern[str]:
    """A pattern for one or more sentences separated by single spaces."""
    return re.compile(f"{sentence}(?: {sentence})*")


_SENTENCES = {name: _sentence_pattern(style) for name, style in STYLES.items()}
_TEXT_IN_STYLE = {name: _text_pattern(sentence) for name, sentence in _SENTENCES.items()}
_TEXT_IN_ANY_STYLE = _text_pattern(f"(?:{'|'.join(_SENTENCES.values())})")


def parses(text: str, style: str | None = None) -> bool:
    """Whether every sentence is an instance of a template of the style, or of any style when it is None.

    Raises KeyError for an unknown style.
    """
    pattern = _TEXT_IN_ANY_STYLE if style is None else _TEXT_IN_STYLE[style]
    return pattern.fullmatch(text.strip()) is not None
