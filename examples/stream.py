"""Read a text while it is generated, and leave when enough of it is there.

Run: python examples/stream.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

with LLM(model, kv_cache_memory_bytes=64 << 20) as llm:
    text = ""
    for delta in llm.stream("Once upon a time", SamplingParams(seed=1, max_tokens=200)):
        print(delta.text, end="", flush=True)
        text += delta.text
        if text.count(".") == 2:
            break  # takes the request back
    print()
