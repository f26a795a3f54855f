"""What `LLM` and `AsyncLLM` have in common: a model, its tokenizer and templates, and the engine that runs it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from octavo.chat_template import ChatOptions, ChatTemplate
from octavo.devices import Device, chosen_device
from octavo.errors import EngineDeadError, InvalidRequest
from octavo.messages import Conversation, Tool, checked_messages, iter_conversations
from octavo.models import resolve
from octavo.options import (
    ActivationType,
    KvCacheType,
    Projection,
    check_choice,
    checked_engine_options,
    refuse_others,
    template_source,
    tokenizer_file,
)
from octavo.outputs import BlockState, EngineMetrics
from octavo.prompts import TokenizedPrompt, TokensPrompt, checked_token_ids
from octavo.sampling_params import SamplingParams
from octavo.shown import shown

if TYPE_CHECKING:
    from octavo._octavo import Core, EngineOptions, Tokenizer

Messages: TypeAlias = Conversation | Sequence[Conversation]


class LoadedModel:
    """A model in this process. A process that was forked from the one that made the object cannot use it."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: ActivationType = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        device: Device = "auto",
        threads: int | None = None,
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        num_kv_blocks: int | None = None,
        kv_cache_dtype: KvCacheType = "auto",
        int16_activations: Sequence[Projection] | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        chat_template: str | os.PathLike[str] | None = None,
        generation_config: Literal["auto", "octavo"] = "auto",
        served_model_name: str | None = None,
        **other_options: object,
    ) -> None:
        """Load `model`: a GGUF file, a Hugging Face folder, a hub id in the local cache, or a bundled name.

        `max_model_len` bounds prompt and output together (default: the model's context). The KV pool's size is given in
        bytes or in blocks of `block_size` tokens; without either it holds at least one longest request. Its elements
        are bfloat16; with `kv_cache_dtype="int8"` they are bytes, with a scale for each token and head, in half the
        memory. `dtype="bfloat16"` multiplies quantised weights in bfloat16 rather than in 8-bit integers;
        `int16_activations` names the projections with quantised weights whose inputs keep 16 bits instead: "qkv",
        "output", "gate_up", "down", "head".
        `generation_config="octavo"` ignores the sampling that the checkpoint recommends. `chat_template` is a
        template's text, or the file that holds it. With `enable_prefix_caching`, requests that begin alike share KV
        blocks, also with earlier ones.
        """
        self._closed = True
        self._process = os.getpid()
        # A signal that interrupts `close` may call it again.
        self._closing = threading.RLock()
        refuse_others(other_options)
        options = checked_engine_options(
            threads=threads,
            seed=seed,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_kv_blocks=num_kv_blocks,
            kv_cache_dtype=kv_cache_dtype,
            dtype=dtype,
            int16_activations=int16_activations,
            enable_prefix_caching=enable_prefix_caching,
        )
        check_choice("device", device, "auto", "cpu", "cuda", "reference")
        device = chosen_device(device)
        _check_device_options(device, options)
        check_choice("generation_config", generation_config, "auto", "octavo")
        if served_model_name is not None and not isinstance(served_model_name, str):
            raise InvalidRequest(f"served_model_name: found {shown(served_model_name)}, expected a text")
        own_template = None if chat_template is None else ChatTemplate(template_source(chat_template))
        path = resolve(model)
        from octavo._octavo import Core

        self._core: Core = Core(path, device=device, tokenizer=tokenizer_file(tokenizer), options=options)
        self._closed = False
        self._chat_template = own_template
        self._tokenizer = self._core.tokenizer
        self._defaults = self._recommended() if generation_config == "auto" else SamplingParams()
        self.served_model_name = served_model_name or os.fspath(model)
        """The name under which the model is known to callers."""
        self._prepare()

    def default_sampling_params(self) -> SamplingParams:
        """The parameters that count where none are given."""
        return self._defaults

    # Text

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that `chat` would use, one for each conversation."""
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = self._rendered(iter_conversations(messages), options)
        return [{"prompt": prompt.text or "", "prompt_token_ids": prompt.token_ids} for prompt in prompts]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of `text`; what spells a control token becomes one only with `parse_special`."""
        if not isinstance(text, str):
            raise InvalidRequest(f"text: found {type(text).__name__}, expected a text")
        try:
            return self.get_tokenizer().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text: found a lone surrogate at {error.start}, expected Unicode text") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        ids = checked_token_ids(token_ids, where="token_ids", vocab_size=self._core.vocab_size)
        return self.get_tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer itself; may be used from several threads at once."""
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer; give one with tokenizer=...")
        return self._tokenizer

    # The engine

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._core.max_model_len

    @property
    def device(self) -> Literal["cpu", "cuda", "reference"]:
        """Where it computes."""
        return self._core.device

    @property
    def threads(self) -> int:
        """Threads of the host that compute."""
        return self._core.threads

    @property
    def memory(self) -> dict[str, int]:
        """Bytes taken at load, and what one token needs of them.

        `weight_bytes` (as stored), `kv_bytes` and `arena_bytes` (for the largest step) are taken at load. A token keeps
        `kv_bytes_per_token`, reads `bytes_per_token` of weights when it is decoded, and is multiplied with
        `layer_weights` weights.
        """
        return self._core.memory

    def measure_product_rate(self) -> float:
        """Measure the kernels of the layers' widest matrices on the CPU, on `threads` threads, in Gop/s; two a product.

        The weights are cached meanwhile: it is what they allow where memory does not matter, as in prefill.
        """
        self._check_usable()
        return self._core.measure_product_rate()

    def get_metrics(self) -> EngineMetrics:
        """A snapshot of the engine as of the end of its current step."""
        self._check_usable()
        return EngineMetrics.of(self._core.stats())

    def reset_prefix_cache(self) -> int:
        """Forget what the prefix cache holds; returns the number of KV blocks that could have been found.

        Requests that run keep their blocks. Whatever is submitted later computes its whole prompt.
        """
        self._check_usable()
        return self._core.reset_prefix_cache()

    def block_map(self) -> list[list[BlockState]]:
        """Every KV block of each layer group, as of the end of the engine's current step."""
        self._check_usable()
        return [[BlockState(*block) for block in group] for group in self._core.block_map()]

    def close(self) -> None:
        """End the engine and give its memory back; whoever still waits gets `EngineDeadError`. May be called again.

        Whoever calls it gets it done: a second thread waits for the first.
        """
        if self._process != os.getpid():
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                self._core.close()

    # Private

    def _prepare(self) -> None:
        """Whatever a subclass keeps besides."""

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineDeadError(f"this {type(self).__name__} is closed")
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise EngineDeadError(
                f"this {type(self).__name__} belongs to process {self._process} and this is its fork {os.getpid()}: "
                "make one here instead"
            )

    def _recommended(self) -> SamplingParams:
        """The checkpoint's recommendation over octavo's defaults, as far as it can be followed."""
        found = dict(self._core.generation_defaults)
        if found.pop("do_sample", True) is False:
            found = {"temperature": 0.0}
        try:
            return SamplingParams(**cast("dict[str, Any]", found))
        except InvalidRequest as error:
            self.close()
            raise InvalidRequest(
                f"the checkpoint's generation config: {error}; generation_config='octavo' ignores it"
            ) from None

    def _rendered(self, conversations: Iterable[tuple[str, object]], options: ChatOptions) -> list[TokenizedPrompt]:
        """The prompt of each conversation, which comes with the name that messages of error give it."""
        self._check_usable()
        tokenizer = self.get_tokenizer()
        template = self._template(options.chat_template)
        variables = {
            "bos_token": self._token(self._core.bos_token_id),
            "eos_token": self._token(*self._core.eos_token_ids),
        }
        checked = [checked_messages(conversation, where=where) for where, conversation in conversations]
        prompts = []
        for conversation in checked:
            rendered = template.render(conversation, tokenizer=tokenizer, options=options, variables=variables)
            ids = tokenizer.encode_marked(rendered.marked, rendered.marker)
            prompts.append(TokenizedPrompt(rendered.text, ids))
        return prompts

    def _template(self, given: str | None) -> ChatTemplate:
        if given is not None:
            return ChatTemplate(given)
        if self._chat_template is None:
            source = self._core.chat_template
            if source is None:
                raise InvalidRequest("the model has no chat template; give one with chat_template=...")
            self._chat_template = ChatTemplate(source)
        return self._chat_template

    def _token(self, *ids: int | None) -> str:
        """The spelling of the first id, for templates; empty where there is none."""
        known = [token for token in ids if token is not None]
        return (self.get_tokenizer().token(known[0]) or "") if known else ""


def _check_device_options(device: str, options: EngineOptions) -> None:
    """Refuse what a device cannot do."""
    reasons: dict[str, dict[str, tuple[tuple[object, ...], str]]] = {
        "reference": {
            "kv_cache_dtype": (("auto",), "the reference keeps 32-bit floats"),
            "dtype": (("auto",), "the reference computes in 32-bit floats"),
            "int16_activations": (([],), "the reference computes in 32-bit floats"),
        },
        "cuda": {
            "kv_cache_dtype": (("auto", "bfloat16"), "the device cuda keeps bfloat16"),
            "int16_activations": (([],), "the device cuda computes in bfloat16"),
        },
    }
    for name, (taken, reason) in reasons.get(device, {}).items():
        found = cast("dict[str, object]", options)[name]
        if found not in taken:
            expected = "none" if taken == ([],) else " or ".join(map(repr, taken))
            raise InvalidRequest(f"{name}: found {shown(found)}, expected {expected}: {reason}")
