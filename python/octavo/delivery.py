"""From the engine to event loops: a loop has one inbox, one thread that waits on it, and one wake-up a step.

What a step gave to all requests of a loop travels together. It becomes an output only when a task asks for one, so that
whoever reads slowly finds several steps merged and never a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from octavo.errors import EngineDeadError, InvalidRequest
from octavo.outputs import RequestOutput
from octavo.shown import shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from octavo._octavo import Delta, Inbox
    from octavo.collect import Collecting

# How long the thread may take to see that nobody will read any more. It waits only while requests run.
_WAIT_SECONDS = 0.25


T = TypeVar("T")


class Stream(AsyncIterator[T]):
    """What comes of a request.

    The request ends with the stream: when it is closed or dropped, and when a task that waits for its next output is
    cancelled.
    """

    def __init__(self, arrivals: Arrivals[T], take_back: Callable[[], None]) -> None:
        """Made by `AsyncLLM`; `take_back` ends the request."""
        self.request_id = arrivals.name
        """The name by which `AsyncLLM.abort` knows the request."""
        self._arrivals = arrivals
        self._take_back = take_back
        self._process = os.getpid()

    async def __anext__(self) -> T:
        """Wait until there is more than was read before."""
        if self._process != os.getpid():
            raise EngineDeadError(f"this stream belongs to process {self._process} and this is its fork {os.getpid()}")
        self._arrivals.check_reader()
        try:
            output = await self._arrivals.next()
        except BaseException:
            self._end()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Take the request back; nothing more comes. May be called again."""
        self._end()

    def __del__(self) -> None:
        """Take the request back if it has not ended."""
        self._end()

    def _end(self) -> None:
        # The engine of a fork's parent is not here to be told.
        if self._process == os.getpid() and self._arrivals.close():
            self._take_back()


class RequestStream(Stream[RequestOutput]):
    """A request as far as it has come, again and again; the last output is `finished`.

    An output holds everything from the first token on, or what its `RequestOutputKind` says. The request ends with the
    stream: when it is closed or dropped, and when a task that waits for its next output is cancelled.
    """


class Arrivals(Generic[T]):
    """What has come of one request. Only the event loop that reads it touches it."""

    def __init__(self, name: str, collector: Collecting, output: Callable[[], T], *, only_whole: bool) -> None:
        """To be read in this event loop. `collector` is empty yet; `output` makes of it what the reader gets.

        With `only_whole` there is one output, at the end.
        """
        self.name = name
        self._collector = collector
        self._output = output
        self._only_whole = only_whole
        self._loop = asyncio.get_running_loop()
        self._unread = False
        self._closed = False
        self._death: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def check_reader(self) -> None:
        """Refuse a task that cannot wait here."""
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequest(f"request {self.name!r} is read in another event loop than it was made in")
        if self._waiter is not None:
            raise InvalidRequest(f"request {self.name!r} is read by two tasks at once, expected one")

    async def next(self) -> T | None:
        """The next output, once there is something new; None when nothing more will come."""
        while not (self._unread or self._closed or self._collector.finished or self._death is not None):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._unread and not self._closed:
            self._unread = False
            return self._output()
        death, self._death = self._death, None
        if death is not None and not self._closed:
            self._closed = True
            raise EngineDeadError(death)
        return None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        if not self._closed:
            self._collector.add(delta)
            if self._collector.finished or not self._only_whole:
                self._unread = True
                self._wake()

    def fail(self, reason: str) -> None:
        """The engine has ended before the request."""
        self._death = reason
        self._wake()

    def close(self) -> bool:
        """Give nothing more out. Whether the request is still to be ended."""
        runs = not (self._closed or self._collector.finished or self._death is not None)
        self._closed = True
        self._wake()
        return runs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Deliveries:
    """The requests of all event loops.

    Invariant: `lock` is held by whoever reads or changes what is kept here, and from the look at it to the submission
    that follows. It is reentrant, since a stream may be collected, and its request taken back, wherever memory is
    allocated.
    """

    def __init__(self) -> None:
        """Without any request."""
        self.lock: AbstractContextManager[object] = threading.RLock()
        self.requests: dict[str, int] = {}
        """The requests by name: those whose loop has not been told of their end, and that nobody has taken back."""
        self._by_loop: dict[asyncio.AbstractEventLoop, Delivery] = {}
        self._numbers = itertools.count()

    def free_name(self, given: str | None) -> str:
        """The name that was given, or a new one."""
        if given is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(name for name in names if name not in self.requests)
        if not isinstance(given, str) or not given:
            raise InvalidRequest(f"request_id: found {shown(given)}, expected None or a text of at least one character")
        if given in self.requests:
            raise InvalidRequest(f"request_id: found {shown(given)}, which a request has that has not ended")
        return given

    def of_loop(self, loop: asyncio.AbstractEventLoop, new_inbox: Callable[[], Inbox]) -> Delivery:
        """The delivery that `loop` has, or a new one."""
        return self._by_loop.get(loop) or Delivery(loop, new_inbox(), self)

    def add(self, delivery: Delivery, request: int, arrivals: Arrivals[Any]) -> None:
        """Keep a request that was just submitted to the inbox of `delivery`."""
        delivery.expect(request, arrivals)
        self._by_loop[delivery.loop] = delivery
        self.requests[arrivals.name] = request

    def forget(self, name: str, request: int) -> None:
        """The name of `request` is free; it may be that of another one already."""
        with self.lock:
            if self.requests.get(name) == request:
                del self.requests[name]

    def retire(self, delivery: Delivery) -> None:
        """No further request goes to `delivery`."""
        if self._by_loop.get(delivery.loop) is delivery:
            del self._by_loop[delivery.loop]

    async def ended(self, timeout: float | None) -> bool:
        """Wait for the end of all requests; False if the time did not suffice."""
        with self.lock:
            waiting = [asyncio.wrap_future(delivery.ended) for delivery in self._by_loop.values()]
        return not waiting or not (await asyncio.wait(waiting, timeout=timeout))[1]


