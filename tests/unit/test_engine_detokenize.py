"""Text as it streams: whole characters, and nothing of a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from app.engines.detokenize import Detokenizer, StopStrings, held_back

SPECIAL = 256


def decode(ids: list[int]) -> str:
    """A byte-level tokenizer's decoding, with one special token that is skipped."""
    return bytes(i for i in ids if i != SPECIAL).decode("utf-8", errors="replace")


def decode_words(ids: list[int]) -> str:
    """A sentencepiece-like decoding, which drops the space before the first word of whatever it decodes."""
    return "".join(f" w{i}" for i in ids).removeprefix(" ")


@given(st.text())
def test_pieces_are_whole_characters_and_lose_nothing(text: str) -> None:
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.feed(byte) for byte in text.encode()]
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes_decode_as_they_would_at_once(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    assert "".join([detokenizer.feed(i) for i in ids]) + detokenizer.flush() == decode(ids)


def test_a_character_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.feed(byte) for byte in "a水".encode()] == ["a", "", "", "水"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.feed(byte) for byte in "水".encode()[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_give_no_text() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.feed(i) for i in (97, SPECIAL, 98, SPECIAL)] == ["a", "", "b", ""]
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 9)))
def test_spaces_between_words_survive_a_decoder_that_strips_them(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode_words)
    assert "".join(detokenizer.feed(i) for i in ids) == decode_words(ids)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: grow it by one character until it ends with a stop string, the longest that does."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return end - max(map(len, ends))
    return None


LETTERS = st.text("abc", max_size=24)


@given(pieces=st.lists(st.text("abc", max_size=4)), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_text_is_cut_at_the_first_stop_string_however_it_arrives(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    filter_ = StopStrings(stops)
    shown = "".join([filter_.feed(piece) for piece in pieces]) + filter_.flush()
    cut = first_stop(text, stops)
    assert filter_.stopped == (cut is not None)
    assert shown == text[:cut]


@given(text=LETTERS, stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_only_what_may_be_a_stop_string_waits(text: str, stops: list[str]) -> None:
    """What waits is the beginning of a stop string; every character before it is already shown."""
    filter_ = StopStrings(stops)
    shown = filter_.feed(text)
    if not filter_.stopped:
        waiting = text[len(shown) :]
        assert not waiting or any(stop.startswith(waiting) for stop in stops)
        assert len(waiting) == held_back(text, stops)


def test_an_empty_stop_string_stops_nothing() -> None:
    assert StopStrings([""]).feed("text") == "text"
