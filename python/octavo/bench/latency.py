"""One stream: prefill of 512 tokens, and decode of 128 after 32, beside the limits of the machine.

Decode reads all weights for each token, so memory bandwidth bounds it. Prefill reads them once for 512 tokens, so
arithmetic bounds it. The limits move with whatever else the machine does; they are measured in turn with the model, so
that all of them see the same minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from octavo.bench.timings import timings

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo import LLM, RequestOutput
    from octavo.prompts import TokensPrompt

PREFILL_TOKENS = 512
DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 128


@dataclass(frozen=True)
class Series:
    """The repeats of one measurement."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the repeats."""
        return median(self.values)

    def __str__(self) -> str:
        return f"{self.median:10.4g}  [{min(self.values):.4g} to {max(self.values):.4g}]"


@dataclass(frozen=True, kw_only=True)
class Latency:
    """What was measured, and what is needed to compare it with the limits."""

    ttft_s: Series
    """Seconds from submitting 512 tokens to the first token."""
    prefill_tok_s: Series
    decode_tok_s: Series
    read_gb_s: Series
    """Read bandwidth of memory, 1e9 bytes per second."""
    reread_gb_s: Series
    """Read bandwidth over as many bytes as the weights, again and again: a large cache keeps part of them."""
    dot_gops: Series
    """Peak of int8 dot products, 1e9 multiplications and additions per second."""
    kernel_gops: Series
    """Rate of the kernels for the layers' weights while these are cached."""
    bytes_per_token: int
    """Weights read for a decoded token."""
    products_per_token: int
    """Weights of the layers that a prompt token is multiplied with."""

    def decode_share(self) -> float:
        """Decode as a share of what re-reading the weights allows: the higher of the two limits."""
        return self.decode_tok_s.median / self.decode_limit(self.reread_gb_s)

    def decode_share_of_memory(self) -> float:
        """Decode as a share of what memory allows; above 1 where a cache keeps part of the weights."""
        return self.decode_tok_s.median / self.decode_limit(self.read_gb_s)

    def decode_limit(self, bandwidth: Series) -> float:
        """Tokens per second at which the weights pass by at `bandwidth`."""
        return bandwidth.median * 1e9 / self.bytes_per_token

    def prefill_share(self) -> float:
        """Prefill as a share of the dot-product peak."""
        return self.prefill_tok_s.median * 2 * self.products_per_token / (self.dot_gops.median * 1e9)

    def prefill_share_of_kernels(self) -> float:
        """Prefill as a share of what the kernels for the layers' weights do."""
        return self.prefill_tok_s.median * 2 * self.products_per_token / (self.kernel_gops.median * 1e9)

    def as_dict(self) -> dict[str, float]:
        """Each median under its name, with `_min` and `_max` beside it."""
        figures = {}
        for name in ("ttft_s", "prefill_tok_s", "decode_tok_s", "read_gb_s", "reread_gb_s", "dot_gops", "kernel_gops"):
            series: Series = getattr(self, name)
            figures[name] = series.median
            figures[f"{name}_min"] = min(series.values)
            figures[f"{name}_max"] = max(series.values)
        figures["decode_share_of_read_limit"] = self.decode_share_of_memory()
        figures["decode_share_of_reread_limit"] = self.decode_share()
        figures["prefill_share_of_dot_peak"] = self.prefill_share()
        figures["prefill_share_of_kernels"] = self.prefill_share_of_kernels()
        return figures


def measure(llm: LLM, *, repeats: int, report: Callable[[str], None] = lambda _: None) -> Latency:
    """Measure `repeats` times in turn, after a run of each that does not count."""
    from octavo.doctor import dot_peak, read_bandwidth

    text = llm.encode(_TEXT)
    names = ("ttft", "prefill", "decode", "read", "reread", "dot", "kernel")
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        read = read_bandwidth(llm.threads)
        reread = read_bandwidth(llm.threads, llm.memory["bytes_per_token"])
        ttft, prefill = _prefill(llm, _prompt(text, turn, PREFILL_TOKENS))
        decode = _decode(llm, _prompt(text, turn, DECODE_PROMPT_TOKENS))
        dot, kernel = dot_peak(llm.threads), llm.measure_product_rate()
        if turn == 0:
            continue
        report(f"{turn}/{repeats}: prefill {prefill:.0f} tok/s, decode {decode:.1f} tok/s")
        for name, value in zip(found, (ttft, prefill, decode, read, reread, dot, kernel), strict=True):
            found[name].append(value)
    return Latency(
        ttft_s=Series(tuple(found["ttft"])),
        prefill_tok_s=Series(tuple(found["prefill"])),
        decode_tok_s=Series(tuple(found["decode"])),
        read_gb_s=Series(tuple(found["read"])),
        reread_gb_s=Series(tuple(found["reread"])),
        dot_gops=Series(tuple(found["dot"])),
        kernel_gops=Series(tuple(found["kernel"])),
        bytes_per_token=llm.memory["bytes_per_token"],
        products_per_token=llm.memory["layer_weights"],
    )


_TEXT = """A sheet of paper that is folded once gives two leaves, and a book made of such sheets is a folio. Folded
again it gives four, and the book is a quarto; folded a third time it gives eight leaves and sixteen pages, and the book
is an octavo. The size of the page follows from the size of the sheet, so that two octavos need not be alike."""


def _prompt(text: list[int], turn: int, length: int) -> TokensPrompt:
    """`length` tokens of running text that begin elsewhere each turn."""
    return {"prompt_token_ids": [text[(turn + index) % len(text)] for index in range(length)]}


def _prefill(llm: LLM, prompt: TokensPrompt) -> tuple[float, float]:
    """Seconds to the first token, and prompt tokens per second."""
    output = _generate(llm, prompt, tokens=1)
    rates = timings([output])
    return rates["ttft_s"], rates["prefill_tok_s"]


def _decode(llm: LLM, prompt: TokensPrompt) -> float:
    """Tokens per second after the first."""
    return timings([_generate(llm, prompt, tokens=1 + DECODE_TOKENS)])["decode_tok_s"]


def _generate(llm: LLM, prompt: TokensPrompt, *, tokens: int) -> RequestOutput:
    from octavo import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output
