"""kivi.Cache: the native cache with a constructor for people, and a context manager."""

from __future__ import annotations

from typing import Any, Union

from . import _native
from ._config import Config


class Cache(_native.Cache):
    """Attention keys and values of a model in 2 to 4 bits, and attention straight from them.

    Either from a Config, or from the name of a preset with the arguments of Config.preset:

    >>> with Cache("k3v2", layers=2, q_heads=8, kv_heads=2, head_dim=64, max_tokens=1024) as cache:
    ...     cache.length(layer=0, sequence=0).length
    0

    Different caches are independent. One cache may be read (attend, length, statistics, ...) from several
    threads at once; every other call needs it to itself, else StateError is raised.
    """

    def __init__(self, config: Union[Config, str] = "k3v2", **arguments: Any) -> None:
        if isinstance(config, str):
            config = Config.preset(config, **arguments)
        elif arguments:
            raise TypeError(f"a Config takes no further arguments, got {', '.join(arguments)}")
        super().__init__(config)
        self._config = config

    @property
    def config(self) -> Config:
        """What the cache was made from."""
        return self._config

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<kivi.Cache, closed>"
        config = self.config
        return (
            f"<kivi.Cache on {config.device}, {len(config.layers)} layers, "
            f"{config.max_sequences} sequences of at most {config.max_tokens} tokens>"
        )
