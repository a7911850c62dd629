"""Decoders of other libraries for `zendaya bench --peers`, with the same shape and random weights.

Hugging Face generate and CTranslate2 run a T5 decoder of that shape. Its encoder runs at most once per decode, and drops out in the
difference of a long and a short decode. ONNX Runtime runs this library's decoder, exported as one step that takes and returns keys
and values.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zendaya.errors import MissingExtraError
from zendaya.nn.decoder import Decoder, TextLayer
from zendaya.nn.presets import preset
from zendaya.research.bench import DecodeSteps, Plan, torch_threads


def peers_of(plan: Plan, batch: int) -> dict[str, DecodeSteps]:
    """Every peer, ready to decode a batch; a package that is not installed is a MissingExtraError."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        return {**_t5_peers(plan, batch, Path(folder)), **_onnx_peers(plan, batch, Path(folder))}


def _needed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, None, "bench --peers") from None


def _t5_peers(plan: Plan, batch: int, folder: Path) -> dict[str, DecodeSteps]:
    transformers, ctranslate2, tokenizers = _needed("transformers"), _needed("ctranslate2"), _needed("tokenizers")
    _needed("ctranslate2.converters")
    shape = preset(plan.preset).decoder
    torch.manual_seed(plan.seed)
    config = transformers.T5Config(
        vocab_size=shape.vocab_size, d_model=shape.dim, d_kv=shape.head_dim, d_ff=shape.ffn_dim, num_heads=shape.heads,
        num_layers=shape.layers, num_decoder_layers=shape.layers, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, shape.vocab_size)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>", eos_token="</s>", pad_token="<pad>",
    )  # fmt: skip
    model.save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    encoded = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.randn(batch, plan.source, shape.dim))

    def generate(steps: int) -> object:
        with torch.inference_mode(), torch_threads(plan.threads):
            return model.generate(encoder_outputs=encoded, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, num_beams=1)

    found: dict[str, DecodeSteps] = {"Hugging Face generate": generate}
    ctranslate2.converters.TransformersConverter(str(folder / "t5")).convert(str(folder / "ct2"))
    sources = [[f"w{3 + (7 * i + b) % (shape.vocab_size - 3)}" for i in range(plan.source)] for b in range(batch)]
    for kind in ("float32", "int8"):
        translator = ctranslate2.Translator(str(folder / "ct2"), compute_type=kind, inter_threads=1, intra_threads=plan.threads)

        def translate(steps: int, translator: Any = translator) -> object:
            return translator.translate_batch(sources, beam_size=1, min_decoding_length=steps, max_decoding_length=steps, max_batch_size=0)

        found[f"CTranslate2 {kind}"] = translate
    return found


class CachedStep(nn.Module):
    """One decode step as a graph: keys and values of text and source go in; logits and the longer keys and values come out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids_B1: Tensor, row: Tensor, *keys_values: Tensor) -> tuple[Tensor, ...]:
        """`keys_values` are (B, A, T, K): key and value of the text of each layer, then those of the source."""
        decoder, grown = self.decoder, list[Tensor]()
        text, cross = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        x_B1D = decoder.tokens(ids_B1) + decoder.positions(row)
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, TextLayer)

            def attend_self(attention: Any, x: Tensor, index: int = index) -> Tensor:
                pair = [torch.cat([text[2 * index + i], new], 2) for i, new in enumerate(attention.keys_values(x))]
                grown.extend(pair)
                return _attend(attention, x, *pair)

            def attend_cross(attention: Any, x: Tensor, index: int = index) -> Tensor:
                return _attend(attention, x, cross[2 * index], cross[2 * index + 1])

            x_B1D = layer(x_B1D, attend_self, attend_cross)
        return decoder.project(x_B1D[:, -1]), *grown


def _attend(attention: Any, x: Tensor, k_BATK: Tensor, v_BATK: Tensor) -> Tensor:
    """As `Attention.forward`, in operations that export well: PyTorch's function exports as one that scales every key in every step."""
    q_BATK = attention._split(attention.query(x)) * k_BATK.shape[-1] ** -0.5
    joined: Tensor = attention._join((q_BATK @ k_BATK.transpose(-1, -2)).softmax(-1) @ v_BATK)
    return joined


def _onnx_peers(plan: Plan, batch: int, folder: Path) -> dict[str, DecodeSteps]:
    onnxruntime, _ = _needed("onnxruntime"), _needed("onnx")
    quantization = _needed("onnxruntime.quantization")
    shape = preset(plan.preset).decoder
    torch.manual_seed(plan.seed)
    step = CachedStep(Decoder(shape)).eval()
    parts = [f"{part}{layer}" for layer in range(shape.layers) for part in ("key", "value")]
    text, longer, cross = ([f"{kind}_{part}" for part in parts] for kind in ("text", "longer", "cross"))
    rows = [torch.zeros(batch, shape.heads, 3, shape.head_dim) for _ in parts]
    memory = [torch.randn(batch, shape.heads, plan.source, shape.head_dim) for _ in parts]
    path, tidy, rough = folder / "step.onnx", folder / "tidy.onnx", folder / "int8.onnx"
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        torch.onnx.export(
            step, (torch.ones(batch, 1, dtype=torch.long), torch.tensor([3]), *rows, *memory), str(path),
            input_names=["ids", "row", *text, *cross], output_names=["logits", *longer],
            dynamic_axes={**{name: {2: "rows"} for name in text}, **{name: {2: "more"} for name in longer}}, dynamo=False,
        )  # fmt: skip
        _needed("onnxruntime.quantization.shape_inference").quant_pre_process(str(path), str(tidy))
        quantization.quantize_dynamic(str(tidy), str(rough), weight_type=quantization.QuantType.QInt8)
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    found: dict[str, DecodeSteps] = {}
    for kind, file in (("float32", path), ("int8", rough)):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = plan.threads, 1
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        source = [value(tensor.numpy()) for tensor in memory]

        def decode(steps: int, session: Any = session, source: Any = source) -> object:
            ids, kept = np.ones((batch, 1), np.int64), [value(np.zeros((batch, shape.heads, 0, shape.head_dim), np.float32)) for _ in parts]
            binding = session.io_binding()
            for name, given in zip(cross, source, strict=True):  # once per decode: no step copies the source
                binding.bind_ortvalue_input(name, given)
            for row in range(steps):
                for name, given in zip(("ids", "row", *text), (value(ids), value(np.array([row])), *kept), strict=True):
                    binding.bind_ortvalue_input(name, given)
                binding.clear_binding_outputs()
                for name in ("logits", *longer):
                    binding.bind_output(name)
                session.run_with_iobinding(binding)
                logits, *kept = binding.get_outputs()  # they go in again unchanged
                ids = logits.numpy().argmax(-1)[:, None]
            return ids

        found[f"ONNX Runtime {kind}"] = decode
    return found
