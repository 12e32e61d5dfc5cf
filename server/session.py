"""One native socket's conversation. Sans-I/O: frames in, intents and frames out, the caller brings the clock.

Knows ids, authentication, limits and whose turn it is to send; refuses to know tokens, prompts and sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from server.api_error import ApiError
from server.limits import Limits
from server.ports import Tokenizer
from server.protocol import Auth, Cancel, Chat, ClientId, Codec, Error, Hello, Notice, Ping, Pong, Resume, ServerMessage
from server.resumables import Resumables
from server.stream import ChatStream, nobody

CLOSE_NORMAL = 1000
CLOSE_FAILED = 1011
CLOSE_RESTART = 1012
CLOSE_KEY = 4401
CLOSE_NO_KEY = 4408
CLOSE_TOO_MANY = 4429
CLOSE_SLOW = 4503


@dataclass(frozen=True, slots=True)
class Begin:
    """Make the prompt of `chat` and start it; then `stream.begin`, or `session.refuse` with what was wrong."""

    stream: ChatStream
    chat: Chat


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What every session of a server shares. `check_key` gives a key's tenant, None for a wrong one."""

    limits: Limits
    tokenizer: Tokenizer
    hello: Callable[[], Hello]
    check_key: Callable[[str], str | None]
    resumables: Resumables


