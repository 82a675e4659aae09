"""Forecast eviction policy: evicts the blocks with the lowest Gittins index of predicted reuse.

The algorithm, for each use of blocks by a request:

1. Split the used blocks into *runs*: consecutive blocks that the same earlier requests used
   (`_split`). An evicted block may have left a *ghost*: its name, which identifies the run.
2. Tell the reuse model that the reused runs had a hit at their age (`_count_reuse`).
3. Determine the *turn* of the conversation (`_match_chain`). The request continues an earlier
   request if it uses all blocks of that request, or all except the last. The last block may have
   been partly filled; then the continuing request has a different block in its place.
4. Append the runs to the request's *chain* (`_append`). New blocks form one run, except the last
   block. The last block is a separate run, because a partly filled block is rarely used again.
5. Assign every run of the chain to a *kind* (`_classify`). The run of the last block has the kind
   "end". All other runs have a kind of three values: the turn, the logarithm of the number of
   blocks that the request added, and the logarithm of the mean *pause* between uses of the run. A
   system prompt that many conversations share has short pauses.
6. Put the runs into the *bucket* of their kind and age bin. Age is time in units of the mean time
   between two block uses (`UseClock`).
7. Move runs that have become too old for their bin to the next bin, and count a miss for each in
   the model (`_age_runs`).
8. Fit the model (`reuse_model`) in small steps. The model computes a value per kind and age bin:
   the Gittins index, i.e. the best expected hits per block and unit of time. The value ranks the
   buckets.

Victims are taken from the bucket with the lowest value, tail before head within a run. A block is
useless without the blocks before it. So all runs that follow a run are victims before that run,
also if their value is higher.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import ClassVar, Generic

from .open_requests import OpenRequests
from .policy import T
from .request_chains import (
    BlockRun,
    RankBucket,
    RequestChain,
    StaleChains,
    UseClock,
    children_first,
    end_of_whole_run,
)
from .reuse_model import BIN_ENDS, BINS, Kind, ReuseModel

__all__ = ["Forecast"]

_MIN_GHOSTS = 1024
_GHOST_EVERY = 8
"""Every eighth block of a chain leaves a ghost when it is evicted. The last two blocks of a chain
always leave a ghost, because the next turn of the conversation continues there."""
_MIN_LEARNING_PERIOD = 4096
"""The model is fitted after this many block uses, or after half as many uses as there are items if
that is more."""
_AGE_RESOLUTION = 16
"""A run stays in its age bin until at least 1/16 as many block uses as there are items have
followed its last use. This limits the work per use."""
_REFRESHED = 16
"""If a request has more runs, a use refreshes only the runs that it touches, and as many stale runs
of long requests, plus this number. Otherwise the time of a use would grow with the prompt."""
_AGED, _AGED_PER_PIECE = 256, 4
"""Limit of runs that one use moves to their next age bins, and how many more for each piece."""
_MAX_TURN = 3
_MAX_GROWTH = 8


class Forecast(Generic[T]):
    declines: ClassVar[bool] = True

    def __init__(self) -> None:
        self._model = ReuseModel()
        self._unknown = self._model.kind()
        self._requests = OpenRequests[RequestChain[T]](RequestChain, self._close)
        self._count = 0
        self._ghosts: OrderedDict[Hashable, BlockRun[T]] = OrderedDict()
        self._buckets: dict[tuple[Kind, int], RankBucket[T]] = {}
        self._ranked: list[tuple[tuple[float, int], RankBucket[T]]] = []
        """The non-empty buckets, by rank. Ranks are unique, so buckets are never compared."""
        self._schedules: defaultdict[int, OrderedDict[BlockRun[T], None]] = defaultdict(OrderedDict)
        """Per bin the runs that will leave the bin, about in the order in which they do."""
        self._stale = StaleChains[T]()
        self._clock = UseClock()
        self._next_fit = float(_MIN_LEARNING_PERIOD)
        self._fit: Iterator[Kind | None] | None = None

    def use(self, items: Sequence[T], request: Hashable = None, now: float = 0.0) -> None:
        chain = self._requests.of(request)
        pieces = self._split(items, chain)
        uses = 0
        reused: dict[BlockRun[T], list[list[T]]] = {}
        for old, piece in pieces:
            uses += len(piece)
            if old is not None:
                reused.setdefault(old, []).append(piece)
        self._clock.advance(uses, now)
        for run, taken in reused.items():
            self._count_reuse(run, taken)
        self._match_chain(chain, pieces)
        if chain.last_block is not None:
            self._merge_last_block(chain, chain.last_block)
        for number, (old, piece) in enumerate(pieces, start=1):
            self._append(chain, old, piece, last=number == len(pieces))
        self._refresh(chain)
        if request is None:
            self._close(chain)
        self._age_runs(_AGED + _AGED_PER_PIECE * len(pieces))
        self._learn_step()

    def finish(self, request: Hashable) -> None:
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        run: BlockRun[T] | None = item.policy_node
        if run is None:
            return
        item.policy_node = None
        self._count -= 1
        index = run.index(item)
        run.remove_slice(index, index + 1)
        position = run.start + index
        if position % _GHOST_EVERY == 0 or position >= run.chain.length - 2 or not run.items:
            self._ghosts[item.name] = run
            run.ghosts += 1
            self._trim_ghosts()
        if not run.items:
            self._leave_bucket(run)
            run.replace_by(None)
            self._forget_run(run)

    def victims(self) -> Iterator[T]:
        runs = (run for _, bucket in self._ranked for run in bucket.in_order())
        return itertools.chain.from_iterable(reversed(run.items) for run in children_first(runs))

    def oldest(self) -> T | None:
        """Returns the tail of a run that was about least recently used."""
        heads = (next(iter(bucket.runs)) for _, bucket in self._ranked)
        run = min(heads, key=lambda run: run.chain.last_use, default=None)
        return run.items[-1] if run else None

    def __len__(self) -> int:
        return self._count

    def _split(self, items: Sequence[T], chain: RequestChain[T]) -> list[tuple[BlockRun[T] | None, list[T]]]:
        """Splits items by their runs. Skips items that this request has used before."""
        pieces: list[tuple[BlockRun[T] | None, list[T]]] = []
        start = 0
        while start < len(items):
            run: BlockRun[T] | None = items[start].policy_node
            end = end_of_whole_run(items, start, run)  # the usual case: items are not examined
            if not end:
                end = start + 1
                while end < len(items) and items[end].policy_node is run:
                    end += 1
            piece = list(items[start:end])
            start = end
            if run is None:
                self._match_ghosts(piece, chain, pieces)
            elif run.chain is not chain:
                pieces.append((run, piece))
        return pieces

    def _match_ghosts(
        self, items: list[T], chain: RequestChain[T], pieces: list[tuple[BlockRun[T] | None, list[T]]]
    ) -> None:
        """Adds pieces for new or evicted items. A ghost also identifies the items before it."""
        names = [item.name for item in items] if self._ghosts else ()
        if self._ghosts.keys().isdisjoint(names):
            pieces.append((None, items))
            return
        piece: list[T] = []
        for item, name in zip(items, names, strict=True):
            piece.append(item)
            run = self._ghosts.pop(name, None)
            if run is None:
                continue
            run.ghosts -= 1
            if run.chain is chain:
                self._forget_run(run)
                continue
            if pieces and pieces[-1][0] is run:
                pieces[-1][1].extend(piece)
            else:
                pieces.append((run, piece))
            piece = []
        if piece:
            pieces.append((None, piece))

    def _count_reuse(self, run: BlockRun[T], pieces: list[list[T]]) -> None:
        """Reports hits to the model and removes the reused blocks from their run."""
        self._count_misses(run)
        items = pieces[0] if len(pieces) == 1 else list(itertools.chain.from_iterable(pieces))
        run.kind.hits[run.bin] += len(items)
        if run.items == items and len(pieces) == 1 and not run.ghosts:
            return  # `_append` moves the whole run
        run.at_risk = max(0, run.at_risk - len(items))
        if run.items:
            resident = items
            if run.items[: len(items)] != items:
                resident = [item for item in items if item.policy_node is run]
            if resident:
                run.remove_all(resident)
            run.start += len(resident)
            self._put_in_bucket(run)
        self._forget_run(run)

    def _match_chain(self, chain: RequestChain[T], pieces: list[tuple[BlockRun[T] | None, list[T]]]) -> None:
        """Sets the matched length, and the turn: the turn of the continued request plus one."""
        position = chain.length
        for old, piece in pieces:
            position += len(piece)
            if old is not None:
                chain.matched_length = position
                continues = 1 < chain.matched_length >= old.chain.length - 1
                chain.turn = old.chain.turn + 1 if continues else 0
                chain.pause = self._mean_pause(old) if continues else 0.0

    def _merge_last_block(self, chain: RequestChain[T], last: BlockRun[T]) -> None:
        """Merges the earlier last block of a request into its run of new blocks."""
        chain.last_block = None
        if not last.items or last.chain is not chain:
            return
        run = chain.new_run
        if run is None or not run.items or run.chain is not chain:
            chain.new_run = last
            chain.touched[last] = None
            return
        chain.touched[run] = None
        run.extend(last.items)
        run.at_risk += last.at_risk - len(last.items)
        self._assign(last.items, run)
        last.replace_by(run)
        chain.tail = run
        last.clear()
        self._leave_bucket(last)
        self._forget_run(last)

    def _append(self, chain: RequestChain[T], old: BlockRun[T] | None, piece: list[T], *, last: bool) -> None:
        """Appends a piece to a chain. `last`: whether this is the last piece of the use."""
        position, source = chain.length, chain.source
        chain.length += len(piece)
        chain.source = old
        if old is None:
            self._append_new(chain, piece, position, last=last)
        elif old is source and chain.tail is not None and chain.end_of_tail == position:
            self._extend_tail(chain.tail, old, piece)  # an earlier slice of a lookup has begun it
            chain.touched[chain.tail] = None
        elif old.items == piece:
            old.pause = self._mean_pause(old)
            old.chain.runs.pop(old, None)
            old.chain, old.start, old.at_risk = chain, position, len(piece)
            chain.attach(old)
            chain.source = None
        else:
            taken = self._add_run(chain, piece, position, self._mean_pause(old))
            if old.items:
                old.follow(taken)
            else:
                old.replace_by(taken)

    def _extend_tail(self, tail: BlockRun[T], old: BlockRun[T], piece: list[T]) -> None:
        """Adds the next blocks of a run to the tail of a chain, which has those before them."""
        if old.items == piece:
            old.clear()
            self._leave_bucket(old)
            self._forget_run(old)
        tail.extend(piece)
        self._assign(piece, tail)
        if not old.items:
            old.replace_by(tail)

    def _append_new(self, chain: RequestChain[T], piece: list[T], position: int, *, last: bool) -> None:
        """Appends blocks that no earlier request has used."""
        tail = [piece.pop()] if last else []
        if piece:
            run = chain.new_run
            if run and run.chain is chain and run.items and run.start + len(run.items) == position:
                run.extend(piece)
                self._assign(piece, run)
                chain.touched[run] = None
            else:
                chain.new_run = self._add_run(chain, piece, position, chain.pause)
        if tail:
            chain.last_block = self._add_run(chain, tail, position + len(piece), chain.pause)

    def _mean_pause(self, run: BlockRun[T]) -> float:
        """Returns the geometric mean of a run's pauses, with more weight for the recent ones."""
        pause = max(1.0, self._clock.now - run.chain.last_use)
        return math.sqrt(run.pause * pause) if run.pause else pause

    def _add_run(self, chain: RequestChain[T], items: list[T], position: int, pause: float) -> BlockRun[T]:
        run = BlockRun(chain, items, position, pause, self._unknown)
        self._assign(items, run)
        chain.attach(run)
        return run

    def _assign(self, items: Sequence[T], run: BlockRun[T]) -> None:
        for item in items:
            self._count += item.policy_node is None
            item.policy_node = run

    def _refresh(self, chain: RequestChain[T]) -> None:
        """Resets the age of a request's runs to 0, and determines their kinds again."""
        chain.last_use = self._clock.now
        touched, chain.touched = chain.touched, {}
        if len(touched) < len(chain.runs) > _REFRESHED:
            self._refresh_runs(touched)
            self._stale.used(chain)
        else:
            self._refresh_runs(chain.runs)
        if stale := self._stale.take(len(touched) + _REFRESHED):
            self._refresh_runs(stale)

    def _refresh_runs(self, runs: Iterable[BlockRun[T]]) -> None:
        for run in runs:
            if run.at_risk:
                run.restart_age()
                run.kind = self._classify(run)
                self._put_in_bucket(run)
                self._schedule(run)

    def _close(self, chain: RequestChain[T]) -> None:
        """Called at the end of a request."""
        self._stale.closed(chain)
        chain.close()

    def _classify(self, run: BlockRun[T]) -> Kind:
        chain = run.chain
        if run is chain.last_block:
            return self._model.kind(("end", 0))
        growth = (chain.length - chain.matched_length).bit_length()
        return self._model.kind(
            ("turn", min(chain.turn, _MAX_TURN)),
            ("growth", min(growth, _MAX_GROWTH) // 2),
            ("pause", max(1, (int(run.pause) >> 4).bit_length()) if run.pause else 0),
        )

    def _age_runs(self, left: int) -> None:
        """Moves at most `left` runs to their next age bins, those in high bins first."""
        for schedule in reversed(list(self._schedules.values())):
            while schedule and left:
                run = next(iter(schedule))
                if run.due > self._clock.now:
                    break
                left -= 1
                self._unschedule(run)
                if not run.at_risk:
                    continue
                self._count_misses(run)
                if self._clock.now < run.chain.last_use + BIN_ENDS[-1]:
                    self._put_in_bucket(run)
                    self._schedule(run)
                else:
                    run.kind.misses[-1] += run.at_risk

    def _count_misses(self, run: BlockRun[T]) -> None:
        """Sets the bin for a run's age, and counts a miss in each bin that the run has passed."""
        run.restart_age()
        number, age = run.bin, self._clock.now - run.chain.last_use
        while age >= BIN_ENDS[number] and number + 1 < BINS:
            run.kind.misses[number] += run.at_risk
            number += 1
        run.bin = number

    def _learn_step(self) -> None:
        if self._fit is None:
            if self._clock.now < self._next_fit:
                return
            self._next_fit = self._clock.now + max(_MIN_LEARNING_PERIOD, self._count // 2)
            self._fit = self._model.fit()
        try:
            kind = next(self._fit)
        except StopIteration:
            self._fit = None
            return
        if kind is not None:
            for number in range(BINS):
                bucket = self._buckets.get((kind, number))
                if bucket is not None and bucket.runs:
                    self._unrank(bucket)
                    self._rank(bucket)

    def _schedule(self, run: BlockRun[T]) -> None:
        """Schedules when a run leaves its bin (see `_AGE_RESOLUTION`)."""
        due = run.chain.last_use + max(BIN_ENDS[run.bin], self._count // _AGE_RESOLUTION)
        if due == run.due and run.schedule is not None:
            return
        self._unschedule(run)
        run.due = due
        run.schedule = self._schedules[run.bin]
        run.schedule[run] = None

    def _unschedule(self, run: BlockRun[T]) -> None:
        schedule, run.schedule = run.schedule, None
        if schedule is not None:
            del schedule[run]

    def _put_in_bucket(self, run: BlockRun[T]) -> None:
        """Moves a run to the bucket of its kind and bin. A run without items is in no bucket."""
        self._leave_bucket(run)
        if not run.items:
            return
        bucket = self._buckets.get((run.kind, run.bin))
        if bucket is None:
            bucket = self._buckets[run.kind, run.bin] = RankBucket(run.kind, run.bin, len(self._buckets))
        if not bucket.runs:
            self._rank(bucket)
        bucket.runs[run] = None
        run.bucket = bucket

    def _leave_bucket(self, run: BlockRun[T]) -> None:
        bucket, run.bucket = run.bucket, None
        if bucket is not None:
            del bucket.runs[run]
            if not bucket.runs:
                self._unrank(bucket)

    def _rank(self, bucket: RankBucket[T]) -> None:
        bucket.rank = (bucket.kind.values[bucket.bin], bucket.rank[1])
        insort(self._ranked, (bucket.rank, bucket))

    def _unrank(self, bucket: RankBucket[T]) -> None:
        del self._ranked[bisect_left(self._ranked, (bucket.rank,))]

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > max(_MIN_GHOSTS, self._count):
            run = self._ghosts.popitem(last=False)[1]
            run.ghosts -= 1
            self._forget_run(run)

    def _forget_run(self, run: BlockRun[T]) -> None:
        """Stops counting misses of a run without items and ghosts: its reuse cannot be detected."""
        if not run.items and not run.ghosts:
            run.at_risk = 0
            run.chain.runs.pop(run, None)
            self._unschedule(run)
