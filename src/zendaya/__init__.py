"""Streaming decoders with a closed-form latency dial: models that write text while their source is still arriving."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zendaya.arrivals import Outages as Outages
    from zendaya.encoders.store import FeatureStore as FeatureStore
    from zendaya.errors import ZendayaError as ZendayaError
    from zendaya.evaluate import evaluate_corpus as evaluate_corpus
    from zendaya.metrics.scores import Scores as Scores
    from zendaya.metrics.scores import score as score
    from zendaya.model import Model as Model
    from zendaya.model import ModelConfig as ModelConfig
    from zendaya.model import preset as preset
    from zendaya.recipes import recipe as recipe
    from zendaya.recipes import train as train
    from zendaya.records import Event as Event
    from zendaya.records import Trace as Trace
    from zendaya.schedule import Custom as Custom
    from zendaya.schedule import Full as Full
    from zendaya.schedule import Learned as Learned
    from zendaya.schedule import PowerLaw as PowerLaw
    from zendaya.schedule import Schedule as Schedule
    from zendaya.schedule import WaitK as WaitK
    from zendaya.serve.client import Client as Client
    from zendaya.stream import Pace as Pace
    from zendaya.stream import Session as Session
    from zendaya.stream import replay as replay
    from zendaya.text import Tokenizer as Tokenizer
    from zendaya.training import TrainConfig as TrainConfig
    from zendaya.training.dial import Dial as Dial
    from zendaya.training.loop import LoopConfig as LoopConfig

__version__ = "0.1.0"

_HOMES = {
    "Client": "serve.client",
    "Custom": "schedule",
    "Dial": "training.dial",
    "Event": "records",
    "FeatureStore": "encoders.store",
    "Full": "schedule",
    "LoopConfig": "training.loop",
    "Learned": "schedule",
    "Model": "model",
    "ModelConfig": "model",
    "Pace": "stream",
    "Outages": "arrivals",
    "PowerLaw": "schedule",
    "Schedule": "schedule",
    "Scores": "metrics.scores",
    "Session": "stream",
    "Tokenizer": "text",
    "Trace": "records",
    "TrainConfig": "training",
    "WaitK": "schedule",
    "ZendayaError": "errors",
    "evaluate_corpus": "evaluate",
    "preset": "model",
    "recipe": "recipes",
    "replay": "stream",
    "score": "metrics.scores",
    "train": "recipes",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `zendaya.schedule` costs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zendaya' has no attribute {name!r}")
    return getattr(import_module(f"zendaya.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
