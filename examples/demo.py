"""Answer eight chats at once, streaming each straight from the engine, and say how fast that was.

Run: python examples/demo.py [MODEL]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.layout import Layout

    from octavo import EngineMetrics, RequestMetrics

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "Give me three tips for learning to cook.",
    "What is the difference between a star and a planet?",
    "Suggest a name for a small bookshop and say why.",
    "How does a bicycle stay upright?",
    "Tell me a short story about a lighthouse keeper.",
]
KV_POOL_BYTES = 64 << 20
ROWS, COLUMNS = 4, 2


@dataclass
class Chat:
    """A question, as much of its answer as there is, and its story once it has ended."""

    question: str
    answer: str = ""
    num_tokens: int = 0
    story: RequestMetrics | None = None


@dataclass
class Show:
    """The chats, and how they are shown while the answers come."""

    chats: list[Chat] = field(default_factory=lambda: [Chat(question) for question in QUESTIONS])

    def run(self, llm: LLM, params: SamplingParams) -> None:
        """Stream all answers to the terminal, or to whatever stdout is."""
        arrivals = self._arrivals(llm, params)
        if sys.stdout.isatty():
            self._show_panes(arrivals)
        else:
            self._print_finished(arrivals)

    def _arrivals(self, llm: LLM, params: SamplingParams) -> Iterator[Chat]:
        """Each chat that has gained something, as it gains it."""
        conversations = [[{"role": "user", "content": chat.question}] for chat in self.chats]
        for delta in llm.stream_chat(conversations, params):
            chat = self.chats[delta.index]
            chat.answer += delta.text
            chat.num_tokens += len(delta.token_ids)
            chat.story = delta.metrics
            yield chat

    def _print_finished(self, arrivals: Iterator[Chat]) -> None:
        for chat in arrivals:
            if chat.story is not None:
                print(f"> {chat.question}\n{chat.answer.strip()}\n", flush=True)

    def _show_panes(self, arrivals: Iterator[Chat]) -> None:
        from rich.live import Live

        with Live(self._panes(), refresh_per_second=20) as live:
            for _ in arrivals:
                live.update(self._panes())

    def _panes(self) -> Layout:
        """A pane a chat, which shows the end of its answer."""
        from rich.console import Console
        from rich.layout import Layout
        from rich.panel import Panel
        from rich.text import Text

        console = Console()
        height = max(console.height - 2, ROWS * 3)
        inner_width, inner_height = console.width // COLUMNS - 4, height // ROWS - 2
        panes = []
        for chat in self.chats:
            lines = Text(chat.answer.strip()).wrap(console, max(inner_width, 8))[-inner_height:]
            style = "green" if chat.story is not None else "dim"
            panes.append(Layout(Panel(Text("\n").join(lines), title=chat.question, border_style=style)))
        layout = Layout(size=height)
        rows = [Layout() for _ in range(ROWS)]
        for index, row in enumerate(rows):
            row.split_row(*panes[index * COLUMNS : (index + 1) * COLUMNS])
        layout.split_column(*rows)
        return layout


def table(chats: list[Chat], metrics: EngineMetrics) -> list[tuple[str, str]]:
    """What it took, from the stories of the requests and the counts of the engine."""
    stories = [chat.story for chat in chats if chat.story is not None]
    scheduled = [story.scheduled_time for story in stories if story.scheduled_time is not None]
    firsts = [story.first_token_time for story in stories if story.first_token_time is not None]
    lasts = [story.last_token_time for story in stories if story.last_token_time is not None]
    waits = [story.time_to_first_token for story in stories if story.time_to_first_token is not None]
    prefill = metrics.prompt_tokens / (max(firsts) - min(scheduled))
    decode = (metrics.generation_tokens - len(chats)) / (max(lasts) - min(firsts))
    return [
        ("time to first token", f"{sum(waits) / len(waits) * 1000:.0f} ms (mean of {len(waits)})"),
        ("prefill", f"{prefill:.0f} tok/s ({metrics.prompt_tokens} tokens)"),
        ("decode", f"{decode:.0f} tok/s ({metrics.generation_tokens} tokens, {len(chats)} chats at once)"),
        ("KV blocks used", f"{metrics.kv_blocks_peak} of {metrics.kv_blocks_total}"),
        ("KV waste", f"{metrics.kv_waste_mean:.1%} of the slots in those blocks"),
        ("peak memory", f"{peak_memory_kib() / 1024:.0f} MiB"),
    ]


def peak_memory_kib() -> int:
    """Of this program alone: what `getrusage` counts begins with the program that started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Load, answer, report."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    with LLM(model, kv_cache_memory_bytes=KV_POOL_BYTES) as llm:
        show = Show()
        show.run(llm, SamplingParams(temperature=0.6, top_p=0.9, seed=8, max_tokens=128))
        for name, value in table(show.chats, llm.get_metrics()):
            print(f"{name:<20} {value}")


if __name__ == "__main__":
    main()
