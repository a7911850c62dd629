"""The exception tree: a user's mistake is a ZendayaError, printed by the command line in one line."""


class ZendayaError(Exception):
    """Something the user can put right; its text says what is wrong, what was expected, what was got and what to do."""


class ScheduleError(ZendayaError, ValueError):
    """A schedule that cannot be: a negative dial, a decreasing sequence, a source of no tokens."""


class ConfigError(ZendayaError, ValueError):
    """A configuration record whose fields do not fit together."""


class SourceError(ZendayaError, ValueError):
    """Source tokens of the wrong shape or number, or a read of tokens that have not arrived."""


class CorpusError(ZendayaError, ValueError):
    """Published files that are missing or not of their format, or a corpus that cannot give what was asked of it."""


class CheckpointError(ZendayaError, ValueError):
    """A checkpoint that is missing, damaged, not safetensors, or not what its config says."""


class StoreError(ZendayaError, ValueError):
    """A feature store that is missing, damaged, unfinished, being written by another, or of another encoder or corpus."""


class WorkerError(ZendayaError, RuntimeError):
    """A worker process or Ray worker that was lost with its job."""


class MissingExtraError(ZendayaError, ImportError):
    """An optional dependency is not installed."""

    def __reduce__(self) -> tuple[object, ...]:
        return self.__new__, (type(self), str(self))  # as worker processes send it: __init__ has other arguments

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        get = f"'zendaya[{extra}]'" if extra is not None else f"{package}, which no extra brings"
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed: pip install {get}")
