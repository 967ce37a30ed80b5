"""From tokens to text, piece by piece: no half characters, and nothing of a stop string."""

from collections.abc import Callable, Sequence

_HALF = "\ufffd"  # what a decoder shows for bytes that are no whole character (yet)


class Detokenizer:
    """Turns one answer's tokens into text as they come.

    Args:
        decode: token ids → text, without special tokens. It is called on a short window of the latest tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The window is the tokens of the last piece that was given out and those that wait behind it. The former
        # stay because some tokenizers drop or add a space at the start of whatever they decode.
        self._window: list[int] = []
        self._given = 0
        self._before = ""

    def feed(self, token: int) -> str:
        """The text that `token` completes; "" while a character is only half there."""
        self._window.append(token)
        return self._take(final=False)

    def flush(self) -> str:
        """What still waits, at the end of the answer, with U+FFFD for a character that never became whole."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        text = self._decode(self._window)
        if len(text) <= len(self._before) or (text.endswith(_HALF) and not final):
            return ""
        piece = text[len(self._before) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._before = self._decode(self._window)
        return piece


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many last characters of `text` may be the start of one of `marks`."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class StopStrings:
    """Passes text on up to the first stop string, which may arrive in pieces and is not passed on.

    The first is the one that is complete first (of two that are complete at once, the longer), so that the
    answer does not depend on how the text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be shown now; nothing any more once `stopped`."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = len(text) - held_back(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, at the end of the answer: it was no stop string after all."""
        text, self._held = self._held, ""
        return text
