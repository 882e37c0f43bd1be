"""A drafter's tensors under the names of the serving format, whatever the format at hand calls them.

It knows names alone: which tensors there are, and their shapes, was checked before.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from xpress_export.checkpoints.tensors import StoredTensors, stored_sha256


class RenamedSource:
    """``published`` gives, for each name of the serving format, the tensor's name in ``source``. Errors of reading say the latter."""

    def __init__(self, source: StoredTensors, published: Mapping[str, str]) -> None:
        self.published = dict(published)
        self.shapes = {name: source.shapes[theirs] for name, theirs in published.items()}
        self.dtypes = {name: source.dtypes[theirs] for name, theirs in published.items()}
        self._source = source
        self._sha256: str | None = None

    def read(self, name: str) -> Tensor:
        return self._source.read(self.published[name])

    def stored(self, name: str) -> Tensor:
        """One tensor in its stored dtype."""
        return self._source.stored(self.published[name])

    def sha256(self) -> str:
        """Over the names of the serving format, dtypes, shapes and values: the same in every format that holds them."""
        if self._sha256 is None:
            self._sha256 = stored_sha256(self._source, self.published)
        return self._sha256
