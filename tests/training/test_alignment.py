"""Losses that align source and text: against all alignments written out, and that they leave no trace in the model."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from zendaya import Model, PowerLaw, TrainConfig, train
from zendaya.data.features.store import FeatureStore
from zendaya.errors import ConfigError
from zendaya.nn.config import DecoderConfig, ModelConfig
from zendaya.nn.decoder import Intermediates
from zendaya.training import alignment
from zendaya.training.loop import LoopConfig

TEXTS = [[1], [1, 2], [2, 2], [3, 1, 3]]


def log_probs(num_source, seed, sharp=3.0):
    return (sharp * torch.randn(num_source, 4, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)


def paths(num_source, text):
    """Every way to write a text at `num_source` places: ids, blanks and repeats."""
    for ids in itertools.product(range(4), repeat=num_source):
        if [key for key, _ in itertools.groupby(ids) if key] == text:
            yield ids


def padded(texts):
    rows = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    return rows, torch.tensor([len(text) for text in texts])


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_places_are_those_of_all_alignments(seed, monkeypatch):
    monkeypatch.setattr(alignment, "CREDIBLE_NATS", math.inf)
    lengths = [5, 6, 4, 6]
    each = [log_probs(length, 10 * seed + number) for number, length in enumerate(lengths)]
    together = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=7.0)  # padding is never read
    text_BN, lengths_B = padded(TEXTS)
    found = alignment.places(together, torch.tensor(lengths), text_BN, lengths_B)
    expected = 0.0
    for row, (log_prob, text) in enumerate(zip(each, TEXTS, strict=True)):
        score = {ids: float(log_prob[torch.arange(len(ids)), list(ids)].sum()) for ids in paths(log_prob.shape[0], text)}
        expected -= math.log(sum(map(math.exp, score.values())))
        best = max(score, key=score.get)
        starts = [place for place, token in enumerate(best) if token and (place == 0 or best[place - 1] != token)]
        assert found[row].tolist() == starts + [-1] * (text_BN.shape[1] - len(text))
    loss = alignment.ctc_loss(together, torch.tensor(lengths), text_BN, lengths_B)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_text_without_an_alignment_places_and_costs_nothing():
    text_BN, lengths_B = padded([[1, 1, 2]])  # needs a blank between: four places
    for length in (2, 3):
        log_probs_BFV = log_probs(length, 0)[None].requires_grad_()
        said = (torch.tensor([length]), text_BN, lengths_B)
        assert alignment.places(log_probs_BFV, *said).tolist() == [[-1, -1, -1]]
        loss = alignment.ctc_loss(log_probs_BFV, *said)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert torch.isfinite(log_probs_BFV.grad).all()


def test_a_ctc_that_has_not_learned_places_nothing():
    uniform = torch.full((1, 12, 1000), -math.log(1000.0))
    said = (torch.tensor([12]), torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    assert alignment.places(uniform, *said).tolist() == [[-1, -1, -1]]


def test_attention_is_told_only_of_places_it_may_read():
    scores = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    horizons_BN, places_BN = torch.tensor([[4, 4, 8]]), torch.tensor([[2, 6, -1]])
    visible = torch.arange(8) < horizons_BN[..., None]
    log_weights_BNF = scores.masked_fill(~visible, -math.inf).log_softmax(-1)
    loss = alignment.guide_loss([log_weights_BNF, log_weights_BNF], horizons_BN, places_BN)
    assert float(loss.detach()) == pytest.approx(-math.log(float(log_weights_BNF.detach()[0, 0].exp()[1:4].sum())), rel=1e-5)
    loss.backward()
    assert torch.isfinite(scores.grad).all()
    assert scores.grad[0, 0].abs().sum() > 0
    assert scores.grad[0, 1:].abs().sum() == 0  # beyond its horizon; not placed


@pytest.mark.parametrize("with_history", [False, True])
def test_the_tap_gives_the_attention_and_changes_nothing(with_history, monkeypatch):
    one_head = DecoderConfig(
        vocab_size=512,
        source_dim=16,
        max_source=24,
        max_rows=65,
        dim=64,
        layers=2,
        heads=1,
        head_dim=64,
        ffn_dim=128,
        norm="pre",
        dropout=0.0,
    )
    model = Model.from_preset("tiny", seed=0, decoder=one_head).eval()
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(length, 16, generator=generator) for length in (20, 11)]
    histories = [(torch.randn(7, 16, generator=generator), [9, 8, 7]), None] if with_history else None
    batch = model.batch(sources, [[5, 6, 7, 8], [9, 10]], PowerLaw(1.0), histories=histories)
    intermediates = Intermediates()
    plain, seen = model.loss(batch), model.loss(batch, intermediates=intermediates)
    assert torch.equal(plain, seen)
    assert intermediates.memory_BFD.shape == (2, 20, 64)
    visible = torch.arange(20) < batch.horizons_BN[..., None]
    for log_weights_BNF in intermediates.log_weights:
        assert torch.equal(log_weights_BNF > -1e4, visible)
        torch.testing.assert_close(log_weights_BNF.exp().sum(-1), torch.ones(2, 5))

    def by_weights(attention, x_BND, k_BAMK, v_BAMK, mask_B1NM):
        return attention.out(attention.first_head(x_BND, k_BAMK, mask_B1NM).exp() @ v_BAMK[:, 0])

    monkeypatch.setattr(model.decoder, "_cross", by_weights)
    torch.testing.assert_close(model.loss(batch), plain)


# In training.


def speak(folder, *, tokens=2, most_silence=3, spelled=lambda word: [word]):
    """Clips in which each word has a sound: source tokens of one random vector a word, and silence between, of random length."""
    rng = np.random.default_rng(0)
    words = ["ba", "do", "ki", "mu", "po", "ta", "ve", "zi"]
    sounds = dict(zip(words, rng.standard_normal((len(words), 8)), strict=True))
    lines, said = [], {}
    for number in range(96):
        text = rng.choice(words, 5)
        rows, starts = [], []
        for word in text:
            rows += [np.zeros(8)] * int(rng.integers(0, most_silence + 1)) + [sounds[word]] * tokens
            starts += [len(rows) - tokens] * len(spelled(word))
        said[f"{number}"] = starts
        rows = np.array(rows + [np.zeros(8)] * most_silence) + 0.05 * rng.standard_normal((len(rows) + most_silence, 8))
        np.save(folder / f"{number}.npy", rows.astype(np.float32))
        split, text = "valid" if number >= 80 else "train", " ".join(part for word in text for part in spelled(word))
        lines.append({"id": f"{number}", "split": split, "media": f"{number}.npy", "end_s": len(rows) / 3, "text": text})
    (folder / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "clips.jsonl", said


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    return speak(tmp_path_factory.mktemp("spoken"))


def looks_there(folder, store, said):
    """Share of the words of validation clips at whose sound the first head of the last layer looks, before they are written."""
    model, features = Model.from_pretrained(folder / "last").eval(), FeatureStore.open(store)
    texts = {line["id"]: line["text"] for line in map(json.loads, (folder / "../clips.jsonl").read_text().splitlines())}
    shares = []
    for clip, starts in said.items():
        if int(clip) < 80:
            continue
        ids = model.tokenizer.encode(texts[clip])
        assert len(ids) == len(starts)  # a token a word
        intermediates = Intermediates()
        with torch.no_grad():
            model.loss(model.batch([features.get(clip, "valid").values_TE], [ids], PowerLaw(0.0)), intermediates=intermediates)
        weights_NF = intermediates.log_weights[-1][0].exp()
        shares += [float(weights_NF[step, max(0, start - 1) : start + 3].sum()) for step, start in enumerate(starts)]
    return float(np.mean(shares))


def toy(**changes):
    decoder = DecoderConfig(
        vocab_size=300, source_dim=8, max_source=32, max_rows=41, dim=64, layers=2, heads=2, head_dim=32, ffn_dim=128, norm="pre",
        dropout=0.0, source_layers=1,
    )  # fmt: skip
    return TrainConfig(**{
        "name": "toy", "corpus": "manifest", "folder": "", "encoder": "features,rate=3", "vocab_size": 300, "schedule": PowerLaw(0.0),
        "model": ModelConfig(decoder=decoder, window_tokens=32, max_steps=20, length="fix", length_hidden=32, history=False),
        "loop": LoopConfig(epochs=20, batch_tokens=130, learning_rate=3e-3, warmup_steps=20, patience=30, log_every=1000),
        "alignment": 0.4,
    } | changes)  # fmt: skip


def epochs(folder):
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"]


def test_with_alignment_attention_looks_where_a_word_is_said(spoken, tmp_path):
    data, said = spoken
    (tmp_path / "clips.jsonl").write_bytes(data.read_bytes())
    train(toy(), data=data, store=tmp_path / "features", out=tmp_path / "aligned")
    train(toy(alignment=None), data=data, store=tmp_path / "features", out=tmp_path / "alone")
    shares = {name: looks_there(tmp_path / name, tmp_path / "features", said) for name in ("aligned", "alone")}
    assert shares["aligned"] > max(0.55, shares["alone"] + 0.1), shares
    aligned, alone = epochs(tmp_path / "aligned"), epochs(tmp_path / "alone")
    assert aligned[-1]["train_ctc"] < 0.3 * aligned[0]["train_ctc"]
    assert min(line["valid_nll"] for line in aligned) < 0.85 * min(line["valid_nll"] for line in alone)
    assert "valid_ctc" not in aligned[-1]  # the best checkpoint is the one that writes best
    assert not {"train_ctc", "train_guide"} & alone[-1].keys()
    left, right = (Model.from_pretrained(tmp_path / name / "best").state_dict() for name in ("aligned", "alone"))
    assert {name: tensor.shape for name, tensor in left.items()} == {name: tensor.shape for name, tensor in right.items()}


def test_more_text_than_source_is_aligned_in_slots(tmp_path):
    """Each sound is one source token and two tokens of text: no path of plain CTC writes them all."""
    data, said = speak(tmp_path, tokens=1, most_silence=0, spelled=lambda word: [word, word[::-1]])
    for slots in (1, 2):
        train(toy(alignment_slots=slots), data=data, store=tmp_path / "features", out=tmp_path / f"{slots}")
    assert epochs(tmp_path / "1")[0]["train_ctc"] == 0.0
    two = epochs(tmp_path / "2")
    assert 0.0 < two[-1]["train_ctc"] < 0.3 * two[0]["train_ctc"]
    assert looks_there(tmp_path / "2", tmp_path / "features", said) > 0.55
    left, right = (Model.from_pretrained(tmp_path / name / "best").state_dict() for name in ("1", "2"))
    assert left.keys() == right.keys()  # the slots are of training alone


def test_a_run_from_before_there_was_alignment_goes_on(spoken, tmp_path):
    data, _ = spoken
    short = LoopConfig(epochs=1, batch_tokens=400)
    train(toy(alignment=None, loop=short), data=data, out=tmp_path / "run")
    path = tmp_path / "run/recipe.json"
    signature = json.loads(path.read_text())
    del signature["recipe"]["alignment"]
    path.write_text(json.dumps(signature))
    train(toy(alignment=None, loop=short), data=data, out=tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"recipe\.alignment was None, now 0\.4"):
        train(toy(loop=short), data=data, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_of_alignment_is_above_0(weight):
    with pytest.raises(ConfigError, match="alignment must be a weight above 0, or None"):
        toy(alignment=weight)
    with pytest.raises(ConfigError, match="alignment_slots must be at least 1"):
        toy(alignment_slots=0)
