"""Completion ids as receipts: what was signed is read back, and nothing else is."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.schemas import FeedbackRequest
from app.errors import NotFound
from app.security.receipts import WHOLE, Receipt, Receipts
from tests.builders import completion, feedback

SECRET = b"s" * 32
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
RECEIPTS = st.builds(
    Receipt,
    uid=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    policy=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,31}", fullmatch=True),
    key_id=st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    session=st.none() | NAMES.map(lambda name: f"0a1b2c3d:{name}"),
    choice=st.integers(WHOLE, 15),
)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_.=~ \u2603\n"


def receipts() -> Receipts:
    return Receipts(SECRET)


@given(receipt=RECEIPTS)
def test_what_was_signed_is_read_back(receipt: Receipt) -> None:
    """An id is the receipt, for every key, session and choice; it needs no quoting in a URL path."""
    id = receipts().sign(receipt)
    assert receipts().read(id) == receipt
    assert id.startswith("chatcmpl-")
    assert set(id) <= set(ALPHABET) - set("+/=~ \u2603\n")


def test_longest_id_fits_into_an_event_and_a_request() -> None:
    """Every id that can be given out can be recorded and judged."""
    longest = receipts().sign(Receipt("0" * 32, "p" * 32, "0" * 8, f"{'0' * 8}:{'s' * 64}", 15))
    completion(completion_id=longest, event_id=longest)
    feedback(completion_id=longest)
    FeedbackRequest(completion_id=longest, reward=1)


def spellings(id: str) -> Iterator[str]:
    """Every id that differs from this one in one character."""
    for at in range(len(id) + 1):
        yield id[:at] + id[at + 1 :]
        for new in ALPHABET:
            yield id[:at] + new + id[at + 1 :]
            yield id[:at] + new + id[at:]


@pytest.mark.parametrize("policy", ["riacho", "riacho2", "riacho33"])
def test_an_id_has_one_spelling(policy: str) -> None:
    """With one character replaced, added or dropped anywhere it is unknown, whatever the length modulo 3."""
    id = receipts().sign(Receipt("0123456789abcdef" * 2, policy, "0a1b2c3d", "0a1b2c3d:s?>", 0))
    accepted = []
    for forged in set(spellings(id)) - {id}:
        with suppress(NotFound):
            accepted.append((forged, receipts().read(forged)))
    assert accepted == []


@given(text=st.text() | st.text().map("chatcmpl-{}".format))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever a client sends, the only error is NotFound."""
    with pytest.raises(NotFound):
        receipts().read(text)


def test_another_secret_reads_nothing() -> None:
    """An id of another installation is unknown here."""
    id = Receipts(b"t" * 32).sign(Receipt("u", "riacho", "k"))
    with pytest.raises(NotFound, match="not made by this service"):
        receipts().read(id)


def test_long_garbage_is_not_repeated_in_full() -> None:
    """The message quotes an unknown id only so far as to recognise it."""
    with pytest.raises(NotFound) as refused:
        receipts().read("x" * 10_000)
    assert len(refused.value.message) < 300


def test_session_of_a_receipt() -> None:
    """A named session is the session; without one, each choice has its own."""
    assert Receipt("u", "p", "k", "k:s", 1).session_id == "k:s"
    assert Receipt("u", "p", "k", None, 1).session_id != Receipt("u", "p", "k", None, 0).session_id