class Session:
    """`tenant` is None until a key has been said. `wake` is called when there may be something new to send."""

    def __init__(self, settings: SessionSettings, codec: Codec, tenant: str | None, wake: Callable[[], None]) -> None:
        self.tenant = tenant
        self.close_code: int | None = None  # set once; the caller closes when every frame is out
        self.close_reason = ""
        self.wake = wake
        self._settings = settings
        self._codec = codec
        self._control: deque[ServerMessage] = deque()
        self._streams: dict[ClientId, ChatStream] = {}
        self._turn: deque[ChatStream] = deque()  # whose delta is next, oldest served first
        if tenant is not None:
            self._control.append(settings.hello())

    # ---- from the client

    def receive(self, frame: bytes | str) -> Begin | None:
        """Take one frame. Bad ones are answered with an error; nothing raises."""
        try:
            message = self._codec.decode(frame)
        except ApiError as error:
            client_id = self._codec.id_of(frame)
            self._say_error(error, None if client_id in self._streams or not self._is_short(client_id) else client_id)
            return None
        if self.tenant is None:
            self._authenticate(message)
            return None
        name = "t" if isinstance(message, Ping) else "id"
        if not self._is_short(getattr(message, name, None)):  # what comes back in answers is bounded, unread ones pile up
            limit = f"{name} must be a string of at most {self._settings.limits.id_chars} characters or a number of 64 bits"
            self._say_error(ApiError(400, limit, code="invalid_value", param=name), None)
            return None
        if isinstance(message, Chat):
            return self._chat(message)
        if isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Resume):
            self._resume(message)
        elif isinstance(message, Ping):
            self._say(Pong(t=message.t))
        else:
            self._say(Notice(code="already_authenticated", message="this socket needs no key any more"))
        return None

    def _is_short(self, value: object) -> bool:
        if isinstance(value, str):
            return len(value) <= self._settings.limits.id_chars
        return not isinstance(value, int) or -(2**63) <= value < 2**63

    def _authenticate(self, message: Auth | Chat | Cancel | Resume | Ping) -> None:
        if not isinstance(message, Auth):
            self.end(CLOSE_KEY, "the first message must be auth with a key")
            return
        self.tenant = self._settings.check_key(message.key)
        if self.tenant is None:
            self.end(CLOSE_KEY, "this API key is not known")
        else:
            self._say(self._settings.hello())

    def _chat(self, chat: Chat) -> Begin | None:
        limits = self._settings.limits
        assert self.tenant is not None
        if isinstance(chat.id, str) and not 1 <= len(chat.id) <= limits.id_chars:
            self._say_error(
                ApiError(400, f"id needs 1 to {limits.id_chars} characters", code="invalid_value", param="id"), None
            )
            return None
        if chat.id in self._streams:
            message = f"the id {chat.id!r} is in use on this socket; its answer goes on"
            self._say_error(ApiError(400, message, code="duplicate_id", param="id"), None)
            return None
        if len(self._streams) >= limits.requests_per_socket:
            message = f"at most {limits.requests_per_socket} requests may run on one socket"
            self._say_error(ApiError(429, message, code="rate_limit_exceeded", retry_after=1.0), chat.id)
            return None
        stream = ChatStream(
            chat.id, self.tenant, self._settings.tokenizer, limits.ring_frames,
            resumable=bool(chat.resumable), pace=bool(chat.pace),
        )  # fmt: skip
        if stream.resumable:
            try:
                self._settings.resumables.add(stream, self)
            except ApiError as error:
                self._say_error(error, chat.id)
                return None
        self._attach(stream)
        return Begin(stream, chat)

    def _cancel(self, message: Cancel) -> None:
        stream = self._streams.get(message.id)
        if stream is None:
            error = ApiError(
                404,
                f"no request with the id {str(message.id)[:128]!r} is running on this socket",
                code="unknown_id",
                param="id",
            )
            self._say_error(error, message.id)
        else:
            stream.cancel()
            self.wake()

    def _resume(self, message: Resume) -> None:
        assert self.tenant is not None
        if message.id in self._streams:
            self._say_error(
                ApiError(400, f"the id {message.id!r} is in use on this socket", code="duplicate_id", param="id"), None
            )
            return
        try:
            stream, holder = self._settings.resumables.find(message.response_id, self.tenant)
            old_id = stream.client_id
            stream.resume(message.id, message.after_seq)
        except ApiError as error:
            self._say_error(error, message.id)
            return
        if holder is not None:
            holder.lose(old_id)
        self._settings.resumables.attach(stream, self)
        self._attach(stream)
        self.wake()

    def _attach(self, stream: ChatStream) -> None:
        self._streams[stream.client_id] = stream
        self._turn.append(stream)
        stream.wake = self.wake

    def lose(self, client_id: ClientId) -> None:
        """Another socket has resumed this answer."""
        stream = self._streams.pop(client_id, None)
        if stream is not None:
            self._turn.remove(stream)
            self._say(Error(id=client_id, code="resumed_elsewhere", message="another connection has taken this answer over"))

    # ---- to the client

    def _say(self, message: ServerMessage) -> None:
        if len(self._control) >= self._settings.limits.errors_per_socket:
            self.end(CLOSE_SLOW, "too many unread messages")
            return
        self._control.append(message)
        self.wake()

    def _say_error(self, error: ApiError, client_id: ClientId | None) -> None:
        self._say(
            Error(
                id=client_id,
                code=error.code or "error",
                message=error.message,
                param=error.param,
                retry_after=error.retry_after,
            )
        )

    def notice(self, code: str, message: str) -> None:
        if self.tenant is not None and self.close_code is None:
            self._say(Notice(code=code, message=message))

    def refuse(self, stream: ChatStream, error: ApiError) -> None:
        """The request of `stream` cannot begin; its only message is this error."""
        if self._streams.get(stream.client_id) is stream:
            self._say_error(error, stream.client_id)
            self._drop(stream)
        self._settings.resumables.remove(stream)

    def _drop(self, stream: ChatStream) -> None:
        del self._streams[stream.client_id]
        self._turn.remove(stream)

    def next_frame(self, now: float) -> bytes | str | None:
        """The next frame to send, None when there is none now. Answers take turns."""
        if self._control:
            return self._codec.encode(self._control.popleft())
        for _ in range(len(self._turn)):
            stream = self._turn[0]
            self._turn.rotate(-1)
            message = stream.take(now)
            if message is not None:
                if stream.finished:
                    self._drop(stream)
                    self._settings.resumables.finished(stream, now)
                return self._codec.encode(message)
        return None

    def next_time(self) -> float | None:
        """When paced text becomes due, None when nothing waits for a time."""
        times = [time for stream in self._turn if (time := stream.next_time()) is not None]
        return min(times, default=None)

    @property
    def num_running(self) -> int:
        return len(self._streams)

    def check_slow(self, blocked_since: float | None, now: float) -> None:
        """Give a reader up that lets too much pile up, or takes nothing for too long."""
        limits = self._settings.limits
        if blocked_since is None:
            return
        pending = sum(stream.pending_bytes() for stream in self._turn)
        if pending > limits.pending_bytes or now - blocked_since > limits.slow_seconds:
            self.end(CLOSE_SLOW, "this connection reads too slowly; resumable answers wait")

    # ---- the end

    def end(self, code: int, reason: str) -> None:
        if self.close_code is None:
            self.close_code, self.close_reason = code, reason
            self.wake()

    def detach(self, now: float) -> None:
        """The socket is gone: resumable answers go on without it, all others stop."""
        for stream in self._streams.values():
            stream.wake = nobody
            if stream.resumable and stream.seq > 0:
                self._settings.resumables.detach(stream, now)
            else:  # an answer whose id was never told cannot be resumed either
                stream.cancel()
                self._settings.resumables.remove(stream)
        self._streams.clear()
        self._turn.clear()
        self._control.clear()
