"""Small Llamas in safetensors, written byte by byte: random ones, and ones whose next token is known in advance."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[np.float32]
DTYPES = {"float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "uint32": ("I32", "<u4")}

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 64, 2, 4, 2, 128, 512
END_OF_TEXT, IM_START, IM_END = 509, 510, 511
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}


def random_weights(seed: int = 0) -> dict[str, Array]:
    """Weights large enough that attention and MLP matter, under the names of Hugging Face."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (generator.standard_normal((rows, columns)) / np.sqrt(columns) * 1.5).astype(np.float32)

    def norm() -> Array:
        return (1 + 0.2 * generator.standard_normal(HIDDEN)).astype(np.float32)

    head_size = HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 4, "model.norm.weight": norm()}
    weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = norm()
        weights[at + "self_attn.q_proj.weight"] = matrix(HIDDEN, HIDDEN)
        weights[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * head_size, HIDDEN)
        weights[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * head_size, HIDDEN)
        weights[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        weights[at + "post_attention_layernorm.weight"] = norm()
        weights[at + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[at + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[at + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return weights


def successor_weights() -> dict[str, Array]:
    """Token t is always followed by t + 1: the layers add nothing, and the head's row t + 1 is the embedding of t."""
    weights = random_weights(1)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    embedding = weights["model.embed_tokens.weight"]
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    weights["lm_head.weight"] = np.roll(embedding, 1, axis=0).copy()
    return weights


def spelled(pieces: Sequence[bytes]) -> list[str]:
    """Bytes as a byte-level vocabulary writes them (Radford et al., 2019)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    alphabet = {byte: chr(byte) for byte in kept} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return ["".join(alphabet[byte] for byte in piece) for piece in pieces]


def tokenizer(first_pieces: Sequence[bytes] = ()) -> Tokenizer:
    """Byte-level: `first_pieces` from id 0 on, then the bytes not among them; the last three are control tokens."""
    pieces = spelled([*first_pieces, *(bytes([byte]) for byte in range(256) if bytes([byte]) not in first_pieces)])
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    vocabulary |= {f"<unused{at}>": at for at in range(len(vocabulary), END_OF_TEXT)}
    controls = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
    built = Tokenizer(models.BPE(vocab=vocabulary | controls, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    return built


def write(
    folder: Path,
    weights: Mapping[str, NDArray[Any]],
    *,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    first_pieces: Sequence[bytes] = (),
) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(config or {})))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    tokenizer(first_pieces).save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "model.safetensors").write_bytes(safetensors(weights))
    return folder


def safetensors(weights: Mapping[str, NDArray[Any]]) -> bytes:
    """The format: the header's length in 8 bytes, the header in JSON, the data."""
    header: dict[str, Any] = {}
    data = b""
    for name, weight in weights.items():
        dtype, stored = DTYPES[weight.dtype.name]
        content = np.ascontiguousarray(weight, stored).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data
