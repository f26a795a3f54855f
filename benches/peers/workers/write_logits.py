"""Writes what an engine makes of token ids: a row of float32 for each position that another one follows.

A row holds logits or log-probabilities of the whole vocabulary. Runs in the environment of the engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = Any
Sequences = list[list[int]]


def transformers(model: str, threads: int, sequences: Sequences, options: dict[str, Any]) -> Iterator[Array]:
    """The reference: the file's weights dequantised to float32, and computed with in float32 throughout."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(threads)
    path = Path(model)
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
    # `from_pretrained` would do the same, but asks for another package.
    found = load_gguf_checkpoint(model, return_tensors=True, model_to_load=network)["tensors"]
    missing, unexpected = network.load_state_dict(found, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if set(missing) - set(tied) or unexpected:
        raise RuntimeError(f"{model}: found no {missing}, but {unexpected}; expected the tensors of its configuration")
    with torch.inference_mode():
        for tokens in sequences:
            yield network(torch.tensor([tokens])).logits[0, :-1].numpy()


def llama_cpp(model: str, threads: int, sequences: Sequences, options: dict[str, Any]) -> Iterator[Array]:
    """Each sequence is one batch."""
    import llama_cpp

    longest = max(map(len, sequences))
    kinds = {name: getattr(llama_cpp, f"GGML_TYPE_{options[name]}") for name in ("type_k", "type_v")}
    llama = llama_cpp.Llama(
        model,
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
        **options | kinds,
    )
    for tokens in sequences:
        llama.reset()
        llama.eval(tokens)
        yield llama.scores[: len(tokens) - 1]


def octavo(model: str, threads: int, sequences: Sequences, options: dict[str, Any]) -> Iterator[Array]:
    """Each position is a request of its own, so that one vocabulary at a time is Python objects."""
    import gc

    from octavo import LLM, SamplingParams

    # It would look at millions of objects, again and again.
    gc.disable()
    llm = LLM(model, threads=threads, **options)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True, detokenize=False)
    for tokens in sequences:
        prompts = [{"prompt_token_ids": tokens[:length]} for length in range(1, len(tokens))]
        rows: dict[int, Array] = {}
        for output in llm.stream(prompts, params):
            if not output.logprobs:
                raise RuntimeError(f"{model}: position {output.index}: found {output.finish_reason}, expected a token")
            [entries] = output.logprobs
            row = rows[output.index] = np.full(len(entries), np.nan, dtype=np.float32)
            row[list(entries)] = [entry.logprob for entry in entries.values()]
        found = np.stack([rows[index] for index in range(len(prompts))])
        # What is measured is what a prompt gets that is computed at once.
        [scores] = llm.score_tokens([{"prompt_token_ids": tokens}], use_tqdm=False)
        if found[range(len(prompts)), tokens[1:]].tolist() != scores.logprobs[1:]:
            raise RuntimeError(f"{model}: found other log-probabilities than those of score_tokens, expected the same")
        yield found


ENGINES = {"transformers": transformers, "llama.cpp": llama_cpp, "octavo": octavo}


def main() -> None:
    """Write the rows of all sequences, one after the other, as one array of numpy."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--engine", required=True, choices=list(ENGINES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--options", type=json.loads, required=True, help="JSON: what the engine is loaded with")
    parser.add_argument("--sequences", type=Path, required=True, help="JSON: lists of token ids")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    sequences = json.loads(arguments.sequences.read_text(encoding="utf-8"))
    rows = ENGINES[arguments.engine](arguments.model, arguments.threads, sequences, arguments.options)
    # llama.cpp gives out the same memory each time.
    np.save(arguments.output, np.concatenate([each.copy() for each in rows]))


if __name__ == "__main__":
    main()
