"""`octavo export` and `octavo tokenizer export`, against other people's readers of what went in and what came out."""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer

import reference
import tiny
from octavo import LLM, InvalidRequest, ModelLoadError
from octavo._octavo import Tokenizer as OctavoTokenizer
from octavo.export import export_model, export_tokenizer

LINES: list[str] = json.loads((Path(__file__).parent / "data" / "tokenizer_lines.json").read_text())
FOLDER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
MODEL_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def folder_name(name: str) -> str:
    """What a Hugging Face folder calls a tensor of a GGUF file."""
    place = name.removesuffix(".weight")
    if place in ENDS:
        return f"{ENDS[place]}.weight"
    _, layer, part = place.split(".")
    return f"model.layers.{layer}.{FOLDER_NAMES[part]}.weight"


def file_name(name: str) -> str:
    """The inverse of `folder_name`."""
    ends = {there: here for here, there in ENDS.items()}
    place = name.removesuffix(".weight")
    if place in ends:
        return f"{ends[place]}.weight"
    _, _, layer, part = place.split(".", 3)
    return f"blk.{layer}.{next(here for here, there in FOLDER_NAMES.items() if there == part)}.weight"


def halves(matrix: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows 0, 2, 4, ... of each head, then rows 1, 3, 5, ...: by a list of indices, one at a time."""
    size = len(matrix) // heads
    order = [head * size + row for head in range(heads) for row in [*range(0, size, 2), *range(1, size, 2)]]
    return matrix[order]


def pairs(matrix: NDArray[Any], heads: int) -> NDArray[Any]:
    """The inverse of `halves`."""
    size = len(matrix) // heads
    order = [head * size + row // 2 + row % 2 * (size // 2) for head in range(heads) for row in range(size)]
    return matrix[order]


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of finite values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def stored(path: Path) -> dict[str, NDArray[np.uint16]]:
    """The bits of each tensor of a safetensors file, all of which must be BF16 and fill the file in order."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    data = content[8 + length :]
    tensors, filled = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: int(item[1]["data_offsets"][0])):
        begin, end = entry["data_offsets"]
        assert (entry["dtype"], begin) == ("BF16", filled)
        tensors[name] = np.frombuffer(data[begin:end], "<u2").reshape(entry["shape"])
        filled = end
    assert filled == len(data)
    return tensors


def expected_of(model: Path, heads: int, kv_heads: int) -> dict[str, NDArray[np.uint16]]:
    """What the gguf package reads from a file, as a folder should have it."""
    tensors = {}
    for tensor in GGUFReader(model).tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            values = halves(values, heads if "attn_q" in tensor.name else kv_heads)
        tensors[folder_name(tensor.name)] = bfloat16(values)
    return tensors


def assert_same_tensors(found: Mapping[str, NDArray[np.uint16]], expected: Mapping[str, NDArray[np.uint16]]) -> None:
    """Bit for bit, but for the sign of zeros: a code of 0 with a negative scale is -0 to some and 0 to others."""
    assert sorted(found) == sorted(expected)
    for name, bits in expected.items():
        differs = (found[name] != bits) & ((found[name] | bits) != 0x8000)
        assert found[name].shape == bits.shape, name
        assert not differs.any(), f"{name}: {differs.sum()} of {differs.size} differ"


