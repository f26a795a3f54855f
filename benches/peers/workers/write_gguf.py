"""Writes a GGUF file in another format, from the exact values of its weights. Runs where `gguf` is installed."""

from __future__ import annotations

import argparse

import gguf
import numpy as np

HEAD = "token_embd.weight"


def write(source: str, weights: str, output: str) -> None:
    """Matrices get the format, vectors float32; the embedding, which is the head too, stays Q8_0 beside Q4_0."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = value.types[0]
        writer.add_key_value(name, value.contents(), kind, value.types[-1] if len(value.types) > 1 else None)
    wanted = gguf.GGMLQuantizationType[weights]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if weights == "Q4_0" and tensor.name == HEAD else wanted
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--format", required=True, choices=["Q4_0", "Q8_0", "BF16"])
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    write(arguments.model, arguments.format, arguments.output)
