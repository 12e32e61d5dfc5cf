"""Who may use the server: keys on every route and socket, Host and Origin, the page's policy, tenants apart."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets.sync.client as ws_client
from serving import Running, running, toy_settings, until_closed
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import InvalidStatus

from server.auth import Keys, is_loopback
from server.limits import Limits
from server.ports import TextTools
from server.serve import ServeOptions, make_gate
from spec.errors import ConfigError

ALICE, BOB = "alice-key-0001", "bob-key-000002"
USER = [{"role": "user", "content": "a question long enough to fill some pages of the cache, twice over"}]
OPEN = {"/health", "/ready"}


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(text: TextTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# people\nalice:{ALICE}\n\n{BOB}\n")
    settings = toy_settings(api_key_file=str(path), allowed_origins=("https://chat.example",))
    with running(settings, text, ServeOptions(limits=Limits(auth_seconds=0.5))) as run:
        yield run


def all_routes(locked: Running) -> list[Any]:
    return list(locked.server.app.routes)


def test_every_route_asks_for_the_key(locked: Running) -> None:
    """SE-02: a walk over every HTTP route."""
    seen = 0
    for route in all_routes(locked):
        if not isinstance(route, Route):
            continue
        for method in route.methods or ():
            path = route.path.replace("{model:path}", "toy")
            for headers in ({}, auth("wrong-key"), {"Authorization": ALICE}, {"Authorization": f"Basic {ALICE}"}):
                response = locked.http.request(method, path, headers=headers)
                if path in OPEN:
                    assert response.status_code == 200
                    continue
                seen += 1
                assert response.status_code == 401, (method, path)
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "invalid_api_key"
            right = locked.http.request(method, path, headers=auth(ALICE))
            assert right.status_code not in (401, 403)
    assert seen > 30
    for path in ("/nowhere", "/v1/../v1/models", "//v1/models", "/v1/models/"):
        assert locked.http.get(path).status_code == 401
    assert locked.http.get("/v1/models?key=" + ALICE + "&api_key=" + ALICE).status_code == 401


def test_every_socket_asks_for_the_key(locked: Running) -> None:
    """SE-02: a walk over every socket."""
    paths = [route.path for route in all_routes(locked) if isinstance(route, WebSocketRoute)]
    assert set(paths) == {"/v1/ws", "/v1/responses"}
    for path in paths:
        url = locked.url.replace("http", "ws") + path
        with pytest.raises(InvalidStatus) as refused, ws_client.connect(url, additional_headers=auth("wrong-key")):
            pass
        assert refused.value.response.status_code == 401
        with ws_client.connect(url, additional_headers=auth(ALICE)) as ws:
            ws.send("{}")
            assert ws.recv(timeout=5)
    with pytest.raises(InvalidStatus), ws_client.connect(locked.url.replace("http", "ws") + "/v1/responses"):
        pass


def first_close(locked: Running, *frames: Any) -> int:
    with ws_client.connect(locked.ws_url) as ws:
        for frame in frames:
            ws.send(frame if isinstance(frame, str) else json.dumps(frame))
        frames, code = until_closed(ws)
        assert frames == []
        return code


def test_key_as_the_first_message(locked: Running) -> None:
    """SE-02: a browser says its key first, and nothing is done before."""
    chat = {"type": "chat", "id": 1, "messages": USER}
    assert first_close(locked, {"type": "auth", "key": "wrong-key"}) == 4401
    assert first_close(locked, chat) == 4401
    assert first_close(locked) == 4408
    with ws_client.connect(locked.ws_url) as ws:
        ws.send(json.dumps({"type": "auth", "key": BOB}))
        assert json.loads(ws.recv())["type"] == "hello"
        ws.send(json.dumps(chat | {"max_tokens": 2}))
        assert json.loads(ws.recv())["type"] == "started"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("same", True),
        ("https://chat.example", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("https://chat.example.evil.example", False),
        ("null", False),
        ("file://", False),
    ],
)
def test_origins(locked: Running, origin: str | None, allowed: bool) -> None:
    """SE-02: foreign origins are refused on routes and sockets, listed ones and none are let in."""
    if origin == "same":
        origin = locked.url
    headers = auth(ALICE) | ({"Origin": origin} if origin else {})
    response = locked.http.get("/v1/models", headers=headers)
    assert response.status_code == (200 if allowed else 403)
    listed = origin == "https://chat.example"
    assert ("access-control-allow-origin" in response.headers) == listed
    preflight = locked.http.options("/v1/chat/completions", headers={"Origin": origin} if origin else {})
    assert (preflight.status_code == 204) == listed
    for path in ("/v1/ws", "/v1/responses"):
        with ws_client.connect(locked.url.replace("http", "ws") + path, additional_headers=headers) as ws:
            if allowed:
                ws.send("{}")
                assert ws.recv(timeout=5)
            else:
                assert until_closed(ws) == ([], 1008)


def test_foreign_hosts_are_refused_on_loopback(locked: Running) -> None:
    """SE-02: a name that points here is not enough."""
    for host, status in (
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8", 200),
    ):
        assert locked.http.get("/v1/models", headers=auth(ALICE) | {"Host": host}).status_code == status
    assert locked.http.get("/v1/models", headers=auth(ALICE) | {"Host": "chat.example"}).status_code == 200
    headers = auth(ALICE) | {"Host": "evil.example"}
    with pytest.raises(InvalidStatus), ws_client.connect(locked.ws_url, additional_headers=headers):
        pass


def test_page_in_a_browser_may_use_basic(locked: Running) -> None:
    html = {"Accept": "text/html,*/*"}
    asked = locked.http.get("/", headers=html)
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith("Basic")
    basic = {"Authorization": "Basic " + base64.b64encode(f"me:{ALICE}".encode()).decode()}
    assert locked.http.get("/", headers=html | basic).status_code == 200
    assert locked.http.get("/v1/models", headers=basic).status_code == 401
    wrong = {"Authorization": "Basic " + base64.b64encode(b"me:wrong-key-1").decode()}
    assert locked.http.get("/", headers=html | wrong).status_code == 401


def test_page_policy(server: Running) -> None:
    page = server.http.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert server.http.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    for path in ("/../settings.py", "/%2e%2e/settings.py", "/..%2fsettings.py", "/web/../../server/auth.py"):
        assert server.http.get(path).status_code == 404


def test_keys_do_not_share_the_cache(locked: Running) -> None:
    """PC-05, both halves: the same key hits, another does not, and what a client says of itself changes nothing."""

    def cached(key: str, **fields: Any) -> int:
        question = [{"role": "user", "content": "a question that no other test asks, long enough to fill a page"}]
        body = {"messages": question, "max_tokens": 2} | fields
        answer = locked.http.post("/v1/chat/completions", json=body, headers=auth(key)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(ALICE) == 0
    assert cached(ALICE) > 0
    assert cached(BOB) == 0
    assert cached(BOB, user="alice", tenant="alice", cache_salt="alice", prompt_cache_key="alice") > 0
    assert cached(ALICE) > 0


def test_answers_of_other_keys_do_not_exist(locked: Running) -> None:
    mine = locked.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}, headers=auth(ALICE)).json()["id"]
    body = {"input": "y", "max_output_tokens": 2, "previous_response_id": mine}
    assert (
        locked.http.post("/v1/responses", json=body, headers=auth(BOB)).json()["error"]["code"] == "previous_response_not_found"
    )
    assert locked.http.post("/v1/responses", json=body, headers=auth(ALICE)).status_code == 200
    with ws_client.connect(locked.ws_url, additional_headers=auth(ALICE)) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "chat", "id": 1, "messages": USER, "max_tokens": 3, "resumable": True}))
        response_id = json.loads(ws.recv())["response_id"]
    with ws_client.connect(locked.ws_url, additional_headers=auth(BOB)) as ws:
        ws.recv()
        ws.send(json.dumps({"type": "resume", "id": 1, "response_id": response_id, "after_seq": 0}))
        assert json.loads(ws.recv())["code"] == "unknown_response"


def test_keys_never_show(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    text = locked.http.get("/metrics", headers=auth(ALICE)).text + locked.http.get("/v1/models", headers=auth(ALICE)).text
    assert ALICE not in text + caplog.text
    assert "alice" not in text


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content, wrong in (
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("short\n", "line 1"),
        ("ok-key-0001\nx:y\n", "line 2"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=wrong):
            Keys.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Keys.read(tmp_path / "absent")


def test_another_host_needs_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="API key"):
            make_gate(toy_settings(host=host))
    path = tmp_path / "keys"
    path.write_text(ALICE)
    assert make_gate(toy_settings(host="0.0.0.0", api_key_file=str(path))).keys.required
    assert is_loopback("127.8.8.8")
    assert not is_loopback("localhost.evil.example")


def test_compare_looks_at_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """SE-02: the comparison takes the same time whichever key is right."""
    import hmac

    calls = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append(1) or real(a, b))
    keys = Keys.of([ALICE, BOB, "carol-key-0003"])
    assert keys.tenant_of(ALICE) not in (None, keys.tenant_of(BOB))
    assert keys.tenant_of("nobody") is None
    assert len(calls) == 9
