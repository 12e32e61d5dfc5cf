"""Bounds of what clients may send and hold. Knows numbers and per-key counts; refuses to know sockets and messages' meaning."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.api_error import ApiError


@dataclass(frozen=True, slots=True)
class Limits:
    """One server's bounds. Announced to native clients in `hello`."""

    body_bytes: int = 2**20  # HTTP body and WebSocket message
    messages: int = 1024
    parts: int = 256  # content parts of one message
    n: int = 8
    prompts: int = 16  # of one completions request
    stops: int = 16
    stop_bytes: int = 512
    logit_bias: int = 1024
    stop_token_ids: int = 64
    bad_words: int = 64
    top_logprobs: int = 20
    prompt_scores: int = (
        2**20
    )  # log probabilities of prompt tokens in one answer, alternatives included: what it holds in memory
    tools: int = 64
    depth: int = 64  # nesting of JSON values
    id_chars: int = 128
    requests_per_key: int = 256  # at once, queued ones included
    sockets_per_key: int = 256
    sockets: int = 1024
    requests_per_socket: int = 64
    requests: int = 1024  # at once, of all keys
    auth_seconds: float = 10.0  # for the first message of a socket without a key
    errors_per_socket: int = 1000  # unread error frames a socket may pile up
    pending_bytes: int = 256 * 1024  # unsent text of one socket before it counts as slow
    slow_seconds: float = 20.0  # one frame may wait this long for the socket, and a ping for its answer
    ping_seconds: float = 20.0  # between keepalive pings of a socket
    ring_frames: int = 256  # sent frames kept for a resume
    resume_seconds: float = 120.0  # a detached answer is kept this long
    resumable_per_key: int = 64
    resumable: int = 512


@dataclass(slots=True)
class Usage:
    requests: int = 0
    sockets: int = 0


@dataclass(slots=True)
class Admission:
    """Counts what each key holds now. `take_*` raises ApiError 429; every successful take is paired with one give."""

    limits: Limits
    _by_key: dict[str, Usage] = field(default_factory=dict)
    _total: Usage = field(default_factory=Usage)

    def take_requests(self, tenant: str, count: int = 1) -> None:
        used = self._by_key.setdefault(tenant, Usage())
        if used.requests + count > self.limits.requests_per_key:
            self._tidy(tenant, used)
            raise _too_many(
                f"this key has {used.requests} requests running; at most {self.limits.requests_per_key} are allowed"
            )
        if self._total.requests + count > self.limits.requests:
            self._tidy(tenant, used)
            raise _too_many(
                f"the server has {self._total.requests} requests running; at most {self.limits.requests} are allowed"
            )
        used.requests += count
        self._total.requests += count

    def give_requests(self, tenant: str, count: int = 1) -> None:
        used = self._by_key[tenant]
        used.requests -= count
        self._total.requests -= count
        self._tidy(tenant, used)

    def take_socket(self, tenant: str) -> None:
        used = self._by_key.setdefault(tenant, Usage())
        if used.sockets >= self.limits.sockets_per_key or self._total.sockets >= self.limits.sockets:
            self._tidy(tenant, used)
            raise _too_many(f"too many open sockets; at most {self.limits.sockets_per_key} per key are allowed")
        used.sockets += 1
        self._total.sockets += 1

    def give_socket(self, tenant: str) -> None:
        used = self._by_key[tenant]
        used.sockets -= 1
        self._total.sockets -= 1
        self._tidy(tenant, used)

    def _tidy(self, tenant: str, used: Usage) -> None:
        if used.requests == 0 and used.sockets == 0:
            self._by_key.pop(tenant, None)


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after=1.0)
