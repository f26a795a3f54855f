"""Two turns of a conversation, with the model's own chat template.

Run: python examples/chat.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
params = SamplingParams(temperature=0, max_tokens=32)

with LLM(model, kv_cache_memory_bytes=64 << 20) as llm:
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"{question} {answer}")
