"""The policy made for KV caches: keeps what is worth the most hits per block and unit of time.

A conversation comes back with its chain grown by a turn; an agent's system prompt comes back with another tail. So blocks
are looked at as runs: what one request used, cut where the past of the blocks differs. Of a run it is known

- how often its blocks were used: more often than their conversation had turns means that they are *shared*;
- the conversation's *turn*: how often, one upon the other, a request went on where another had ended;
- by how many blocks it *grew* this time (short turns are followed by more turns, and sooner);
- whether it is the *end*: an engine may hash a last block that is not full, which nobody asks for again.

How soon blocks of such a kind come back, if at all, is learned on the job (`reuse`), from what is here and from ghosts. The run
that is worth the least, by its kind and age, goes first, tail before head.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Generic

from .open_requests import OpenRequests
from .policy import T
from .reuse_model import BIN_ENDS, BINS, Kind, ReuseModel
from .runs import BlockRun, RankBucket, RequestChain

__all__ = ["Forecast"]

_MIN_GHOSTS = 1024
_GHOST_EVERY = 8
"""Of the blocks of a run that went, every eighth leaves a ghost, and those where the next turn would go on."""
_MIN_ROUND = 2048
"""Uses from one round of learning to the next; half as many as there are items, if that is more."""
_AGES = 16
"""Ages are told apart from this part of a turnover of all items on, so that the work per use does not grow with their number."""
_MAX_TURNS = 5
_MAX_GROWTH = 8
_MAX_SHARED = 10


class Forecast(Generic[T]):
    """Least worth first."""

    def __init__(self) -> None:
        self._model = ReuseModel()
        self._unknown = self._model.kind()
        self._requests = OpenRequests[RequestChain[T]](RequestChain, RequestChain.close)
        self._count = 0
        self._ghosts: OrderedDict[Hashable, BlockRun[T]] = OrderedDict()
        self._cells: dict[tuple[Kind, int], RankBucket[T]] = {}
        self._ranked: list[tuple[tuple[float, int], RankBucket[T]]] = []
        """The cells that hold runs, by rank. Ranks differ, so cells are never compared."""
        self._due: defaultdict[int, deque[tuple[int, BlockRun[T]]]] = defaultdict(deque)
        """Per bin the runs that came into it, in that order, by when they leave it; and entries that have been overtaken."""
        self._clock = 0
        self._next_round = _MIN_ROUND
        self._round: Iterator[Kind | None] | None = None

    def use(self, items: Sequence[T], request: Hashable = None) -> None:
        """Moves the items to the request's runs, and all of these to the young end."""
        trail = self._requests.of(request)
        pieces = self._pieces(items, trail)
        reused: dict[BlockRun[T], list[list[T]]] = {}
        for old, piece in pieces:
            if old is not None:
                reused.setdefault(old, []).append(piece)
        for run, taken in reused.items():
            self._count_reuse(run, taken)
        self._follow(trail, pieces)
        self._fold_end(trail)
        for number, (old, piece) in enumerate(pieces, start=1):
            self._append(trail, old, piece, last=number == len(pieces))
        self._renew(trail)
        if request is None:
            trail.close()
        self._clock += sum(len(piece) for _, piece in pieces)
        self._advance()
        self._learn()

    def finish(self, request: Hashable) -> None:
        """Forgets the request's name."""
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        """Takes an item out of its run; some leave ghosts, which tell when the chain comes back."""
        run: BlockRun[T] | None = item.policy_node
        if run is None:
            return
        item.policy_node = None
        self._count -= 1
        index = len(run.items) - 1
        if run.items[index] is item:
            run.items.pop()
        else:
            index = run.items.index(item)
            del run.items[index]
        place = run.start + index
        if place % _GHOST_EVERY == 0 or place >= run.trail.length - 2 or not run.items:
            self._ghosts[item.name] = run
            run.ghosts += 1
            self._trim()
        if not run.items:
            self._leave(run)
            self._bury(run)

    def victims(self) -> Iterator[T]:
        """Yields from the cell that is worth the least, of each run the tail first."""
        for _, cell in self._ranked:
            for run in cell.in_order():
                yield from reversed(run.items)

    def oldest(self) -> T | None:
        """Returns the tail of the run that was used the longest ago."""
        heads = (next(iter(cell.runs)) for _, cell in self._ranked)
        run = min(heads, key=lambda run: run.trail.time, default=None)
        return run.items[-1] if run else None

    def __len__(self) -> int:
        return self._count

    def _pieces(self, items: Sequence[T], trail: RequestChain[T]) -> list[tuple[BlockRun[T] | None, list[T]]]:
        """Cuts items where their past differs, and leaves out those that this request used before."""
        pieces: list[tuple[BlockRun[T] | None, list[T]]] = []
        place = 0
        while place < len(items):
            run: BlockRun[T] | None = items[place].policy_node
            end = _end_if_whole(items, place, run)  # as it usually is, and nothing is to be looked up
            if not end:
                end = place + 1
                while end < len(items) and items[end].policy_node is run:
                    end += 1
            piece = list(items[place:end])
            place = end
            if run is None:
                self._recognise(piece, trail, pieces)
            elif run.trail is not trail:
                pieces.append((run, piece))
        return pieces

    def _recognise(
        self, items: list[T], trail: RequestChain[T], pieces: list[tuple[BlockRun[T] | None, list[T]]]
    ) -> None:
        """Adds pieces for items that are not here; a ghost speaks for those before it as well."""
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
            if run.trail is trail:
                continue
            if pieces and pieces[-1][0] is run:
                pieces[-1][1].extend(piece)
            else:
                pieces.append((run, piece))
            piece = []
        if piece:
            pieces.append((None, piece))

    def _count_reuse(self, run: BlockRun[T], pieces: list[list[T]]) -> None:
        """Tells the model, and takes from a run at once what others take over: usually its head, in one piece."""
        self._grow_old(run)
        items = pieces[0] if len(pieces) == 1 else list(chain.from_iterable(pieces))
        run.kind.hits[run.bin] += len(items)
        if run.items == items and len(pieces) == 1 and not run.ghosts:
            return  # nothing of it stays behind: `_append` takes it over as it is
        run.alive = max(0, run.alive - len(items))
        if run.items:
            here = items
            if run.items[: len(items)] != items:
                here = [item for item in items if item.policy_node is run]
            if run.items[: len(here)] == here:
                del run.items[: len(here)]
            else:
                taken = set(here)
                run.items = [item for item in run.items if item not in taken]
            run.start += len(here)
            self._place(run)
        self._bury(run)

    def _follow(self, trail: RequestChain[T], pieces: list[tuple[BlockRun[T] | None, list[T]]]) -> None:
        """Finds out how far the chain is known, and whether it goes on where an earlier request ended."""
        place = trail.length
        for old, piece in pieces:
            place += len(piece)
            if old is not None:
                trail.known = place
                goes_on = 1 < trail.known >= old.trail.length - 1
                trail.turn = old.trail.turn + 1 if goes_on else 0

    def _fold_end(self, trail: RequestChain[T]) -> None:
        """Makes the last block a block like any other: the request goes on."""
        end, trail.end = trail.end, None
        if end is None or not end.items or end.trail is not trail:
            return
        body = trail.body
        if body is None or not body.items or body.trail is not trail:
            trail.body = end
            return
        body.items += end.items
        body.alive += end.alive
        self._take_in(end.items, body)
        end.items, end.alive = [], 0
        self._leave(end)

    def _append(self, trail: RequestChain[T], old: BlockRun[T] | None, piece: list[T], *, last: bool) -> None:
        place = trail.length
        trail.length += len(piece)
        if old is not None and old.items == piece:
            old.trail, old.start, old.alive = trail, place, len(piece)
            old.uses += 1
            trail.runs.append(old)
            return
        if old is not None:
            self._start(trail, piece, place, old.uses + 1)
            return
        tail = [piece.pop()] if last else []
        if piece:
            body = trail.body
            if body and body.trail is trail and body.items and body.start + len(body.items) == place:
                body.items += piece
                body.alive += len(piece)
                self._take_in(piece, body)
            else:
                trail.body = self._start(trail, piece, place, 1)
        if tail:
            trail.end = self._start(trail, tail, place + len(piece), 1)

    def _start(self, trail: RequestChain[T], items: list[T], place: int, uses: int) -> BlockRun[T]:
        run = BlockRun(trail, items, place, uses, self._unknown)
        trail.runs.append(run)
        self._take_in(items, run)
        return run

    def _take_in(self, items: Sequence[T], run: BlockRun[T]) -> None:
        """Puts items into a run, be they new or another one's."""
        for item in items:
            self._count += item.policy_node is None
            item.policy_node = run

    def _renew(self, trail: RequestChain[T]) -> None:
        """Makes a request's runs young again, of the kind that they are by now."""
        trail.time = self._clock
        trail.runs = [run for run in trail.runs if run.alive and run.trail is trail]
        for run in trail.runs:
            run.kind, run.bin = self._kind_of(run), 0
            self._place(run)
            self._wait(run)

    def _kind_of(self, run: BlockRun[T]) -> Kind:
        trail = run.trail
        if run is trail.end:
            return self._model.kind(("end", 0))
        if run.uses > trail.turn + 1:
            return self._model.kind(("shared", min((run.uses - 1).bit_length(), _MAX_SHARED)))
        growth = (trail.length - trail.known).bit_length()
        return self._model.kind(("turn", min(trail.turn, _MAX_TURNS)), ("growth", min(growth, _MAX_GROWTH)))

    def _advance(self) -> None:
        """Moves runs to the bin of their age."""
        for due in list(self._due.values()):
            while due and due[0][0] <= self._clock:
                when, run = due.popleft()
                if not run.alive or when != run.due:
                    continue
                self._grow_old(run)
                if self._clock < run.trail.time + BIN_ENDS[-1]:
                    self._place(run)
                    self._wait(run)
                else:
                    run.kind.misses[-1] += run.alive

    def _grow_old(self, run: BlockRun[T]) -> None:
        """Counts the bins that a run has come through without being used."""
        number, age = run.bin, self._clock - run.trail.time
        while age >= BIN_ENDS[number] and number + 1 < BINS:
            run.kind.misses[number] += run.alive
            number += 1
        run.bin = number

    def _learn(self) -> None:
        """Takes a step of the round of learning, if one runs or is due."""
        if self._round is None:
            if self._clock < self._next_round:
                return
            self._next_round = self._clock + max(_MIN_ROUND, self._count // 2)
            self._round = self._model.learn()
        try:
            kind = next(self._round)
        except StopIteration:
            self._round = None
            return
        if kind is not None:
            for number in range(BINS):
                cell = self._cells.get((kind, number))
                if cell is not None and cell.runs:
                    self._strike(cell)
                    self._list(cell)

    def _wait(self, run: BlockRun[T]) -> None:
        """Sees to it that a run leaves its bin; the first ones together, for what is so young need not be told apart."""
        due = run.trail.time + max(BIN_ENDS[run.bin], self._count // _AGES)
        if due != run.due:
            run.due = due
            self._due[run.bin].append((due, run))

    def _place(self, run: BlockRun[T]) -> None:
        """Puts a run into the cell of its kind and age, if it has items."""
        self._leave(run)
        if not run.items:
            return
        cell = self._cells.get((run.kind, run.bin))
        if cell is None:
            cell = self._cells[run.kind, run.bin] = RankBucket(run.kind, run.bin, len(self._cells))
        if not cell.runs:
            self._list(cell)
        cell.runs[run] = None
        run.cell = cell

    def _leave(self, run: BlockRun[T]) -> None:
        cell, run.cell = run.cell, None
        if cell is not None:
            del cell.runs[run]
            if not cell.runs:
                self._strike(cell)

    def _list(self, cell: RankBucket[T]) -> None:
        """Ranks a cell by what its blocks are worth now."""
        cell.rank = (cell.kind.worth[cell.bin], cell.rank[1])
        insort(self._ranked, (cell.rank, cell))

    def _strike(self, cell: RankBucket[T]) -> None:
        """Takes a cell out of the ranking."""
        del self._ranked[bisect_left(self._ranked, (cell.rank,))]

    def _trim(self) -> None:
        while len(self._ghosts) > max(_MIN_GHOSTS, self._count):
            run = self._ghosts.popitem(last=False)[1]
            run.ghosts -= 1
            self._bury(run)

    def _bury(self, run: BlockRun[T]) -> None:
        """Gives up a run of which nothing is left to be recognised by."""
        if not run.items and not run.ghosts:
            run.alive = 0


def _end_if_whole(items: Sequence[T], place: int, run: BlockRun[T] | None) -> int:
    """Returns where a run ends whose items all follow from a place on, in their order; 0 if they do not."""
    if run is None or not run.items:
        return 0
    end = place + len(run.items)
    # Where runs take turns, none is compared that does not end there.
    if end > len(items) or items[end - 1] is not run.items[-1] or items[place:end] != run.items:
        return 0
    return end