class Delivery:
    """Carries what arrives in one inbox to the event loop of its requests, for as long as one of them runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, deliveries: Deliveries) -> None:
        """Made in the thread that runs `loop`; goes to work with the first request."""
        self.loop = loop
        self.inbox = inbox
        self.ended: Future[None] = Future()
        """Done when all requests have ended and their loop has been told."""
        self._deliveries = deliveries
        self._runner = threading.current_thread()
        self._thread: threading.Thread | None = None
        self._arrivals: dict[int, Arrivals[Any]] = {}
        self._unfinished = 0

    def expect(self, request: int, arrivals: Arrivals[Any]) -> None:
        """Hand what comes for `request` to `arrivals`. Called in the event loop, with the lock held."""
        if self._thread is None:
            # Not a daemon: one of those is stopped inside the extension when the interpreter ends.
            self._thread = threading.Thread(target=self._run, name="octavo-delivery")
            self._thread.start()
        self._arrivals[request] = arrivals
        self._unfinished += 1

    # In the thread

    def _run(self) -> None:
        """Hand over what arrives until no request runs, or nobody is there to read."""
        try:
            while self._goes_on():
                arrived = self.inbox.recv(_WAIT_SECONDS)
                if arrived:
                    self._call(self._add, arrived)
                with self._deliveries.lock:
                    self._unfinished -= sum(delta.last for delta in arrived)
        except BaseException as error:  # A panic of the extension is no Exception; whatever it is, readers must know.
            reason = str(error) if isinstance(error, EngineDeadError) else f"outputs cannot be read: {error!r}"
            self._call(self._fail, reason)
        with self._deliveries.lock:
            self._deliveries.retire(self)
        if self.loop.is_closed():
            self._forget_all()
        self.inbox.abort()
        self.ended.set_result(None)

    def _goes_on(self) -> bool:
        with self._deliveries.lock:
            goes_on = self._unfinished > 0 and not self._is_abandoned()
            if not goes_on:
                self._deliveries.retire(self)
        return goes_on

    def _is_abandoned(self) -> bool:
        """Whether the loop will not run again: it is closed, or the interpreter is about to end."""
        if self.loop.is_closed():
            return True
        main, runner = threading.main_thread(), self._runner
        return not main.is_alive() and (runner is main or runner.daemon or not runner.is_alive())

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        """Have the loop call `function`, unless it is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, argument)

    # In the event loop

    def _add(self, arrived: list[Delta]) -> None:
        for delta in arrived:
            arrivals = self._arrivals[delta.request]
            arrivals.add(delta)
            if delta.last:
                del self._arrivals[delta.request]
                self._deliveries.forget(arrivals.name, delta.request)

    def _fail(self, reason: str) -> None:
        for arrivals in self._arrivals.values():
            arrivals.fail(reason)
        self._forget_all()

    def _forget_all(self) -> None:
        for request, arrivals in self._arrivals.items():
            self._deliveries.forget(arrivals.name, request)
        self._arrivals.clear()
