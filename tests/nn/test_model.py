"""The model: configs, batches, length heads."""

import dataclasses

import pytest
import torch

from zendaya import Model, ModelConfig, PowerLaw, Tokenizer, ZendayaError
from zendaya.nn.presets import preset
from zendaya.records import read_record


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a person is sitting on a bed"], vocab_size=300)


@pytest.mark.parametrize(
    "changes", [{"window_tokens": 0}, {"window_tokens": 25}, {"max_steps": 0}, {"max_steps": 33}, {"length": "maybe"}, {"length_hidden": 0}]
)
def test_an_impossible_config_is_refused(changes):
    with pytest.raises(ZendayaError, match="model config"):
        Model.from_preset("tiny", **changes)


def test_unknown_presets_and_fields_are_named():
    with pytest.raises(ZendayaError, match="expected one of"):
        preset("huge")
    with pytest.raises(ZendayaError, match="colour"):
        read_record(ModelConfig, {**preset("tiny").to_dict(), "colour": 1}, "x")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tokenizer):
    with pytest.raises(ZendayaError, match="more than the decoder's vocabulary"):
        Model(read_record(ModelConfig, _with_vocabulary(preset("tiny").to_dict(), 100), "x"), tokenizer)


def _with_vocabulary(config, size):
    config["decoder"]["vocab_size"] = size
    return config


def test_double_precision_streams_too():
    model = Model.from_preset("tiny").double()
    source = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    tokens = [event.token for event in model.open(PowerLaw(0.5)).push(source)]
    assert tokens == [event.token for event in Model.from_preset("tiny").open(PowerLaw(0.5)).push(source)]


def test_a_batch_needs_sources_for_its_targets():
    model = Model.from_preset("tiny")
    for sources, targets in (([], []), ([torch.zeros(3, 16)], []), ([torch.zeros(0, 16)], [[5]])):
        with pytest.raises(ZendayaError, match="a batch needs"):
            model.batch(sources, targets, PowerLaw(1))


def test_fix_pools_the_source_and_inf_its_buffer():
    source = torch.randn(1, 24, 16)
    for length, reads_all in (("fix", True), ("inf", False)):
        model = Model.from_preset("tiny", length=length)
        changed = source.clone()
        changed[:, 6:] += 5
        lengths = torch.tensor([24 if reads_all else 6])
        same = torch.equal(model.length_logits(source, lengths), model.length_logits(changed, lengths))
        assert same != reads_all
    none = Model.from_preset("tiny", length="none")
    with pytest.raises(ZendayaError, match="no length head"):
        none.length_logits(source, torch.tensor([24]))


def test_absent_summaries_have_their_own_embedding():
    model = Model.from_preset("tiny")
    source, lengths = torch.randn(1, 6, 16), torch.tensor([6])
    before = model.length_logits(source, lengths)
    with torch.no_grad():
        model.length.no_text.fill_(1.0)
    assert not torch.equal(model.length_logits(source, lengths), before)
    history = model.pack_history([(torch.randn(24, 16), [5, 6])])
    with_history = model.length_logits(source, lengths, history)
    with torch.no_grad():
        model.length.no_text.fill_(2.0)
        model.length.no_previous.fill_(2.0)
    assert torch.equal(model.length_logits(source, lengths, history), with_history)


def test_predicted_lengths_stay_within_their_classes():
    model = Model.from_preset("tiny")
    for seed in range(20):
        window = torch.randn(10, 16, generator=torch.Generator().manual_seed(seed)) * 50
        assert 1 <= model.predict_steps(window, 4) <= model.config.max_steps


def test_source_layers_learn_windows_without_history():
    decoder = dataclasses.replace(preset("tiny").decoder, source_layers=1)
    model = Model.from_preset("tiny", decoder=decoder)
    batch = model.batch([torch.randn(5, 16), torch.randn(3, 16)], [[7, 8], [9]], PowerLaw(0.5), scale=24, histories=[None, None])
    model.loss(batch).backward()
    assert torch.isfinite(model(batch)).all()
