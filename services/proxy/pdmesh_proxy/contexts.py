"""How long a request the mesh takes: engines may have contexts of different lengths, and a request goes to those that hold it."""

import logging
from collections.abc import Sequence

from pdmesh_proxy.view import EngineView

log = logging.getLogger(__name__)


class Contexts:
    """The mesh's context. Kept while nobody serves, so that a request that comes then is waited with, not refused."""

    def __init__(self) -> None:
        self.longest = 0
        """Most tokens of a request, prompt and output; 0 before any engine has told."""
        self._told: frozenset[tuple[str, int]] = frozenset()

    def note(self, engines: Sequence[EngineView]) -> None:
        """Take in who serves now, and say once of each change that they do not hold the same."""
        self.longest = mesh_context(engines) or self.longest
        lengths = frozenset((engine.engine_id, engine.max_model_len) for engine in engines)
        if lengths != self._told and len({length for _, length in lengths}) > 1:
            listed = ", ".join(f"{engine_id} {length}" for engine_id, length in sorted(lengths))
            log.warning(
                "engines have contexts of different lengths: %s; the mesh takes requests of up to %d tokens, and each goes to "
                "engines that hold its prompt and max_tokens",
                listed,
                self.longest,
            )
        self._told = lengths


def mesh_context(engines: Sequence[EngineView]) -> int:
    """The longest that some decode holds, or some prefill in a mesh without decodes; 0 when there is no engine.

    One that shuts down counts only where none stays.
    """
    engines = [engine for engine in engines if not engine.draining] or engines
    engines = [engine for engine in engines if engine.can_decode] or engines
    return max((engine.max_model_len for engine in engines), default=0)
