"""Repeats collapse here: one public storm was 800,000 lines of 29 distinct messages."""

from collections.abc import Hashable


class Bursts:
    """Counts repeats of a key as one burst until the key was silent for `gap_s`.

    Constant work per call, at most `keys_max` keys: with more, the one silent for longest is forgotten
    and would count as new.
    """

    def __init__(self, gap_s: float = 5.0, keys_max: int = 4096) -> None:
        self._gap_s = gap_s
        self._keys_max = keys_max
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def add(self, key: Hashable, t_s: float) -> bool:
        """Takes one event at time `t_s`. True if it starts a burst."""
        last_t_s, count = self._seen.pop(key, (t_s, 0))
        if count and t_s - last_t_s > self._gap_s:
            count = 0
        self._seen[key] = (max(t_s, last_t_s), count + 1)
        if len(self._seen) > self._keys_max:
            del self._seen[next(iter(self._seen))]
        return count == 0

    def count(self, key: Hashable) -> int:
        """Events of the key's present (or last) burst."""
        return self._seen.get(key, (0.0, 0))[1]
