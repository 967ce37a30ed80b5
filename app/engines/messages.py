"""Messages as every engine takes them: text only, since that is what a policy is trained on."""

from typing import Any

from app.errors import InvalidRequest


def joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one string; raises InvalidRequest for parts that are not text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    foreign = [part.get("type") for part in content if part.get("type") != "text"]
    if foreign:
        raise InvalidRequest(
            f"The model reads text only, but a message has a part of type {foreign[0]}.", param="messages"
        )
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("A message's content has a text part without a text.", param="messages")
    return {**message, "content": "".join(texts)}
