"""What the stories of requests say about speed, by hand."""

import pytest

from octavo import CompletionOutput, RequestMetrics, RequestOutput
from octavo.bench.latency import Latency, Series
from octavo.bench.timings import timings


def story(*, prompt: int, tokens: int, arrival: float, scheduled: float, first: float, last: float) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[0] * tokens,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length",
        stop_reason=None,
    )
    metrics = RequestMetrics(
        arrival_time=arrival,
        scheduled_time=scheduled,
        first_token_time=first,
        last_token_time=last,
        chunks=1,
        preemptions=0,
        cached_tokens=0,
        first_differing_token=None,
    )
    return RequestOutput(
        request_id="0",
        seed=0,
        prompt=None,
        prompt_token_ids=[0] * prompt,
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
        metrics=metrics,
        num_cached_tokens=0,
    )


def test_one_request_is_timed_by_its_own_story() -> None:
    output = story(prompt=100, tokens=11, arrival=1.0, scheduled=1.5, first=2.0, last=4.0)
    assert timings([output]) == {"ttft_s": 1.0, "prefill_tok_s": 200.0, "decode_tok_s": 5.0}


def test_several_requests_are_timed_over_the_span_of_all() -> None:
    early = story(prompt=30, tokens=6, arrival=0.0, scheduled=0.0, first=1.0, last=5.0)
    late = story(prompt=70, tokens=16, arrival=0.0, scheduled=1.0, first=2.0, last=6.0)
    assert timings([early, late]) == {"ttft_s": 1.5, "prefill_tok_s": 50.0, "decode_tok_s": 4.0}


def test_a_single_token_has_no_decode_rate() -> None:
    output = story(prompt=8, tokens=1, arrival=0.0, scheduled=0.0, first=1.0, last=1.0)
    assert timings([output])["decode_tok_s"] == 0.0


def test_shares_compare_medians_with_the_limits_of_the_machine() -> None:
    latency = Latency(
        ttft_s=Series((1.0,)),
        prefill_tok_s=Series((100.0, 500.0, 200.0)),
        decode_tok_s=Series((90.0, 100.0, 120.0)),
        read_gb_s=Series((20.0,)),
        reread_gb_s=Series((40.0,)),
        dot_gops=Series((400.0,)),
        kernel_gops=Series((200.0,)),
        bytes_per_token=100_000_000,
        products_per_token=250_000_000,
    )
    assert latency.decode_share_of_memory() == pytest.approx(0.5)
    assert latency.decode_share() == pytest.approx(0.25)
    assert latency.prefill_share() == pytest.approx(0.25)
    assert latency.prefill_share_of_kernels() == pytest.approx(0.5)
    report = latency.as_dict()
    assert (report["prefill_tok_s_min"], report["prefill_tok_s"], report["prefill_tok_s_max"]) == (100.0, 200.0, 500.0)
