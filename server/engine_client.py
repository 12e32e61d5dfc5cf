"""The server's side of the engine: routes events to requests and keeps an engine process alive under them.

Knows tokens delivered so far, so that a new process continues every answer where the old one stopped; refuses to know text.
A process that dies, raises, or stops answering pings is replaced. Sampling is keyed by position, so the continued text is the
text that would have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from server.engine_link import EngineLaunch, EngineLink
from server.engine_watch import EngineState, Hooks, RestartPolicy
from server.wire import Cancel, Events, Fatal, FromEngine, Ping, Pong, Ready, Shutdown, Stats, Submit
from spec.request import Request, TokenEvent

log = logging.getLogger("forespeak.engine")

Phases = Sequence[float]  # seconds of a step, in the order of spec.request.PHASES; () where there was none
Sink = Callable[[TokenEvent, Phases], None]


@dataclass(slots=True)
class _Running:
    request: Request
    sink: Sink
    delivered: list[int] = field(default_factory=list)
    crashes: int = 0
    submitted: bool = False  # to the process that lives now
    progress: int = 0  # tokens delivered by the process that lives now


class EngineClient:
    """`start` and `stop` once; `submit` and `cancel` at any time, also while no process is ready."""

    def __init__(self, launch: EngineLaunch, policy: RestartPolicy, hooks: Hooks | None = None) -> None:
        self.state = EngineState.LOADING
        self.ready: Ready | None = None
        self.restarts = 0
        self.exit_code = 0  # of the last process that failed to load
        self.failure = ""
        self._launch = launch
        self._policy = policy
        self._hooks = hooks or Hooks()
        self._running: dict[int, _Running] = {}
        self._probation: deque[int] = deque()  # twice-crashed requests waiting for their turn
        self._suspect: int | None = None
        self._link: EngineLink | None = None
        self._lost = asyncio.Event()
        self._came_up = asyncio.Event()
        self._settled = asyncio.Event()  # READY for the first time, FAILED or STOPPED
        self._heard = 0.0
        self._steps = (0, 0.0)  # last step count seen and when it changed
        self._fatal = ""
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    # ---- what the server calls

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name="engine supervisor")

    async def wait_settled(self) -> EngineState:
        """Wait until the first process is ready, or has failed."""
        await self._settled.wait()
        return self.state

    @property
    def pid(self) -> int:
        return self._link.pid if self._link is not None else 0

    @property
    def responsive(self) -> bool:
        """Whether a ready process has answered lately. A stopped one shows here before it is given up."""
        return self.state is EngineState.READY and time.monotonic() - self._heard < self._policy.doubt_seconds

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: Request, sink: Sink) -> None:
        """Run a request; `sink` gets its events and the seconds of their steps; the last event has a finish_reason. After giving up that is an error at once."""
        if self.state in (EngineState.FAILED, EngineState.STOPPED):
            sink(_error_event(request.id, "the engine is not running", "engine_failed"), ())
            return
        self._running[request.id] = running = _Running(request, sink, delivered=list(request.generated_ids))
        if self.state is EngineState.READY:
            self._send(running)

    def cancel(self, request_id: int) -> None:
        """Forget a request. Its sink is never called again; unknown ids are ignored."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if running.submitted and self._link is not None:
            self._link.send(Cancel(request_id))
        if request_id == self._suspect:
            self._next_suspect()

    def kill(self) -> None:
        """End the process now."""
        if self._link is not None:
            self._link.kill()

    async def stop(self, grace: float = 3.0) -> None:
        """End the process. Requests still running get an error."""
        self._stopping = True
        self._set_state(EngineState.STOPPED, "the server is stopping")
        if self._link is not None:
            self._link.send(Shutdown())
            await self._link.close(grace)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail_all("the server is stopping", "server_stopping")

    # ---- one process after another

    async def _supervise(self) -> None:
        failures = 0
        while True:
            came_up, exit_code = await self._one_life()
            if self._stopping:
                return
            failures = 0 if came_up else failures + 1
            first = self.ready is None
            if not came_up:
                self.exit_code = exit_code
            if failures and (first or failures >= self._policy.failed_loads):
                self.failure = self._fatal or f"the engine process ended with code {exit_code} while loading"
                self._set_state(EngineState.FAILED, self.failure)
                self._fail_all("the engine cannot be started", "engine_failed")
                return
            self._set_state(EngineState.RESTARTING, self._fatal or "the engine process ended")
            self.restarts += 1
            self._count_crash()
            await asyncio.sleep(self._policy.backoff_seconds * 2**failures if failures else 0)

    async def _one_life(self) -> tuple[bool, int]:
        """Run one process to its end. Returns (it was ready at some time, its exit code)."""
        self._lost, self._came_up, self._fatal = asyncio.Event(), asyncio.Event(), ""
        link = self._link = EngineLink(self._on_message, self._lost.set)
        started = self._heard = time.monotonic()
        try:
            await link.start(self._launch)
            await self._watch(link, started)
        except OSError as error:
            self._fatal = f"the engine process cannot be started: {error}"
        finally:
            if not self._lost.is_set():
                link.kill()
            exit_code = await link.close(grace=1.0)
        if not self._stopping:
            log.warning(
                "engine process %d ended with code %d%s", link.pid, exit_code, f": {self._fatal}" if self._fatal else ""
            )
        return self._came_up.is_set(), exit_code

    async def _watch(self, link: EngineLink, started: float) -> None:
        """Ping until the process is lost, silent for too long, or stuck in one step."""
        policy, nonce = self._policy, 0
        self._steps = (-1, started)
        while not self._lost.is_set():
            before = time.monotonic()
            nonce += 1
            link.send(Ping(nonce))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), policy.ping_seconds)
            now = time.monotonic()
            if now - before > policy.ping_seconds + 1.0:
                self._heard = now  # we were asleep ourselves (stopped, suspended): judge nobody by that
                continue
            up = self._came_up.is_set()
            if now - self._heard > (policy.silence_seconds if up else policy.loading_silence_seconds):
                self._fatal = f"the engine process did not answer for {now - self._heard:.1f} s"
                return
            if up and self._running and now - self._steps[1] > policy.step_seconds:
                self._fatal = f"one step has taken more than {policy.step_seconds:.0f} s"
                return
            if not up and now - started > policy.load_seconds:
                self._fatal = f"loading has taken more than {policy.load_seconds:.0f} s"
                return

    def _on_message(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Events):
            if message.phases:
                self._hooks.on_step(message.phases)
            for event in message.events:
                self._deliver(event, message.phases)
        elif isinstance(message, Pong):
            if message.steps != self._steps[0] or not self._running:
                self._steps = (message.steps, self._heard)
        elif isinstance(message, Stats):
            self._hooks.on_stats(message.values)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Fatal):
            self._fatal = message.message

    def _on_ready(self, ready: Ready) -> None:
        self.ready = ready
        self._came_up.set()
        self._set_state(EngineState.READY, f"{ready.model} is loaded")
        for running in list(self._running.values()):
            if running.crashes < self._policy.crashes_per_request - 1:
                self._send(running)
        self._next_suspect()

    def _deliver(self, event: TokenEvent, phases: Phases) -> None:
        running = self._running.get(event.request_id)
        if running is None:
            return
        running.delivered.extend(event.token_ids)
        running.progress += len(event.token_ids)
        if event.finish_reason is not None:
            del self._running[event.request_id]
        running.sink(event, phases)
        done = event.finish_reason is not None or running.progress >= self._policy.probation_tokens
        if event.request_id == self._suspect and done:
            self._next_suspect()

    # ---- after a crash

    def _count_crash(self) -> None:
        """Blame the request on probation, or without one every request the dead process held; three times end a request."""
        suspect, self._suspect = self._suspect, None
        self._probation.clear()
        for running in list(self._running.values()):
            if running.submitted and suspect in (None, running.request.id):
                running.crashes += 1
            running.submitted, running.progress = False, 0
            if running.crashes >= self._policy.crashes_per_request:
                del self._running[running.request.id]
                message = f"the engine failed {running.crashes} times while it worked on this request"
                running.sink(_error_event(running.request.id, message, "engine_crashed"), ())
            elif running.crashes == self._policy.crashes_per_request - 1:
                self._probation.append(running.request.id)

    def _next_suspect(self) -> None:
        """Let the next twice-crashed request in: one at a time, so that a third crash hits the one that causes it."""
        self._suspect = None
        while self._probation and self._suspect is None:
            running = self._running.get(self._probation.popleft())
            if running is not None:
                self._suspect = running.request.id
                self._send(running)

    def _send(self, running: _Running) -> None:
        assert self._link is not None
        running.submitted = True
        request = running.request
        if len(running.delivered) != len(request.generated_ids):
            request = msgspec.structs.replace(request, generated_ids=tuple(running.delivered))
        self._link.send(Submit(request))

    def _fail_all(self, message: str, code: str) -> None:
        waiting, self._running = list(self._running.values()), {}
        for running in waiting:
            running.sink(_error_event(running.request.id, message, code), ())

    def _set_state(self, state: EngineState, message: str) -> None:
        if self.state in (EngineState.FAILED, EngineState.STOPPED):
            return
        changed, self.state = state is not self.state, state
        if state is not EngineState.RESTARTING:
            self._settled.set()
        if changed:
            self._hooks.on_state(state, message)


def _error_event(request_id: int, message: str, code: str) -> TokenEvent:
    return TokenEvent(request_id, finish_reason="error", error=message, error_code=code)
