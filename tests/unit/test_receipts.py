"""Completion ids as receipts: what was signed is read back, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import NotFound
from app.events.schema import CompletionEvent
from app.security.receipts import WHOLE, Receipt, Receipts

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


@given(receipt=RECEIPTS)
def test_longest_id_fits_into_an_event(receipt: Receipt) -> None:
    """Every id that can be given out can be recorded and judged."""
    id = receipts().sign(receipt)
    limits = [
        next(
            part.max_length for part in CompletionEvent.model_fields["event_id"].metadata if hasattr(part, "max_length")
        ),
        512,
    ]
    assert len(id) <= min(limits)


@given(receipt=RECEIPTS, data=st.data())
def test_any_other_spelling_is_refused(receipt: Receipt, data: st.DataObject) -> None:
    """With one character replaced, added or dropped anywhere, it is no receipt: an id has one spelling."""
    id = receipts().sign(receipt)
    at = data.draw(st.integers(0, len(id) - 1))
    new = data.draw(st.sampled_from(ALPHABET))
    forged = data.draw(st.sampled_from([id[:at] + new + id[at + 1 :], id[:at] + new + id[at:], id[:at] + id[at + 1 :]]))
    if forged != id:
        with pytest.raises(NotFound) as refused:
            receipts().read(forged)
        assert refused.value.param == "completion_id"


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
