"""Completion ids are receipts: signed, so that feedback is checked without a database read."""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Final

from app.errors import NotFound

PREFIX: Final = "chatcmpl-"
MAC_BYTES: Final = 12
WHOLE: Final = -1


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a completion id says. `choice` is WHOLE for the id of an answer with several choices."""

    uid: str
    policy: str
    key_id: str
    session: str | None = None
    choice: int = 0

    @property
    def session_id(self) -> str:
        """The named session, or the completion's own."""
        return self.session or f"{self.uid}-{self.choice}"


class Receipts:
    """Makes and reads completion ids with one secret that all app processes share."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, receipt: Receipt) -> str:
        fields = [receipt.uid, receipt.policy, receipt.key_id, receipt.session, receipt.choice]
        payload = json.dumps(fields, separators=(",", ":")).encode()
        return f"{PREFIX}{_text(payload)}.{_text(self._mac(payload))}"

    def read(self, completion_id: str) -> Receipt:
        """The receipt behind an id; raises NotFound for an id that this service did not make."""
        try:
            payload_text, _, mac_text = completion_id.removeprefix(PREFIX).partition(".")
            payload, mac = _bytes(payload_text), _bytes(mac_text)
        except (binascii.Error, ValueError):
            raise _unknown(completion_id) from None
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise _unknown(completion_id)
        receipt = Receipt(*json.loads(payload))
        if self.sign(receipt) != completion_id:
            raise _unknown(completion_id)  # the same bytes spelt otherwise would name another completion
        return receipt

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, hashlib.sha256)[:MAC_BYTES]


def _unknown(completion_id: str) -> NotFound:
    return NotFound(
        f"completion {completion_id[:64]!r} was not made by this service; use the id of a chat completion as it came",
        param="completion_id",
    )


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