def write_gguf(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    divisors: Sequence[float] | None = None,
    fields: Mapping[str, Any] | None = None,
    base: float = 10000.0,
) -> Path:
    """The tests' random Llama as a GGUF file with the bytes as vocabulary, by the gguf package."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_block_count(tiny.LAYERS)
    writer.add_embedding_length(tiny.HIDDEN)
    writer.add_feed_forward_length(tiny.INTERMEDIATE)
    writer.add_head_count(tiny.HEADS)
    writer.add_head_count_kv(tiny.KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(base)
    writer.add_vocab_size(tiny.VOCAB)
    built = json.loads(tiny.tokenizer().to_str())
    vocabulary = built["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if at >= tiny.END_OF_TEXT else 1 for at in range(len(tokens))])
    writer.add_token_merges([])
    writer.add_bos_token_id(tiny.END_OF_TEXT)
    writer.add_eos_token_id(tiny.IM_END)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    for key, value in (fields or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value)
        else:
            writer.add_float32(key, value)
    for name, weight in tiny.random_weights().items():
        if "q_proj" in name or "k_proj" in name:
            weight = pairs(weight, tiny.HEADS if "q_proj" in name else tiny.KV_HEADS)
        if weight.ndim == 1:
            writer.add_tensor(file_name(name), weight)
        else:
            writer.add_tensor(file_name(name), quantize(weight, kind), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def octavo(*words: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", *words]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=before, check=False)


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "smollm2"
    outcome = octavo("export", "smollm2-135m", "-o", str(folder))
    assert outcome.returncode == 0, outcome.stderr
    assert [line.split()[1] for line in outcome.stdout.splitlines()] == [str(folder / name) for name in MODEL_FILES]
    return folder


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_weights_of_smollm2_are_those_that_the_gguf_package_reads_rounded(
    smollm2_file: Path, smollm2_folder: Path
) -> None:
    assert_same_tensors(stored(smollm2_folder / "model.safetensors"), expected_of(smollm2_file, 9, 3))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_weights_of_every_format_are_those_that_the_gguf_package_reads_rounded(tmp_path: Path, kind: str) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    export_model(model, tmp_path / "out")
    found = stored(tmp_path / "out" / "model.safetensors")
    assert_same_tensors(found, expected_of(model, tiny.HEADS, tiny.KV_HEADS))


def test_rows_of_queries_and_keys_are_back_where_the_model_had_them(gguf_file: Path, tmp_path: Path) -> None:
    export_model(gguf_file, tmp_path / "out")
    expected = {name: bfloat16(weight) for name, weight in tiny.random_weights().items()}
    assert_same_tensors(stored(tmp_path / "out" / "model.safetensors"), expected)


def test_a_folder_gives_its_own_weights_rounded_and_its_own_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    files = export_model(tiny_folder, tmp_path / "out")
    assert [path.name for path in files] == MODEL_FILES
    expected = {name: bfloat16(weight) for name, weight in tiny.random_weights().items()}
    assert_same_tensors(stored(tmp_path / "out" / "model.safetensors"), expected)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_folder / name).read_bytes()


def test_the_configuration_of_smollm2_is_that_of_its_makers(smollm2_folder: Path) -> None:
    found = read_json(smollm2_folder / "config.json")
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192}
    heads = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    numbers = {"rms_norm_eps": 1e-5, "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2}
    published = sizes | heads | kind | numbers | {"torch_dtype": "bfloat16"}
    assert {name: found[name] for name in published} == published
    assert "rope_scaling" not in found


def test_the_file_and_its_folder_give_the_same_probabilities(tmp_path: Path) -> None:
    """But for the norms, which are rounded: another Llama on the folder's weights, octavo on both."""
    model = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.BF16)
    export_model(model, tmp_path / "out")
    bits = stored(tmp_path / "out" / "model.safetensors")
    weights = {name: (found.astype(np.uint32) << 16).view(np.float32) for name, found in bits.items()}
    prompt = [5, 250, 17, 99, 4, 180]
    logits = reference.logits(weights, read_json(tmp_path / "out" / "config.json"), prompt)
    expected = [reference.log_softmax(row)[token] for row, token in zip(logits, prompt[1:], strict=False)]
    for path, tolerance in ((tmp_path / "out", 1e-4), (model, 0.1)):
        with LLM(path, device="reference", max_model_len=64, num_kv_blocks=16) as llm:
            [scores] = llm.score_tokens([prompt])
        np.testing.assert_allclose(np.array(scores.logprobs[1:], float), expected, atol=tolerance, err_msg=str(path))


def test_tokens_of_200_lines_are_the_same_in_the_tokenizers_package(smollm2: LLM, smollm2_folder: Path) -> None:
    theirs = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    ours = OctavoTokenizer.from_file(smollm2_folder / "tokenizer.json")
    # As octavo reads text from outside.
    theirs.encode_special_tokens = True
    for line in LINES:
        ids = smollm2.encode(line)
        assert theirs.encode(line).ids == ids, line
        assert ours.encode(line) == ids, line
        assert theirs.decode(ids) == line
    theirs.encode_special_tokens = False
    assert theirs.encode("<|im_start|>user").ids == [1, 4093]
    assert ours.control_tokens == smollm2.get_tokenizer().control_tokens


