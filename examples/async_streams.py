"""Stream to several tasks of one event loop; each leaves when its first sentence is there.

Run: python examples/async_streams.py [MODEL]
"""

import asyncio
import sys

from octavo import AsyncLLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompts = ["The capital of France is", "The capital of Italy is", "The colour of the sky is"]


async def first_sentence(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64)):
        text = output.outputs[0].text  # all of it so far
        if "." in text:
            break  # takes the request back
    return prompt + text.partition(".")[0] + "."


async def main() -> None:
    async with AsyncLLM(model, kv_cache_memory_bytes=64 << 20) as llm:
        for sentence in await asyncio.gather(*[first_sentence(llm, prompt) for prompt in prompts]):
            print(sentence)


asyncio.run(main())
