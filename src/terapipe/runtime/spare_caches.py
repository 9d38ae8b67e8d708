"""Caches that no microbatch uses at the moment, kept because fresh memory is slow to touch the first time."""

from collections.abc import Collection, Iterator

from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import Stage


class SpareCaches:
    """Of all stages of a rank. A cache serves any cut of its sequences, so plans of one batch shape share them."""

    def __init__(self) -> None:
        self._spare: dict[tuple[int, int, int], list[SliceCache]] = {}  # by stage, sequences and tokens

    def take(self, k: int, stage: Stage, size: int, tokens: int) -> SliceCache:
        spare = self._spare.get((k, size, tokens))
        return spare.pop() if spare else stage.make_cache(size, tokens)

    def give_back(self, k: int, size: int, cache: SliceCache) -> None:
        cache.clear()
        self._spare.setdefault((k, size, cache.seq_len), []).append(cache)

    def keep_only(self, shapes: Collection[tuple[int, int]]) -> None:
        """Lets go of those of other numbers of sequences and tokens."""
        self._spare = {key: caches for key, caches in self._spare.items() if key[1:] in shapes}

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Sequences and tokens of the caches that are kept."""
        return {(size, tokens) for (_, size, tokens), caches in self._spare.items() if caches}

    def __iter__(self) -> Iterator[SliceCache]:
        return (cache for caches in self._spare.values() for cache in caches)
