"""What `LLM` is made with: options, checkpoints, templates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from calls import assert_alive
from octavo import LLM, InvalidRequest, ModelLoadError, OctavoError


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *[
            ({name: 0}, f"{name}: found 0, expected an integer from 1")
            for name in ("threads", "block_size", "max_num_seqs")
        ],
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens: found True"),
        ({"num_kv_blocks": 1.5}, r"num_kv_blocks: found 1\.5"),
        ({"seed": -1}, "seed: found -1"),
        ({"max_model_len": 1025}, "max_model_len: found 1025, expected from 2 to the model's context length, 1024"),
        ({"max_model_len": 1}, "max_model_len: found 1, expected an integer from 2 to"),
        ({"threads": 10**5000}, "threads: found an integer of 16610 bits, expected an integer from 1 to 1024"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes: found 100, expected at least"),
        ({"kv_cache_memory_bytes": 10**6, "num_kv_blocks": 4}, "kv_cache_memory_bytes and num_kv_blocks: found both"),
        ({"dtype": "float16"}, "dtype: found 'float16', expected 'auto' or 'bfloat16'"),
        ({"dtype": "bfloat16"}, "dtype: found 'bfloat16', expected 'auto': the reference computes"),
        ({"int16_activations": "head"}, "int16_activations: found 'head', expected a list of some of 'qkv', 'output'"),
        ({"int16_activations": ["up"]}, "int16_activations: found 'up' among them, expected some of 'qkv', 'output'"),
        ({"int16_activations": [[]]}, r"int16_activations: found \[\] among them, expected some of"),
        ({"int16_activations": ["head"], "dtype": "bfloat16"}, r"int16_activations: found \['head'\] with dtype 'bf"),
        ({"int16_activations": ["head"]}, r"int16_activations: found \['head'\], expected none: the reference"),
        ({"device": "tpu"}, "device: found 'tpu', expected 'auto' or 'cpu' or 'cuda' or 'reference'"),
        ({"device": None}, "device: found None, expected"),
        ({"served_model_name": 5}, "served_model_name: found 5, expected a text"),
        ({"generation_config": "x"}, "generation_config: found 'x'"),
        ({"quantization": "awq"}, "quantization is not available yet in this version: found 'awq', expected None"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is not available yet .* found {'method"),
        ({"scheduling_policy": "fair"}, "scheduling_policy is not available yet .* found 'fair', expected 'fcfs'"),
        ({"kv_cache_dtype": np.zeros(2)}, "kv_cache_dtype: found array"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: found 'fp8', expected 'auto' or 'bfloat16' or 'int8'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: found 'int8', expected 'auto': the reference keeps"),
        ({"scheduler": "static"}, "scheduler is not available yet .* expected 'continuous'"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching: found 0, expected True or False"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching: found None, expected True or False"),
        ({"chat_template": "{% for %}"}, "chat template, line 1"),
        ({"chat_template": ""}, "chat_template: found '', expected a template or the file"),
        ({"chat_template": 5}, "chat_template: found 5, expected a template or the file"),
        ({"chat_template": "~no-such-user/a"}, "chat_template: found '~no-such-user/a', expected a path"),
        ({"tokenizer": 5}, "tokenizer: found 5, expected a path or a model's name"),
        ({"tokenizer": ""}, "tokenizer: found '', expected a path or a model's name"),
    ],
)
def test_a_wrong_option_is_refused_by_name(tiny_folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        LLM(tiny_folder, **{"device": "reference", **options})


def test_options_of_later_versions_are_taken_where_they_ask_for_nothing(successor_folder: Path) -> None:
    options: dict[str, Any] = {
        "quantization": None,
        "speculative_config": None,
        "scheduling_policy": "fcfs",
        "scheduler": "continuous",
    }
    with LLM(successor_folder, device="reference", max_model_len=64, **options) as llm:
        assert_alive(llm)


def test_an_unknown_option_is_refused_by_name(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(tiny_folder, gpu_memory_utilization=0.9)


def test_a_model_too_large_for_the_memory_is_refused_with_numbers(tiny_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"memory: weights \d+ \+ KV cache \d+ .* exceed the limit"):
        LLM(tiny_folder, device="reference", kv_cache_memory_bytes=2**50)


def test_a_checkpoint_that_is_broken_is_refused_by_file(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.random_weights())
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(OctavoError, match=r"model\.safetensors"):
            LLM(folder, device="reference")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"safetensors"):
        LLM(folder, device="reference")


@pytest.mark.parametrize("length", [0, 3, 8, 24, 1000, 9 * 98362432 // 10, 98362431])
def test_a_gguf_file_cut_short_is_an_ordinary_error(smollm2_file: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_file.open("rb") as whole:
        cut.write_bytes(whole.read(length))
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        LLM(cut)


def test_a_chat_template_can_be_given_as_text_or_as_a_file(tiny_folder: Path, tmp_path: Path) -> None:
    source = "{{ messages[0].content }}!"
    file = tmp_path / "template.jinja"
    file.write_text(source)
    for given in (source, file, str(file)):
        with LLM(tiny_folder, device="reference", max_model_len=64, chat_template=given) as llm:
            assert llm.render_chat([{"role": "user", "content": "x"}])[0]["prompt"] == "x!"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LLM(tiny_folder, device="reference", chat_template="nowhere.jinja")
