"""What the engine must agree with: an independent Llama in numpy, in double precision, and the definition of a draw."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def logits(weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any], tokens: Sequence[int]) -> Array:
    """The logits after each of `tokens`: `[len(tokens), vocab_size]`."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    hidden = w["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = {name.split(f"layers.{layer}.")[1]: value for name, value in w.items() if f"layers.{layer}." in name}
        normed = _norm(hidden, at["input_layernorm.weight"], config["rms_norm_eps"])
        hidden = hidden + _attention(normed, at, config)
        normed = _norm(hidden, at["post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate = normed @ at["mlp.gate_proj.weight"].T
        up = normed @ at["mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj.weight"].T
    return _norm(hidden, w["model.norm.weight"], config["rms_norm_eps"]) @ w["lm_head.weight"].T


def log_softmax(row: Array) -> Array:
    """Natural log-probabilities."""
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def _norm(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def _attention(x: Array, at: Mapping[str, Array], config: Mapping[str, Any]) -> Array:
    length, heads, kv_heads = len(x), config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads

    def split(name: str, count: int) -> Array:
        return (x @ at[f"self_attn.{name}_proj.weight"].T).reshape(length, count, size)

    query, key = _rotated(split("q", heads), config), _rotated(split("k", kv_heads), config)
    value = split("v", kv_heads)
    output = np.zeros((length, heads, size))
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, shared].T / np.sqrt(size)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        output[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ value[:, shared]
    return output.reshape(length, heads * size) @ at["self_attn.o_proj.weight"].T


def _rotated(x: Array, config: Mapping[str, Any]) -> Array:
    """Halves of a head are paired (Su et al., 2021, in the layout of Hugging Face)."""
    half = x.shape[-1] // 2
    frequencies = config["rope_theta"] ** (-np.arange(half) / half)
    angles = np.arange(len(x))[:, None, None] * frequencies
    low, high = x[..., :half], x[..., half:]
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], -1
    )


def scores(row: Array, *, temperature: float, seed: int, position: int) -> Array:
    """What the drawn token is the largest of: scaled logits plus noise."""
    return (row - row.max()) / temperature + noise(seed, position, len(row))


def noise(seed: int, position: int, count: int) -> Array:
    """Gumbel noise from the counter-based Philox4x32-10 (Salmon et al., SC'11)."""
    token = np.arange(count, dtype=np.uint64)
    block = (token >> np.uint64(6)) * np.uint64(16) + (token & np.uint64(15))
    words = _philox([block, np.full_like(block, position), np.zeros_like(block), np.full_like(block, 0x53414D50)], seed)
    hashes = np.choose(((token >> np.uint64(4)) & np.uint64(3)).astype(np.int64), words).astype(np.float64)
    return -np.log(-np.log1p(-(hashes + 0.5) / 2**32))


def _philox(counter: list[NDArray[np.uint64]], seed: int) -> list[NDArray[np.uint64]]:
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> shift) ^ counter[1] ^ np.uint64(keys[0]),
            second & mask,
            (first >> shift) ^ counter[3] ^ np.uint64(keys[1]),
            first & mask,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter
