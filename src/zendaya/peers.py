"""Other decoders of the same shape for `zendaya bench --peers`: Hugging Face generate, CTranslate2, ONNX Runtime; random weights.

The shape (8 heads of 64 in a width of 768) is T5's, whose decoder the first two run in their own formats; its encoder is run once a
decode at most, which the difference of a long and a short decode takes out. ONNX Runtime runs this library's own decoder, exported as
a step with its keys and values going in and coming out.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zendaya.decoder import Decoder, TextLayer
from zendaya.errors import MissingExtraError
from zendaya.model import preset

if TYPE_CHECKING:
    from zendaya.bench import Decode, Plan


def peers_of(plan: Plan, batch: int) -> dict[str, Decode]:
    """Every peer that is installed, ready to decode a batch; one that is not is a MissingExtraError."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        return {**_t5_peers(plan, batch, Path(folder)), **_onnx_peers(plan, batch, Path(folder))}


def _needed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, None, "bench --peers") from None


def _t5_peers(plan: Plan, batch: int, folder: Path) -> dict[str, Decode]:
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
        torch.set_num_threads(plan.threads)
        with torch.inference_mode():
            return model.generate(encoder_outputs=encoded, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, num_beams=1)

    found: dict[str, Decode] = {"Hugging Face generate": generate}
    ctranslate2.converters.TransformersConverter(str(folder / "t5")).convert(str(folder / "ct2"))
    sources = [[f"w{3 + (7 * i + b) % (shape.vocab_size - 3)}" for i in range(plan.source)] for b in range(batch)]
    for kind in ("float32", "int8"):
        translator = ctranslate2.Translator(str(folder / "ct2"), compute_type=kind, inter_threads=1, intra_threads=plan.threads)

        def translate(steps: int, translator: Any = translator) -> object:
            return translator.translate_batch(sources, beam_size=1, min_decoding_length=steps, max_decoding_length=steps, max_batch_size=0)

        found[f"CTranslate2 {kind}"] = translate
    return found


class CachedStep(nn.Module):
    """One decode step as a graph: keys and values of text and source go in, logits and the longer keys and values come out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids_B1: Tensor, row: Tensor, text: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        """`text` and `cross` are (layers, 2, B, A, T, K)."""
        decoder = self.decoder
        x_B1D = decoder.tokens(ids_B1) + decoder.positions(row)
        grown = []
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, TextLayer)

            def attend_self(attention: Any, x: Tensor, index: int = index) -> Tensor:
                k, v = (torch.cat([text[index, i], new], 2) for i, new in enumerate(attention.keys_values(x)))
                grown.append(torch.stack([k, v]))
                return attention.forward(x, k, v)

            def attend_cross(attention: Any, x: Tensor, index: int = index) -> Tensor:
                return attention.forward(x, cross[index, 0], cross[index, 1])

            x_B1D = layer(x_B1D, attend_self, attend_cross)
        return decoder.project(x_B1D[:, -1]), torch.stack(grown)


def _onnx_peers(plan: Plan, batch: int, folder: Path) -> dict[str, Decode]:
    onnxruntime, _ = _needed("onnxruntime"), _needed("onnx")
    quantization = _needed("onnxruntime.quantization")
    shape = preset(plan.preset).decoder
    torch.manual_seed(plan.seed)
    step = CachedStep(Decoder(shape)).eval()
    text = torch.zeros(shape.layers, 2, batch, shape.heads, 3, shape.head_dim)
    cross = torch.randn(shape.layers, 2, batch, shape.heads, plan.source, shape.head_dim)
    path = folder / "step.onnx"
    names = ["ids", "row", "text", "cross"]
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        torch.onnx.export(
            step, (torch.ones(batch, 1, dtype=torch.long), torch.tensor([3]), text, cross), str(path), input_names=names,
            output_names=["logits", "longer"], dynamic_axes={"text": {4: "rows"}, "longer": {4: "more"}}, dynamo=False,
        )  # fmt: skip
        quantization.quantize_dynamic(str(path), str(folder / "int8.onnx"), weight_type=quantization.QuantType.QInt8)
    found: dict[str, Decode] = {}
    for kind, file in (("float32", path), ("int8", folder / "int8.onnx")):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = plan.threads, 1
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        source = onnxruntime.OrtValue.ortvalue_from_numpy(cross.numpy())

        def decode(steps: int, session: Any = session, source: Any = source) -> object:
            value = onnxruntime.OrtValue.ortvalue_from_numpy
            longer = value(np.zeros((shape.layers, 2, batch, shape.heads, 0, shape.head_dim), np.float32))
            ids = np.ones((batch, 1), np.int64)
            for row in range(steps):
                binding = session.io_binding()
                for name, given in (("ids", value(ids)), ("row", value(np.array([row]))), ("text", longer), ("cross", source)):
                    binding.bind_ortvalue_input(name, given)
                binding.bind_output("logits")
                binding.bind_output("longer")
                session.run_with_iobinding(binding)
                logits, longer = binding.get_outputs()
                ids = logits.numpy().argmax(-1)[:, None]
            return ids

        found[f"ONNX Runtime {kind}"] = decode
    return found
