"""A reader of CTranslate2's binary model format, version 6, in which Whisper's weights come as a package.

The format, little-endian: u32 version, string spec, u32 revision, u32 count of variables; per variable string name, u8 rank, u32 dims,
u8 type, u32 bytes, data; then u32 count of aliases, each two strings. A string is a u16 length, its closing zero included, and its bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zendaya.errors import CheckpointError

VERSION = 6
_TYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("i1"), 2: np.dtype("<i2"), 3: np.dtype("<i4"), 4: np.dtype("<f2")}


def read_pinned(path: Path, sha256: str) -> bytes:
    """The bytes of a file, whose SHA-256 must be the given one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if (got := hashlib.sha256(data).hexdigest()) != sha256:
        raise CheckpointError(f"{path}: damaged or of another version: expected sha256 {sha256}: got {got}; install the package again")
    return data


def read_variables(data: bytes, path: Path) -> dict[str, Tensor]:
    """Every variable of a model.bin as a tensor, fp16 widened to fp32; `path` is for error messages."""
    reader = _Reader(data, path)
    version, spec = reader.number("I"), reader.string()
    if version != VERSION:
        raise CheckpointError(f"{path}: expected CTranslate2 format {VERSION}: got {version} ({spec!r})")
    reader.number("I")
    variables = dict(reader.variable() for _ in range(reader.number("I")))
    for _ in range(reader.number("I")):
        alias, name = reader.string(), reader.string()
        if name not in variables:
            raise CheckpointError(f"{path}: alias {alias!r} names no variable: {name!r}")
        variables[alias] = variables[name]
    return variables


class _Reader:
    """A cursor over the file's bytes; reading past their end is a CheckpointError."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.data, self.path, self.place = data, path, 0

    def take(self, count: int) -> bytes:
        if self.place + count > len(self.data):
            raise CheckpointError(
                f"{self.path}: cut short: expected {count} bytes at byte {self.place} of {len(self.data)}; install the package again"
            )
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

    def string(self) -> str:
        try:
            return self.take(self.number("H"))[:-1].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: damaged: a name before byte {self.place} is not text") from None

    def variable(self) -> tuple[str, Tensor]:
        name = self.string()
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind, count = self.number("B"), self.number("I")
        dtype = _TYPES.get(kind)
        if dtype is None or count != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{self.path}: damaged: {name!r} has shape {shape} and type {kind}, but {count} bytes")
        values = np.frombuffer(self.take(count), dtype).reshape(shape)
        return name, torch.from_numpy(values.astype(np.float32) if dtype.kind == "f" else values.copy())


def whisper_state(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """CTranslate2's variables as the state dict of transformers' Whisper: fused projections split, zero key biases dropped."""
    state = {
        "model.encoder.embed_positions.weight": variables["encoder/position_encodings/encodings"],
        "model.decoder.embed_positions.weight": variables["decoder/position_encodings/encodings"],
        "model.decoder.embed_tokens.weight": variables["decoder/embeddings/weight"],
    }

    def affine(theirs: str, ours: str, weight: str = "weight", bias: str = "bias") -> None:
        state[f"{ours}.weight"], state[f"{ours}.bias"] = variables[f"{theirs}/{weight}"], variables[f"{theirs}/{bias}"]

    def norm(theirs: str, ours: str) -> None:
        affine(f"{theirs}/layer_norm", ours, "gamma", "beta")

    def split(theirs: str, ours: str, names: tuple[str, ...]) -> None:
        weights, biases = (variables[f"{theirs}/{part}"].chunk(len(names)) for part in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            state[f"{ours}.{name}_proj.weight"] = weight.contiguous()
            if name != "k":
                state[f"{ours}.{name}_proj.bias"] = bias.contiguous()

    for side in ("encoder", "decoder"):
        norm(side, f"model.{side}.layer_norm")
        num_layers = len({name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_") and name.count("/") > 2})
        for index in range(num_layers):
            theirs, ours = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            norm(f"{theirs}/self_attention", f"{ours}.self_attn_layer_norm")
            split(f"{theirs}/self_attention/linear_0", f"{ours}.self_attn", ("q", "k", "v"))
            affine(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{theirs}/attention", f"{ours}.encoder_attn_layer_norm")
                split(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn", ("q",))
                split(f"{theirs}/attention/linear_1", f"{ours}.encoder_attn", ("k", "v"))
                affine(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
            norm(f"{theirs}/ffn", f"{ours}.final_layer_norm")
            affine(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            affine(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
    for index in (1, 2):
        affine(f"encoder/conv{index}", f"model.encoder.conv{index}")
    return state
