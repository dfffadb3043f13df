"""Where the records of a CSV file end: a newline inside quotes does not end one. Quotes are counted for a whole block
at once; only a block with quotes in odd places is read with a regular expression.
"""

from __future__ import annotations

import re

import numpy as np

from gristmill.values import dataclass

__all__ = ["Dialect"]


@dataclass(frozen=True)
class Dialect:
    """The characters of a CSV file, one byte each; `quote` may be empty: then a newline always ends a record.

    A quote opens a field only at its start, is doubled inside, and is a plain character elsewhere, as in Python's csv.
    """

    delimiter: bytes
    quote: bytes

    def ends(self, data: bytes) -> np.ndarray:
        """Indices of the newlines that end records, in bytes that begin with a record."""
        octets = np.frombuffer(data, dtype=np.uint8)
        special = octets == 10
        if not self.quote or self.quote not in data:
            return np.flatnonzero(special)
        special |= octets == self.quote[0]
        at = np.flatnonzero(special)
        quotes = octets[at] == self.quote[0]
        if not self._regular(octets, at[quotes]):
            return self._one_by_one(data)
        outside = np.cumsum(quotes) & 1 == 0
        ends: np.ndarray = at[~quotes & outside]
        return ends

    def left_open(self, record: bytes) -> bool:
        """Whether a quote in the record is never closed."""
        if not self.quote or self.quote not in record:
            return False
        found = self._record().match(record)
        return found is None or found.lastindex is not None

    def astray(self, data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[int, str] | None:
        """The first of the records at [starts, stops) in which a quote takes in further lines, surely by mistake: it is
        left open to the end of the file, or text follows the quote that closes it. And the reason, in words.
        """
        if not self.quote or self.quote not in data:
            return None
        octets = np.frombuffer(data, dtype=np.uint8)
        breaks = np.flatnonzero(octets == 10)
        over = np.searchsorted(breaks, stops) > np.searchsorted(breaks, starts)
        if over.any():
            over &= self._odd(octets, starts, stops)
        for i in np.flatnonzero(over).tolist():
            if why := self._astray(data[int(starts[i]) : int(stops[i])]):
                return i, why
        return None

    def _odd(self, octets: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Which records have a quote that neither opens nor closes a field and is not one of a doubled pair, or an odd
        number of quotes.
        """
        quotes = np.flatnonzero(octets == self.quote[0])
        first, last = np.searchsorted(quotes, starts), np.searchsorted(quotes, stops)
        odd: np.ndarray = (last - first) % 2 == 1
        record = np.searchsorted(starts, quotes, side="right") - 1
        quotes, record = quotes[record >= 0], record[record >= 0]
        opens = (np.arange(len(quotes)) + first[0] - first[record]) % 2 == 0
        pair = np.diff(quotes) == 1
        begins = (quotes == starts[record]) | self._at(octets, quotes - 1, self.delimiter)
        begins[1:] |= pair
        ends = (quotes + 1 >= stops[record]) | self._at(octets, quotes + 1, self.delimiter)
        ends[:-1] |= pair
        odd[record[~np.where(opens, begins, ends)]] = True
        return odd

    def _astray(self, record: bytes) -> str:
        d, q = re.escape(self.delimiter), re.escape(self.quote)
        field = re.compile(b"%b([^%b]*(?:%b%b[^%b]*)*)(?:%b([^%b\n]*)|\\Z)|[^%b\n]*" % (q, q, q, q, q, q, d, d))
        at = 0
        while at <= len(record) and (found := field.match(record, at)):
            inside, after = found[1], found[2]
            if inside is not None and (lines := (inside if found[2] is not None else inside.rstrip()).count(b"\n")):
                if after is None:
                    return f"is not closed before the end of the file, {lines:,} lines on"
                if after.strip():
                    shown = (self.quote + after[:20]).decode("utf-8", "replace")
                    return f"is closed {lines:,} lines on, in the middle of a field ({shown.strip()}…)"
            at = found.end() + 1
        return ""

    def _regular(self, octets: np.ndarray, quotes: np.ndarray) -> bool:
        """Whether every quote opens or closes a field or is one of a doubled pair, so that counting them is enough."""
        before = self._at(octets, quotes[0::2] - 1, self.delimiter + b"\n")
        before[1:] |= quotes[0::2][1:] == quotes[1::2][: len(before) - 1] + 1  # the second of a pair
        if quotes[0] == 0:
            before[0] = True
        if not before.all():
            return False
        closing = quotes[1::2]
        after = self._at(octets, closing + 1, self.delimiter + b"\r\n")
        following = quotes[2::2]
        after[: len(following)] |= following == closing[: len(following)] + 1
        return bool(after.all())

    @staticmethod
    def _at(octets: np.ndarray, at: np.ndarray, wanted: bytes) -> np.ndarray:
        """Whether one of the wanted bytes is at each index; true beyond the last, as more may follow."""
        found = octets[np.clip(at, 0, len(octets) - 1)]
        hit = found == wanted[0]
        for byte in wanted[1:]:
            hit |= found == byte
        hit |= at >= len(octets)
        return np.where(at < 0, False, hit)

    def _record(self) -> re.Pattern[bytes]:
        """One record. A quote that opens and does not close reaches to the end of the bytes (the groups)."""
        d, q = re.escape(self.delimiter), re.escape(self.quote)
        quoted = b"%b[^%b]*(?:%b%b[^%b]*)*(?:%b(?!%b)[^%b\n]*|(\\Z))" % (q, q, q, q, q, q, q, d)
        field = b"(?:%b|(?!%b)[^%b\n]*)" % (quoted, q, d)
        return re.compile(b"%b(?:%b%b)*(?:\n|\\Z)" % (field, d, field))

    def _one_by_one(self, data: bytes) -> np.ndarray:
        pattern, at, ends = self._record(), 0, []
        while at < len(data):
            found = pattern.match(data, at)
            if found is None or found.lastindex is not None or data[found.end() - 1 : found.end()] != b"\n":
                break
            ends.append(found.end() - 1)
            at = found.end()
        return np.array(ends, dtype=np.int64)
