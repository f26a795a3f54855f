"""Draw a text, then draw the very same text again, inside a batch of others.

Run: python examples/repeat.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompt = "A good name for a cat is"

with LLM(model, kv_cache_memory_bytes=64 << 20) as llm:
    [first] = llm.generate(prompt, SamplingParams(max_tokens=24), use_tqdm=False)
    print(f"seed {first.seed}:{first.outputs[0].text}")

    prompts = ["Dogs are", prompt, "Fish are"]
    params = [SamplingParams(max_tokens=24, seed=seed) for seed in (1, first.seed, 2)]
    again = llm.generate(prompts, params, use_tqdm=False)[1]
    print(f"seed {again.seed}:{again.outputs[0].text}")
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
