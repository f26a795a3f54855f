"""`LLM`: a model in this process, for many prompts at a time."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from octavo.chat_template import iter_conversations
from octavo.collect import Collector, OutputStream, deltas
from octavo.loaded import LoadedModel, Messages
from octavo.lower import lowered, params_of_each
from octavo.prompts import Prompts, TokenizedPrompt, tokenized_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from octavo._octavo import Delta, Inbox
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams


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
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template.

        A message is `{"role": ..., "content": ...}`; a content is a text or a list of text parts, which are joined with
        a newline. Control tokens come from the template alone: one that is spelled in a message is text.
        """
        prompts = self._rendered(
            iter_conversations(messages), add_generation_prompt, chat_template, chat_template_kwargs
        )
        return self._generate(prompts, sampling_params, use_tqdm=use_tqdm)

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
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> OutputStream:
        """Answer as `chat` does, and give out what each step adds, as it comes."""
        prompts = self._rendered(
            iter_conversations(messages), add_generation_prompt, chat_template, chat_template_kwargs
        )
        return self._stream(prompts, sampling_params)

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
        with ExitStack() as cleanup:
            inbox = self._open_inbox(cleanup)
            accepted = self._core.submit(
                inbox, [prompt.token_ids for prompt in prompts], lowered(params, vocab_size=self._core.vocab_size)
            )
            collectors = {
                request: Collector(prompt, str(request), seed, num_choices=one.n)
                for prompt, one, (request, seed) in zip(prompts, params, accepted, strict=True)
            }
            progress = cleanup.enter_context(_Progress(len(prompts))) if use_tqdm else None
            for delta in deltas(inbox, len(collectors)):
                collectors[delta.request].add(delta)
                if progress is not None:
                    progress.add(delta)
            return [collector.output() for collector in collectors.values()]

    def _stream(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> OutputStream:
        params = params_of_each(sampling_params, default=self._defaults, count=len(prompts))
        self._check_usable()
        inbox = self._core.inbox()
        accepted = self._core.submit(
            inbox, [prompt.token_ids for prompt in prompts], lowered(params, vocab_size=self._core.vocab_size)
        )
        return OutputStream(inbox, {request: index for index, (request, _) in enumerate(accepted)})

    def _open_inbox(self, cleanup: ExitStack) -> Inbox:
        """An inbox whose requests end with the call, however that ends."""
        self._check_usable()
        inbox = self._core.inbox()
        cleanup.callback(inbox.abort)
        return inbox


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