def test_special_tokens_and_template_are_those_of_the_file(smollm2_file: Path, smollm2_folder: Path) -> None:
    fields = GGUFReader(smollm2_file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    found = read_json(smollm2_folder / "tokenizer_config.json")
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        assert found[f"{name}_token"] == tokens[fields[f"tokenizer.ggml.{field}_token_id"].contents()]
    assert found["chat_template"] == fields["tokenizer.chat_template"].contents()
    assert found["model_max_length"] == 8192


def test_tokens_around_each_text_are_added_in_the_tokenizers_package_too(tmp_path: Path) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    export_tokenizer(write_gguf(tmp_path / "tiny.gguf", fields=flags), tmp_path / "out")
    theirs = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    inner = theirs.encode("ab", add_special_tokens=False).ids
    expected = [tiny.END_OF_TEXT, *inner, tiny.IM_END]
    assert len(inner) == 2
    assert theirs.encode("ab").ids == expected
    assert theirs.encode("ab", "ab").ids == expected * 2
    assert OctavoTokenizer.from_file(tmp_path / "out" / "tokenizer.json").encode("ab") == expected


def test_the_tokenizer_alone_is_the_same_two_files(smollm2_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    outcome = octavo("tokenizer", "export", "smollm2-135m", "--output", str(folder))
    assert outcome.returncode == 0, outcome.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    for path in folder.iterdir():
        assert path.read_bytes() == (smollm2_folder / path.name).read_bytes()


def test_a_recommendation_is_one_to_sample(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_p": 0.9, "general.sampling.top_k": 20}
    export_model(write_gguf(tmp_path / "tiny.gguf", fields=sampling), tmp_path / "out")
    found = read_json(tmp_path / "out" / "generation_config.json")
    ids = {"bos_token_id": tiny.END_OF_TEXT, "eos_token_id": tiny.IM_END}
    assert found == ids | {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}


def llama3_divisors(factor: float, low: float, high: float, length: float, base: float) -> list[float]:
    """By wavelengths, as Llama 3.1 states the rule."""
    half = tiny.HIDDEN // tiny.HEADS // 2
    divisors = []
    for pair in range(half):
        wavelength = 2 * math.pi * base ** (pair / half)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama_3_become_its_rule(tmp_path: Path, factor: float) -> None:
    divisors = llama3_divisors(factor, 1, 4, 8192, 500000.0)
    export_model(write_gguf(tmp_path / "tiny.gguf", divisors=divisors, base=500000.0), tmp_path / "out")
    found = read_json(tmp_path / "out" / "config.json")["rope_scaling"]
    rule = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert found == rule | {"factor": factor, "original_max_position_embeddings": 8192}


def test_other_divisors_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    divisors = llama3_divisors(8, 1, 4, 4096, 500000.0)
    model = write_gguf(tmp_path / "tiny.gguf", divisors=divisors, base=500000.0)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: divisors .*: found .*factor 8.*expected none"):
        export_model(model, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [model]


def test_linear_scaling_is_named(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", fields={"llama.rope.scaling.factor": 4.0})
    export_model(model, tmp_path / "out")
    found = read_json(tmp_path / "out" / "config.json")["rope_scaling"]
    assert found == {"rope_type": "linear", "factor": 4.0}


def test_an_empty_folder_is_filled(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_tokenizer(gguf_file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_a_target_that_is_taken_is_refused_and_left_alone(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    outcome = octavo("export", str(gguf_file), "-o", str(tmp_path / "out"))
    assert outcome.returncode == 2
    assert f"{tmp_path / 'out'}: found a folder with notes.txt in it, expected an empty folder" in outcome.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    with pytest.raises(InvalidRequest, match=r"tiny\.gguf: found a file, expected an empty folder"):
        export_model(gguf_file, gguf_file)
    with pytest.raises(InvalidRequest, match="nowhere: found no such folder, expected the one to make out in"):
        export_model(gguf_file, tmp_path / "nowhere" / "out")
    with pytest.raises(InvalidRequest, match="output: found '', expected the path of a folder"):
        export_model(gguf_file, "")


def test_a_file_that_is_cut_short_is_refused_and_nothing_is_left(gguf_file: Path, tmp_path: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: .*found .* bytes, expected"):
        export_model(gguf_file, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [gguf_file]


def test_a_disk_that_refuses_is_named_and_nothing_is_left(gguf_file: Path, tmp_path: Path) -> None:
    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    outcome = octavo("export", str(gguf_file), "-o", str(tmp_path / "out"), before=small_files_only)
    assert outcome.returncode == 1
    assert "model.safetensors: " in outcome.stderr
    assert "File too large" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == [gguf_file]


def test_a_vocabulary_that_is_not_known_is_refused_with_the_path_of_its_file(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    model.write_bytes(model.read_bytes().replace(b"smollm", b"llamas"))
    with pytest.raises(ModelLoadError, match=r'tiny\.gguf: tokenizer\.ggml\.pre: found "llamas", expected'):
        export_tokenizer(model, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [model]


def test_a_model_without_a_tokenizer_is_exported_without_one(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "tiny", tiny.random_weights())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="tiny: tokenizer: found none, expected"):
        export_tokenizer(folder, tmp_path / "out")
    assert [path.name for path in export_model(folder, tmp_path / "out")] == MODEL_FILES[:3]
