"""Who is admitted next: fair sharing between tenants. Knows tenants and token counts; refuses to know pages and rows.

Fair queueing by virtual time (Demers, Keshav, Shenker 1989): a tenant's clock advances by the tokens it was granted, and the
tenant whose clock is furthest behind goes first. A tenant that comes back after a pause starts at the current virtual time,
so idling saves nothing up. A flood of one tenant delays another tenant's request by about one of its own requests.
"""

from __future__ import annotations

from collections import OrderedDict

from spec.sequence import Sequence


class WaitingQueue:
    """First come first served inside a tenant. Preempted sequences wait ahead of everybody: they were admitted before."""

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedDict[int, Sequence]] = {}
        self._clocks: dict[str, int] = {}  # tokens granted to each waiting or recently waiting tenant
        self._now = 0  # virtual time: the clock of the tenant served last
        self._returned: dict[int, Sequence] = {}  # preempted, by id
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: Sequence) -> None:
        self._count += 1
        if sequence.recomputing:
            self._returned[sequence.seq_id] = sequence
            return
        queue = self._tenants.get(sequence.tenant)
        if queue is None:
            queue = self._tenants[sequence.tenant] = OrderedDict()
            self._clocks[sequence.tenant] = max(self._clocks.get(sequence.tenant, 0), self._now)
        queue[sequence.seq_id] = sequence

    def head(self) -> Sequence | None:
        """The sequence to admit next; None when nobody waits."""
        if self._returned:
            return min(self._returned.values(), key=lambda sequence: sequence.ordinal)
        if not self._tenants:
            return None
        tenant = min(self._tenants, key=self._clocks.__getitem__)
        return next(iter(self._tenants[tenant].values()))

    def admit(self, sequence: Sequence) -> None:
        """Take the head out and charge its tenant for the prompt and for the answer it asked for."""
        if not sequence.recomputing:
            self._now = self._clocks[sequence.tenant]
            self._clocks[sequence.tenant] += sequence.max_length
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it stands (cancelled)."""
        self._count -= 1
        if self._returned.pop(sequence.seq_id, None) is not None:
            return
        queue = self._tenants[sequence.tenant]
        del queue[sequence.seq_id]
        if not queue:
            del self._tenants[sequence.tenant]
            # Clocks that virtual time has overtaken mean nothing any more; this bounds the table by the tenants in debt.
            for tenant in [t for t, clock in self._clocks.items() if clock <= self._now and t not in self._tenants]:
                del self._clocks[tenant]
