"""`LLM`: a model in this process, for many prompts at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from octavo.chat_template import ChatOptions
from octavo.checks import flag, integer
from octavo.collect import BeamCollector, Collecting, Collector, OutputStream, PooledCollector, deltas, token_scores
from octavo.errors import InvalidRequest, OctavoError
from octavo.loaded import LoadedModel, Messages
from octavo.lower import Pooling, lowered, lowered_beam, lowered_pooling, params_of_each
from octavo.messages import iter_conversations
from octavo.options import check_choice
from octavo.prompts import Prompts, TokenizedPrompt, tokenized_prompts
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.shown import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from octavo._octavo import Delta, Inbox, RequestParams
    from octavo.messages import Tool
    from octavo.outputs import BeamSearchOutput, EmbeddingOutput, RequestOutput, TokenScores

C = TypeVar("C", bound=Collecting)
T = TypeVar("T")


class LLM(LoadedModel):
    """A loaded model. Its methods may be called from several threads at once, and each call gets its own outputs.

    Ctrl-C during a call ends that call's requests and raises `KeyboardInterrupt`; the object stays usable, and nothing
    of the interrupted call remains in it. A process that was forked from the one that made the object cannot use it.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`. A text is only text:
        what looks like a control token in it is none. `sampling_params` is one for all or one for each; without it the
        checkpoint's recommendation counts. If one prompt is wrong, none is queued.
        """
        return self._generate(self._tokenized(prompts), sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template.

        A message is `{"role": ..., "content": ...}`; a content is a text or a list of text parts, which are joined with
        a newline. An assistant's message may have `tool_calls`, and `None` as its content then; a tool's message may
        have a `tool_call_id`. `tools` are what the template is to tell the model of, as OpenAI's clients describe them.
        With `continue_final_message`, and `add_generation_prompt=False`, the model goes on with the last message.
        Control tokens come from the template alone: one that is spelled in a message or a tool is text.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._generate(self._rendered(iter_conversations(messages), options), sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | Sequence[BeamSearchParams], *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt; the outputs are in the order of the prompts.

        `params` is one for all or one for each. The beams of a prompt share the KV blocks of what they have in common.
        """
        read = self._tokenized(prompts)
        each = [params] * len(read) if isinstance(params, BeamSearchParams) else params
        if not isinstance(each, Sequence) or len(each) != len(read):
            raise InvalidRequest(f"params: found {shown(params)}, expected a BeamSearchParams, or one for each prompt")
        found = self._run(
            read,
            [lowered_beam(one, core=self._core) for one in each],
            lambda index, request, _: BeamCollector(read[index], str(request), self._tokenizer),
            use_tqdm=use_tqdm,
        )
        return [collector.output() for collector in found]

    def score_tokens(self, prompts: Prompts, *, logprobs: int = 0, use_tqdm: bool = True) -> list[TokenScores]:
        """The log-probability of each token of each prompt, given those before it: what evaluation needs.

        Each position also tells this many likeliest tokens; -1 is the whole vocabulary. A prompt must leave room for a
        token in the context. Nothing is drawn that anyone sees.
        """
        most = self._core.vocab_size
        logprobs = integer("logprobs", logprobs, f"an integer from -1 to {most}", -1, most)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=logprobs, detokenize=False)
        outputs = self._generate(self._tokenized(prompts), params, use_tqdm=use_tqdm)
        return [_succeeded(token_scores(output), index) for index, output in enumerate(outputs)]

    def embed(
        self, prompts: Prompts, *, pooling: Pooling = "last", normalize: bool = True, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """Each prompt as a vector: the hidden state of its last token after the last norm, or the mean of all of them.

        With `normalize` a vector has length 1.
        """
        check_choice("pooling", pooling, "last", "mean")
        flag("normalize", normalize)
        read = self._tokenized(prompts)
        core_params = [lowered_pooling(pooling, core=self._core)] * len(read)
        found = self._run(
            read,
            core_params,
            lambda index, request, _: PooledCollector(read[index], str(request)),
            use_tqdm=use_tqdm,
        )
        return [_succeeded(each.output(normalize=normalize), index) for index, each in enumerate(found)]

    def stream(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> OutputStream:
        """Continue each prompt and give out what each step adds, as it comes.

        Wrong input is refused by the call itself. Closing the iterator, or dropping it, ends the requests.
        """
        return self._stream(self._tokenized(prompts), sampling_params)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> OutputStream:
        """Answer as `chat` does, and give out what each step adds, as it comes."""
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._stream(self._rendered(iter_conversations(messages), options), sampling_params)

    def __enter__(self) -> LLM:
        """Close at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # Private

    def _tokenized(self, prompts: object) -> list[TokenizedPrompt]:
        self._check_usable()
        return tokenized_prompts(prompts, tokenizer=self._tokenizer, vocab_size=self._core.vocab_size)

    def _generate(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = params_of_each(sampling_params, default=self._defaults, count=len(prompts))

        def collector(index: int, request: int, seed: int) -> Collector:
            return Collector(prompts[index], str(request), seed, params=params[index])

        collectors = self._run(prompts, lowered(params, core=self._core), collector, use_tqdm=use_tqdm)
        return [each.output() for each in collectors]

    def _run(
        self,
        prompts: list[TokenizedPrompt],
        core_params: list[RequestParams],
        collector: Callable[[int, int, int], C],
        *,
        use_tqdm: bool,
    ) -> list[C]:
        """Run all prompts to their ends; `collector` is made from a prompt's index and its request's id and seed."""
        with ExitStack() as cleanup:
            inbox = self._open_inbox(cleanup)
            accepted = self._core.submit(inbox, [prompt.token_ids for prompt in prompts], core_params)
            collectors = {request: collector(index, request, seed) for index, (request, seed) in enumerate(accepted)}
            progress = cleanup.enter_context(_Progress(len(prompts))) if use_tqdm else None
            for delta in deltas(inbox, len(collectors)):
                collectors[delta.request].add(delta)
                if progress is not None:
                    progress.add(delta)
            return list(collectors.values())

    def _stream(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> OutputStream:
        params = params_of_each(sampling_params, default=self._defaults, count=len(prompts))
        core_params = lowered(params, core=self._core)
        self._check_usable()
        inbox = self._core.inbox()
        accepted = self._core.submit(inbox, [prompt.token_ids for prompt in prompts], core_params)
        return OutputStream(inbox, {request: index for index, (request, _) in enumerate(accepted)})

    def _open_inbox(self, cleanup: ExitStack) -> Inbox:
        """An inbox whose requests end with the call, however that ends."""
        self._check_usable()
        inbox = self._core.inbox()
        cleanup.callback(inbox.abort)
        return inbox


def _succeeded(found: T | None, index: int) -> T:
    """What was computed for a prompt, or the error that it could not be."""
    if found is None:
        raise OctavoError(f"prompt {index}: the model gave no finite numbers")
    return found


class _Progress:
    """A bar over requests, with the rate of generated tokens."""

    def __init__(self, total: int) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._started = time.monotonic()
        self._tokens = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, delta: Delta) -> None:
        self._tokens += len(delta.token_ids)
        if delta.last:
            rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
            self._bar.set_postfix_str(f"output: {rate:.1f} tok/s", refresh=False)
            self._bar.update()
