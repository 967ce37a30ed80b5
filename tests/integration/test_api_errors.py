"""Bad input: each gets a clear error of OpenAI's shape that names the field, and never a 500."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.service import POLICY, Service, error_of, service_fixture

service = service_fixture(RIACHO_MAX_BODY_BYTES="200000")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": POLICY, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
HEADERS = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _nothing_unexpected(service: Service) -> Iterator[None]:
    """Whatever a test sends, it meets no bug: the log has no stack trace."""
    seen = len(service.log_text)
    yield
    assert "Traceback" not in service.log_text[seen:]


def refused(service: Service, **fields: Any) -> dict[str, Any]:
    return error_of(service.client.post(CHAT, json=BODY | fields), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("n", "2"),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", "4"),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", "none"),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stream", "yes"),
        ("stream", 1),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", [1]),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"99999999": 1}),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
        ("tools", "calculator"),
        ("messages", []),
        ("messages", "Hello."),
        ("messages", [{"role": "user", "content": 5}]),
        ("model", None),
        ("model", 5),
        ("store", "no"),
        ("metadata", {"session_id": 5}),
        ("no_such_field", 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_value_names_its_field(service: Service, field: str, value: Any) -> None:
    """A field of a wrong type or out of its range is a 400 whose message names the field."""
    error = refused(service, **{field: value})
    assert error["type"] == "invalid_request_error"
    assert field in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_field_is_named(service: Service, missing: str) -> None:
    """What a request cannot do without is named."""
    body = {key: value for key, value in BODY.items() if key != missing}
    error = error_of(service.client.post(CHAT, json=body), 400)
    assert missing in f"{error['param']} {error['message']}"


def test_all_wrong_fields_are_named_at_once(service: Service) -> None:
    """Two mistakes, one round trip."""
    message = refused(service, temperature="hot", nonsense=1)["message"]
    assert "temperature" in message
    assert "nonsense" in message


def test_client_raises_its_own_exceptions(service: Service) -> None:
    """The openai client turns the errors into its classes, with code and param."""
    client = service.openai()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**BODY | {"n": 0})
    assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "n", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError) as unknown:
        service.openai("wrong-key").chat.completions.create(**BODY)
    assert unknown.value.code == "invalid_api_key"


GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "cut off": b'{"model": "riacho"',
    "no JSON": b"model=riacho",
    "NaN literal": b'{"model":"riacho","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "Infinity literal": b'{"model":"riacho","messages":[{"role":"user","content":"x"}],"top_p":Infinity}',
    "number beyond float": b'{"model":"riacho","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    "half a surrogate pair": b'{"model":"riacho","messages":[{"role":"user","content":"\\ud800"}]}',
    "no UTF-8": b'{"model":"riacho","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a list": b"[]",
    "a string": b'"riacho"',
    "null": b"null",
    "a number": b"7",
    "two objects": b"{}{}",
    "deep list": b"[" * 90_000,
    "deep object": b'{"a":' * 30_000,
    "deep value": b'{"model":"riacho","metadata":' + b'{"a":' * 9_000 + b"1" + b"}" * 9_000 + b',"messages":[]}',
    "zero bytes": b"\0" * 1000,
    "long key": b'{"' + b"a" * 100_000 + b'": 1}',
}


@pytest.mark.parametrize("path", [CHAT, "/v1/feedback"])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(service: Service, path: str, name: str) -> None:
    """A body that is no JSON object of the right kind is a 400 with a message for people."""
    error = error_of(service.client.post(path, content=GARBAGE[name], headers=HEADERS), 400)
    assert error["type"] == "invalid_request_error"
    assert error["message"] != "data: 'data'"


def test_code_is_for_programs(service: Service) -> None:
    """Codes are snake_case words of this API, never the name of a Python class."""
    answers = [
        service.client.post(CHAT, content=b"{", headers=HEADERS),
        service.client.get("/nothing/here"),
        service.client.get(CHAT),
        service.client.post(CHAT, json=BODY | {"n": 0}),
    ]
    for answer in answers:
        code = answer.json()["error"]["code"]
        assert code is None or (code == code.lower() and "exception" not in code), code


def test_too_long_prompt_is_refused(service: Service) -> None:
    """A prompt beyond the context says so with OpenAI's code, before anything is sampled."""
    before = len(service.events())
    with pytest.raises(openai.BadRequestError) as long:
        service.openai().chat.completions.create(
            model=POLICY, messages=[{"role": "user", "content": "sea and sky " * 14_000}]
        )
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "messages"
    assert "context" in long.value.message
    assert len(service.events()) == before


