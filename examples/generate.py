"""Continue two prompts at once.

Run: python examples/generate.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompts = ["The capital of France is", "Two and two make"]

with LLM(model, kv_cache_memory_bytes=64 << 20) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{output.prompt}{output.outputs[0].text}")
