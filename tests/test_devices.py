"""The choice of a device where there is no GPU that this build can use: it is made without kernels."""

import logging
import re
from pathlib import Path

import pytest

from octavo import LLM
from octavo.devices import NoGpu, cuda_library_folders, probe_cuda
from octavo.errors import InvalidRequest, ModelLoadError


def missing() -> NoGpu:
    found = probe_cuda()
    assert isinstance(found, NoGpu)
    return found


def test_what_is_missing_for_a_gpu_is_named() -> None:
    expected = "this build has no CUDA kernels" if missing().has_driver else "libcuda.so.1"
    assert expected in missing().missing


def test_the_device_cuda_says_what_is_missing(tiny_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"^device cuda: {re.escape(missing().missing)}"):
        LLM(tiny_folder, device="cuda")


def test_auto_takes_the_cpu_and_says_so_in_one_line(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"), LLM(tiny_folder, max_model_len=64, num_kv_blocks=16) as llm:
        assert llm.device == "cpu"
    [record] = [record for record in caplog.records if record.name == "octavo"]
    assert record.getMessage() == f"device auto: the CPU, since there is {missing().missing}"
    assert record.levelno == (logging.WARNING if missing().has_driver else logging.INFO)


def test_an_unknown_device_is_refused_with_the_choices(tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="device: found 'tpu', expected 'auto' or 'cpu' or 'cuda' or 'reference'"):
        LLM(tiny_folder, device="tpu")  # type: ignore[arg-type]


def test_libraries_are_looked_for_where_nvidias_wheels_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cublas", "cuda_runtime"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cublas" / "include").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = [Path(folder) for folder in cuda_library_folders()]
    assert [tmp_path / "nvidia" / name / "lib" for name in ("cublas", "cuda_runtime")] == [
        folder for folder in found if tmp_path in folder.parents
    ]
