"""Streaming decoders with a closed-form latency dial: models that write text while their source is still arriving."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zendaya.data.features.store import FeatureStore as FeatureStore
    from zendaya.errors import ZendayaError as ZendayaError
    from zendaya.evaluation.corpus import evaluate_corpus as evaluate_corpus
    from zendaya.evaluation.metrics.scores import Scores as Scores
    from zendaya.evaluation.metrics.scores import score as score
    from zendaya.evaluation.options import EvalOptions as EvalOptions
    from zendaya.nn.config import ModelConfig as ModelConfig
    from zendaya.nn.model import Model as Model
    from zendaya.nn.presets import preset as preset
    from zendaya.nn.tokenizer import Tokenizer as Tokenizer
    from zendaya.records import Event as Event
    from zendaya.records import Trace as Trace
    from zendaya.research.recipes import recipe as recipe
    from zendaya.research.recipes import train as train
    from zendaya.runtime.options import DecodeOptions as DecodeOptions
    from zendaya.runtime.options import Pace as Pace
    from zendaya.runtime.pipeline import Pipeline as Pipeline
    from zendaya.runtime.replay import replay as replay
    from zendaya.runtime.session import Session as Session
    from zendaya.schedule import Custom as Custom
    from zendaya.schedule import Full as Full
    from zendaya.schedule import Learned as Learned
    from zendaya.schedule import PowerLaw as PowerLaw
    from zendaya.schedule import Schedule as Schedule
    from zendaya.schedule import WaitK as WaitK
    from zendaya.serve.client import Client as Client
    from zendaya.sources.arrivals import Outages as Outages
    from zendaya.training.loop import LoopConfig as LoopConfig
    from zendaya.training.schedule_sampler import ScheduleSampler as ScheduleSampler
    from zendaya.training.train import TrainConfig as TrainConfig

__version__ = "0.1.0"

_HOMES = {
    "Client": "serve.client",
    "Custom": "schedule",
    "ScheduleSampler": "training.schedule_sampler",
    "EvalOptions": "evaluation.options",
    "DecodeOptions": "runtime.options",
    "Event": "records",
    "FeatureStore": "data.features.store",
    "Full": "schedule",
    "LoopConfig": "training.loop",
    "Learned": "schedule",
    "Model": "nn.model",
    "ModelConfig": "nn.config",
    "Pace": "runtime.options",
    "Outages": "sources.arrivals",
    "Pipeline": "runtime.pipeline",
    "PowerLaw": "schedule",
    "Schedule": "schedule",
    "Scores": "evaluation.metrics.scores",
    "Session": "runtime.session",
    "Tokenizer": "nn.tokenizer",
    "Trace": "records",
    "TrainConfig": "training.train",
    "WaitK": "schedule",
    "ZendayaError": "errors",
    "evaluate_corpus": "evaluation.corpus",
    "preset": "nn.presets",
    "recipe": "research.recipes",
    "replay": "runtime.replay",
    "score": "evaluation.metrics.scores",
    "train": "research.recipes",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `zendaya.schedule` costs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zendaya' has no attribute {name!r}")
    return getattr(import_module(f"zendaya.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
