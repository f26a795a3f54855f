"""`AsyncLLM`: a model in this process, for many tasks at once."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from octavo.chat_template import ChatOptions
from octavo.collect import BeamCollector, Collector
from octavo.delivery import Arrivals, Deliveries, RequestStream, Stream
from octavo.errors import EngineDeadError, InvalidRequest
from octavo.loaded import LoadedModel
from octavo.lower import lowered, lowered_beam, params_of_one
from octavo.options import seconds_or_none
from octavo.prompts import tokenized_prompt
from octavo.sampling_params import RequestOutputKind
from octavo.shown import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from octavo._octavo import RequestParams
    from octavo.messages import Conversation, Tool
    from octavo.outputs import BeamSearchOutput, RequestOutput
    from octavo.prompts import Prompt, TokenizedPrompt
    from octavo.sampling_params import BeamSearchParams, SamplingParams

T = TypeVar("T")


class AsyncLLM(LoadedModel):
    """A loaded model for event loops: each request is a stream that a task reads.

    It may be used from several event loops and threads at once, and by one `asyncio.run` after another. Methods that
    are not `async` return at once, save `close` and those that ask the engine: they wait for the end of its step.
    """

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestStream:
        """Continue `prompt`; iterate over the result for the outputs as they grow.

        Wrong input is refused by the call itself, and so is a `request_id` that an unfinished request has. The request
        runs from here on, read or not. It ends early when the stream is closed or dropped, or when a task that waits
        for its next output is cancelled. What an output holds is said by `sampling_params.output_kind`.

        A structured output is compiled in the call, unless an equal one is known: the loop waits for that.
        """
        self._check_usable()
        read = tokenized_prompt(prompt, tokenizer=self._tokenizer, vocab_size=self._core.vocab_size)
        return self._submitted(read, sampling_params, request_id)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> RequestStream:
        """Answer one conversation by the model's chat template, as `LLM.chat` does; the rest is as with `generate`."""
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        [prompt] = self._rendered([("messages", messages)], options)
        return self._submitted(prompt, sampling_params, request_id)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None
    ) -> BeamSearchOutput:
        """Search for the likeliest continuations of `prompt`, as `LLM.beam_search` does, and wait for them.

        The request ends early when the task that waits is cancelled.
        """
        self._check_usable()
        read = tokenized_prompt(prompt, tokenizer=self._tokenizer, vocab_size=self._core.vocab_size)

        def arrivals(name: str, _: int) -> Arrivals[BeamSearchOutput]:
            collector = BeamCollector(read, name, self._tokenizer)
            return Arrivals(name, collector, collector.output, only_whole=True)

        found = Stream(*self._begun(read, lowered_beam(params, core=self._core), request_id, arrivals))
        async for output in found:
            return output
        raise EngineDeadError("the search gave nothing")

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gives one more output, with the finish reason "abort", and ends.

        A name that no unfinished request has is passed over.
        """
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id: found {shown(request_id)}, expected a text")
        self._check_process()
        with self._deliveries.lock:
            request = self._deliveries.requests.get(request_id)
        if request is not None:
            self._core.abort([request])

    async def shutdown(self, timeout: float | None = None) -> None:
        """Refuse new requests, let those that run finish within `timeout` seconds, end the rest, and close.

        Without a timeout it waits until all have finished. A request that is ended has the finish reason "abort". May
        be called again, also to hurry one that waits.
        """
        seconds = seconds_or_none("timeout", timeout)
        if self._process != os.getpid():
            return
        with self._deliveries.lock:
            self._draining = True
        if not await self._deliveries.ended(seconds):
            with self._deliveries.lock:
                left = list(self._deliveries.requests.values())
            self._core.abort(left)
            await self._deliveries.ended(None)
        await _in_a_thread(self.close)

    async def __aenter__(self) -> AsyncLLM:
        """Close at the end of the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await _in_a_thread(self.close)

    # Private

    def _prepare(self) -> None:
        self._draining = False
        self._deliveries: Deliveries = Deliveries()

    def _submitted(
        self, prompt: TokenizedPrompt, sampling_params: SamplingParams | None, request_id: str | None
    ) -> RequestStream:
        params = params_of_one(sampling_params, default=self._defaults)
        [core_params] = lowered([params], core=self._core)

        def arrivals(name: str, seed: int) -> Arrivals[RequestOutput]:
            collector = Collector(prompt, name, seed, params=params)
            output = collector.news if params.output_kind is RequestOutputKind.DELTA else collector.output
            only_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
            return Arrivals(name, collector, output, only_whole=only_whole)

        return RequestStream(*self._begun(prompt, core_params, request_id, arrivals))

    def _begun(
        self,
        prompt: TokenizedPrompt,
        core_params: RequestParams,
        request_id: str | None,
        arrivals_of: Callable[[str, int], Arrivals[T]],
    ) -> tuple[Arrivals[T], Callable[[], None]]:
        """Submit a request; where its outputs arrive, and what ends it. `arrivals_of` takes its name and its seed."""
        loop = _running_loop()
        with self._deliveries.lock:
            self._check_usable()
            if self._draining:
                raise EngineDeadError("this AsyncLLM is shutting down")
            name = self._deliveries.free_name(request_id)
            delivery = self._deliveries.of_loop(loop, self._core.inbox)
            [(request, seed)] = self._core.submit(delivery.inbox, [prompt.token_ids], [core_params])
            arrivals = arrivals_of(name, seed)
            self._deliveries.add(delivery, request, arrivals)
        return arrivals, partial(self._take_back, name, request)

    def _take_back(self, name: str, request: int) -> None:
        self._core.abort([request])
        self._deliveries.forget(name, request)


async def _in_a_thread(function: Callable[[], None]) -> None:
    """Call what may block in a thread of its own, to its end even if nobody waits for that any more.

    The loop's own threads may be busy, and there are none when the interpreter waits for its last threads.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="octavo-close").start()
    await asyncio.shield(asyncio.wrap_future(done))


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidRequest("found no running event loop, expected a call from within one") from None
