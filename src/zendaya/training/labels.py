"""Readable, timed transcripts for LibriSpeech, whose own are upper-case: Whisper's casing and punctuation on the reference's words.

Whisper writes down each utterance (whole, from `full` features); its words are aligned with the reference's; where they are the same,
Whisper's spelling stands, elsewhere the reference's word in Whisper's clothes. The times are where Whisper's cross-attention looks
when it is made to write the result.

Shape suffixes: B utterances, N text rows, T source tokens, D model width, A heads, K head width.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from zendaya.encoders.whisper import TOKEN
from zendaya.errors import CorpusError
from zendaya.files import write_atomically
from zendaya.nn.model import Model
from zendaya.nn.whisper import SAMPLE_RATE, has_bfloat16, load_encoder, load_weights, whisper_decoder
from zendaya.records import Progress
from zendaya.runtime.engine import Engine, engine_for
from zendaya.sources.media import Samples
from zendaya.training.whisper_batch import encode_batch, log_mel, mel_filters

ALIGNMENT_HEADS = ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4))
"""(layer, head) of tiny.en whose cross-attention follows the speech: openai/whisper, `_ALIGNMENT_HEADS`."""
SMOOTH = 7
"""Source tokens of the median filter over attention, as in openai/whisper's `find_alignment`."""
MAX_DISAGREEMENT = 0.4
"""Share of wrong words beyond which Whisper's text says nothing of the reference's punctuation, and the utterance is left out."""
SILENCE_S = 1.0
"""Silence after an utterance: Whisper was trained on recordings that end in it."""
SPELLINGS = {"mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "&": "and"}
"""What LibriSpeech spells out."""

Sound = npt.NDArray[np.int16]
"""Samples in 16 bits: a training holds hours of them."""


def floats(sound_S: Sound) -> Samples:
    """Samples as encoders hear them."""
    floats_S: Samples = sound_S.astype(np.float32) / np.float32(32768)
    return floats_S


@dataclass(frozen=True)
class Label:
    """One utterance to learn: its words as they should be read, each with the second it begins and the second it ends."""

    id: str
    words: tuple[tuple[str, float, float], ...]
    disagreement: float
    """Edits between Whisper's words and the reference's, a share of the reference."""

    @property
    def text(self) -> str:
        return " ".join(word for word, _, _ in self.words)


def read_labels(path: Path) -> dict[str, Label]:
    """Labels by id from the file `write_labels` wrote."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {r["id"]: Label(r["id"], tuple((str(w), float(a), float(b)) for w, a, b in r["words"]), r["disagreement"]) for r in records}
    except OSError as error:
        raise CorpusError(f"{path}: labels cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CorpusError(f"{path}: not a file of labels: expected lines with id, words and disagreement; make it again") from None


def write_labels(path: Path, labels: Sequence[Label]) -> None:
    """Keep labels in a file, one a line."""
    lines = [json.dumps({"id": label.id, "disagreement": round(label.disagreement, 4), "words": label.words}) + "\n" for label in labels]
    write_atomically(path, "".join(lines).encode())


def make_labels(
    path: Path, utterances: Sequence[tuple[str, Sound, str]], *, base: str = "tiny.en", batch: int = 16, rank: int = 0, ranks: int = 1,
    report: Callable[[Progress], None] = lambda _: None,
) -> None:  # fmt: skip
    """Label (id, samples, reference) in their order into a file, those where Whisper and the reference disagree wildly left out.

    Each batch is kept in a file of its own until all are there: stopped or killed, the work goes on where it was, and processes share it.
    """
    order = sorted(range(len(utterances)), key=lambda index: utterances[index][1].size)
    batches = [[utterances[index] for index in order[first : first + batch]] for first in range(0, len(order), batch)]
    folder = path.with_suffix(".parts")
    folder.mkdir(exist_ok=True)
    parts = [folder / f"{hashlib.sha256(' '.join(name for name, _, _ in each).encode()).hexdigest()[:16]}.jsonl" for each in batches]
    label = _labeller(base) if any(not part.is_file() for part in parts[rank::ranks]) else None
    for each, part in zip(batches[rank::ranks], parts[rank::ranks], strict=True):
        if label is not None and not part.is_file():
            write_labels(part, label(each))
        report(Progress(sum(part.is_file() for part in parts), len(parts), "labelling"))
    while rank and not path.is_file():
        time.sleep(0.2)  # the first process puts them together
    if not rank:
        while not all(part.is_file() for part in parts):
            time.sleep(0.2)
        found = {name: label for part in parts for name, label in read_labels(part).items()}
        write_labels(path, [found[name] for name, _, _ in utterances if name in found])
        shutil.rmtree(folder)


def _labeller(base: str) -> Callable[[Sequence[tuple[str, Sound, str]]], list[Label]]:
    """What labels a batch of utterances."""
    weights = load_weights(base)
    # Half precision: three times as fast where the processor has it, and casing and punctuation are all that is taken from it.
    dtype = torch.bfloat16 if has_bfloat16() else torch.float32
    encoder, engine = load_encoder(weights), engine_for(whisper_decoder(weights))
    model = whisper_decoder(weights).to(dtype)
    filters_CF = mel_filters(weights.config.num_mel_bins)
    silence_S = np.zeros(int(SILENCE_S * SAMPLE_RATE), np.float32)

    @torch.inference_mode()
    def label(utterances: Sequence[tuple[str, Sound, str]]) -> list[Label]:
        assert model.tokenizer is not None
        recordings = [np.concatenate([floats(sound_S), silence_S])[: 30 * SAMPLE_RATE] for _, sound_S, _ in utterances]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            source_BTD = encode_batch(encoder, log_mel(recordings, filters_CF, block=1, floor=None), block=None).to(dtype)
        heard = [model.tokenizer.decode(ids) for ids in _greedy(model, engine, source_BTD)]
        dressed = [dress(text, reference) for text, (_, _, reference) in zip(heard, utterances, strict=True)]
        times = _times(model, source_BTD, [words for words, _ in dressed])
        found = list[Label]()
        for (name, _, _), (words, disagreement), spans in zip(utterances, dressed, times, strict=True):
            if words and disagreement <= MAX_DISAGREEMENT:
                timed = tuple((word, round(a, 2), round(b, 2)) for word, (a, b) in zip(words, spans, strict=True))
                found.append(Label(name, timed, disagreement))
        return found

    return label


def _greedy(model: Model, engine: Engine, source_BTD: Tensor) -> list[list[int]]:
    """Whisper's own text of every utterance, in step."""
    frame, count = model.config.framing, source_BTD.shape[1]
    caches = [engine.start() for _ in source_BTD]
    engine.read_many(caches, list(source_BTD.float()))
    texts: list[list[int]] = [[] for _ in caches]
    going, rows = list(range(len(caches))), [list(frame.prompt)] * len(caches)
    for step in range(1, min(model.config.max_steps, 12 + count // 6) + 1):  # nobody says 8 tokens a second
        logits_BV = engine.rows([caches[n] for n in going], rows, [count] * len(going))
        logits_BV[:, list(frame.suppress)] = -torch.inf
        if step == 1:
            logits_BV[:, list(frame.suppress_first)] = -torch.inf
        chosen = dict(zip(going, logits_BV.argmax(-1).tolist(), strict=True))
        going = [n for n in going if chosen[n] != frame.end]
        for n in going:
            texts[n].append(chosen[n])
        if not going:
            break
        rows = [[chosen[n]] for n in going]
    return texts


# Text: Whisper's clothes on the reference's words.


def dress(heard: str, reference: str) -> tuple[list[str], float]:
    """The reference's words as Whisper would write them, and how many of them it heard otherwise.

    >>> dress("Mr. Culter is the apostle, he says.", "MISTER QUILTER IS THE APOSTLE HE SAID")
    (['Mr.', 'Quilter', 'is', 'the', 'apostle,', 'he', 'said.'], 0.2857142857142857)
    """
    theirs = [word for word in re.sub(r"[-–—]+(?=\w)", "- ", heard).split() if _plain(word)]
    ours = reference.lower().split()
    words, wrong = list[str](), 0
    for place, (mine, other) in enumerate(_aligned(ours, [_plain(word) for word in theirs])):
        if mine is None:
            wrong += 1
            continue
        word = ours[mine]
        if other is None:
            wrong += 1
            begins = place == 0 or bool(words and words[-1][-1] in ".?!")
            words.append(_capital(word) if begins or re.match(r"i('|$)", word) else word)
        elif _plain(theirs[other]) == word:
            words.append(theirs[other])
        else:
            wrong += 1
            before, middle, after = re.fullmatch(r"(\W*)(.*?)(\W*)", theirs[other]).groups()  # type: ignore[union-attr]
            words.append(
                before
                + (_capital(word) if (re.match(r"[A-Z](?!')", middle) and middle != "I") or re.match(r"i('|$)", word) else word)
                + after
            )
    return _rejoin(words), wrong / max(1, len(ours))


def _plain(word: str) -> str:
    word = re.sub(r"^[^\w']+|[^\w']+$", "", word.lower().replace("’", "'")).strip("'") if word != "&" else word
    return SPELLINGS.get(word, word)


def _capital(word: str) -> str:
    return word[:1].upper() + word[1:]


def _rejoin(words: list[str]) -> list[str]:
    """Words that were parted at their hyphen for the alignment, put together again."""
    joined = list[str]()
    for word in words:
        if joined and re.search(r"\w-$", joined[-1]):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _aligned(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """Pairs of places of a cheapest edit of one list into the other; None where a word has no partner."""
    cost = np.zeros((len(ours) + 1, len(theirs) + 1), np.int64)
    cost[:, 0], cost[0] = np.arange(len(ours) + 1), np.arange(len(theirs) + 1)
    for i, mine in enumerate(ours, start=1):
        for j, other in enumerate(theirs, start=1):
            cost[i, j] = min(cost[i - 1, j - 1] + (mine != other), cost[i - 1, j] + 1, cost[i, j - 1] + 1)
    pairs = list[tuple[int | None, int | None]]()
    i, j = len(ours), len(theirs)
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + (ours[i - 1] != theirs[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
            pairs.append((i, None))
        else:
            j -= 1
            pairs.append((None, j))
    return pairs[::-1]


# Time: where the alignment heads look.


def _times(model: Model, source_BTD: Tensor, texts: Sequence[Sequence[str]]) -> Iterator[list[tuple[float, float]]]:
    """Beginning and end of each word, in seconds."""
    assert model.tokenizer is not None
    ids = [[model.tokenizer.encode(" " + word) for word in words] for words in texts]
    prompt = list(model.config.framing.prompt)
    rows = [torch.tensor(prompt + [token for word in words for token in word]) for words in ids]
    ids_BN = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    seen = _Watch(model, source_BTD)
    model.decoder.rows(ids_BN, source_BTD, torch.full(ids_BN.shape, source_BTD.shape[1]))
    weights_BAN = seen.attention()
    for index, words in enumerate(ids):
        count = sum(map(len, words)) + 1  # the rows that write each token, and the one that ends
        look_ANT = weights_BAN[index, :, len(prompt) - 1 : len(prompt) - 1 + count]
        look_ANT = (look_ANT - look_ANT.mean(1, keepdim=True)) / look_ANT.std(1, keepdim=True, unbiased=False).clamp(min=1e-8)
        wide_ANT = functional.pad(look_ANT, (SMOOTH // 2, SMOOTH // 2), mode="reflect").unfold(2, SMOOTH, 1)
        begin_N = _path(wide_ANT.median(-1).values.mean(0).numpy())
        edges = np.cumsum([0, *map(len, words)])
        yield [(float(begin_N[a]) * TOKEN / SAMPLE_RATE, float(begin_N[b]) * TOKEN / SAMPLE_RATE) for a, b in itertools.pairwise(edges)]


class _Watch:
    """The attention of the alignment heads in the next forward pass over a source, which Whisper's decoder reads as it is."""

    def __init__(self, model: Model, source_BTD: Tensor) -> None:
        self.heads: int = model.config.decoder.heads
        self._queries: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        self._handles = []
        for layer in sorted({layer for layer, _ in ALIGNMENT_HEADS}):
            cross: Any = model.decoder.layers[layer].cross_attention
            self._keys[layer] = self._split(cross.key(source_BTD))
            self._handles.append(cross.query.register_forward_hook(self._keep(layer)))

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], self.heads, -1).transpose(1, 2)

    def _keep(self, layer: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(module: nn.Module, inputs: Any, output_BTD: Tensor) -> None:
            self._queries[layer] = self._split(output_BTD)

        return keep

    def attention(self) -> Tensor:
        """Weights (B, heads, N, T)."""
        for handle in self._handles:
            handle.remove()
        rows = []
        for layer, head in ALIGNMENT_HEADS:
            q_BNK, k_BTK = self._queries[layer][:, head].float(), self._keys[layer][:, head].float()
            rows.append((q_BNK @ k_BTK.transpose(1, 2) / q_BNK.shape[-1] ** 0.5).softmax(-1))
        return torch.stack(rows, 1)


def _path(score_NT: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Where each row of a best monotone path begins: every row has at least one column, every column one row."""
    num_rows, count = score_NT.shape
    if count < num_rows:
        return np.minimum(np.arange(num_rows), count - 1)
    best_N = np.full(num_rows, -np.inf)
    best_N[0] = score_NT[0, 0]
    moved_TN = np.zeros((count, num_rows), bool)
    for t in range(1, count):
        from_before_N = np.concatenate([[-np.inf], best_N[:-1]])
        moved_TN[t] = from_before_N > best_N
        best_N = np.maximum(from_before_N, best_N) + score_NT[:, t]
    begin_N = np.zeros(num_rows, np.int64)
    row = num_rows - 1
    for t in range(count - 1, 0, -1):
        if moved_TN[t, row]:
            begin_N[row] = t
            row -= 1
    return begin_N