def test_too_long_prompt_is_refused_before_a_stream(service: Service) -> None:
    """A stream that cannot begin is a plain 400, not a stream with an error in it."""
    response = service.post_chat("sea and sky " * 14_000, stream=True)
    assert error_of(response, 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("chunked", [False, True], ids=["with length", "chunked"])
def test_too_large_body_is_refused(service: Service, chunked: bool) -> None:
    """A body above max_body_bytes is a 413, whether or not it says its length."""
    body = b'{"model": "' + b"x" * 300_000 + b'"}'
    content: Any = iter([body[:100_000], body[100_000:200_000], body[200_000:]]) if chunked else body
    response = service.client.post(CHAT, content=content, headers=HEADERS)
    error_of(response, 413)


ROUTES = [
    ("POST", CHAT),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{POLICY}"),
    ("POST", "/v1/feedback"),
    ("POST", "/v1/sessions/s/close"),
    ("GET", "/v1/completions/c"),
    ("GET", "/metrics"),
    ("GET", "/openapi/openapi.json"),
    ("GET", "/admin/policies"),
    ("POST", f"/admin/policies/{POLICY}/rollback"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer", "test-client-key", "Basic dGVzdDp0ZXN0", "Bearer \xff"]
)
def test_every_route_wants_a_key(service: Service, method: str, path: str, authorization: str | None) -> None:
    """Without a valid bearer key: 401 that says which header is missing, whatever the body."""
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    error = error_of(service.anonymous.request(method, path, headers=headers), 401)
    assert error["code"] == "invalid_api_key"
    assert "key" in error["message"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
def test_health_needs_no_key(service: Service, path: str) -> None:
    """Probes come without keys."""
    assert service.anonymous.get(path).status_code == httpx.codes.OK


ADMIN_ROUTES = [
    ("GET", ""),
    ("GET", f"/{POLICY}"),
    ("GET", f"/{POLICY}/versions"),
    ("GET", f"/{POLICY}/versions/1"),
    ("POST", f"/{POLICY}/versions/1/pin"),
    ("GET", f"/{POLICY}/deployments"),
    ("GET", f"/{POLICY}/updates"),
    ("POST", f"/{POLICY}/rollback"),
    ("POST", f"/{POLICY}/pause"),
    ("POST", f"/{POLICY}/resume"),
    ("GET", f"/{POLICY}/dead-letters"),
    ("POST", f"/{POLICY}/dead-letters/1/replay"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_client_key_opens_no_admin_route(service: Service, method: str, path: str) -> None:
    """A client's key is a 403 on every route of the operators, whatever the body."""
    error = error_of(service.client.request(method, f"/admin/policies{path}", json={}), 403)
    assert error["code"] == "permission_denied"
    assert "admin" in error["message"]


def test_unknown_route_and_method(service: Service) -> None:
    """404 and 405 have the shape of every other error; 405 says what is allowed."""
    error_of(service.client.get("/v1/nothing"), 404)
    error_of(service.anonymous.get("/v1/nothing"), 404)
    response = service.client.delete(CHAT)
    error_of(response, 405)
    assert "POST" in response.headers["allow"]


def test_openapi_document_is_valid(service: Service) -> None:
    """The document names every route that clients and operators use."""
    document = service.client.get("/openapi/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert {CHAT, "/v1/models", "/v1/feedback", "/v1/sessions/{session_id}/close"} <= set(document["paths"])
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert all({"200", "204"} & operation["responses"].keys() for operation in operations)


def test_openapi_documents_the_errors_that_are_sent(service: Service) -> None:
    """The documented body of a 400 has the field `error`, as the real one."""
    document = service.client.get("/openapi/openapi.json").json()
    schema = document["paths"][CHAT]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    assert "error" in schema["properties"]


def test_requests_are_counted(service: Service) -> None:
    """The counters of /metrics move with good and with refused requests."""
    ok = f'riacho_http_requests_total{{method="POST",route="{CHAT}",status="200"}}'
    bad = f'riacho_http_requests_total{{method="POST",route="{CHAT}",status="400"}}'
    before = service.metric(ok), service.metric(bad), service.metric('riacho_tokens_total{kind="prompt"}')
    answer = service.ask()
    refused(service, n=0)
    assert service.metric(ok) == before[0] + 1
    assert service.metric(bad) == before[1] + 1
    assert service.metric('riacho_tokens_total{kind="prompt"}') == before[2] + answer["usage"]["prompt_tokens"]
