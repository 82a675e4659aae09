"""Block layouts, compared with a NumPy gather."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from devices.kv import Array, gather, pieces_of, shape_of
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cuda.device.copy_plan import Planner
from kvtier.cuda.device.layout import BlockLayout, LayoutError, LayoutRun, TensorShape, describe
from kvtier.cuda.host.copy import copy_batch

CHUNK = 1 << 10


@st.composite
def tensors(draw: st.DrawFn) -> list[Array]:
    """Tensors of one group with random axes and padding; some are views of one allocation."""
    num_blocks = draw(st.integers(1, 5))
    layers = draw(st.integers(1, 3))
    rest = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.float32]))
    shared = draw(st.booleans())
    axes = ([layers] if shared else []) + [num_blocks, *rest]
    names = list(range(len(axes)))
    order = draw(st.permutations(names))
    sizes = {name: axes[name] for name in names}
    padded = [sizes[name] + draw(st.integers(0, 2)) for name in order]
    block = 1 if shared else 0

    def make() -> Array:
        raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 250, padded).astype(dtype)
        cut = raw[tuple(slice(0, sizes[name]) for name in order)]
        return cut.transpose([order.index(name) for name in names])

    if shared:
        whole = make()
        made = [whole[layer] for layer in range(layers)]
        block -= 1
    else:
        made = [make() for _ in range(layers)]
    return [np.moveaxis(tensor, block, 0) for tensor in made]


def addresses_of(tensors: Sequence[Array]) -> list[int]:
    return [tensor.__array_interface__["data"][0] for tensor in tensors]


@given(tensors())
def test_pieces_are_the_block(made: list[Array]) -> None:
    """The concatenated pieces of a block are its bytes, for all axes, padding and strides."""
    layout = describe([shape_of(tensor) for tensor in made])
    starts = addresses_of(made)
    for block in range(layout.num_blocks):
        pieces = list(pieces_of(layout, block))
        found = b"".join(ctypes.string_at(starts[piece.buffer] + piece.offset, piece.nbytes) for piece in pieces)
        assert found == gather(made, block)
        assert len(found) == layout.part_bytes


@given(tensors())
def test_pieces_are_as_few_as_can_be(made: list[Array]) -> None:
    """Within a tensor no two consecutive pieces are adjacent."""
    layout = describe([shape_of(tensor) for tensor in made])
    for before, after in pairwise(pieces_of(layout, 0)):
        assert before.buffer != after.buffer or before.offset + before.nbytes != after.offset


@given(tensors())
def test_no_piece_ends_behind_the_end(made: list[Array]) -> None:
    """`end` is the end of the last piece in a buffer."""
    layout = describe([shape_of(tensor) for tensor in made])
    pieces = [piece for block in range(layout.num_blocks) for piece in pieces_of(layout, block)]
    for buffer in range(len(made)):
        assert layout.end(buffer) == max(piece.offset + piece.nbytes for piece in pieces if piece.buffer == buffer)


@given(tensors())
def test_moving_to_one_allocation_changes_no_byte(made: list[Array]) -> None:
    """For views of one allocation, the rebased layout has the same bytes in the same order."""
    layout = describe([shape_of(tensor) for tensor in made])
    starts = addresses_of(made)
    base = min(starts)
    moved = layout.rebased([(0, start - base) for start in starts])
    for block in range(layout.num_blocks):
        found = [base + piece.offset + byte for piece in pieces_of(moved, block) for byte in range(piece.nbytes)]
        pieces = pieces_of(layout, block)
        assert found == [starts[piece.buffer] + piece.offset + byte for piece in pieces for byte in range(piece.nbytes)]


@given(tensors(), st.data())
def test_plans_store_and_load_what_a_gather_does(made: list[Array], data: st.DataObject) -> None:
    """A plan copies blocks to slots as a gather does, and restores the tensors in reverse."""
    layout = describe([shape_of(tensor) for tensor in made])
    size = layout.part_bytes
    blocks = data.draw(st.lists(st.integers(0, layout.num_blocks - 1), unique=True, min_size=1))
    slots = data.draw(st.lists(st.integers(0, 7), unique=True, min_size=len(blocks), max_size=len(blocks)))
    region = ctypes.create_string_buffer(8 * size)
    planner = Planner(layout, addresses_of(made), ctypes.addressof(region), 8 * size, chunk_bytes=CHUNK)
    plan = planner.plan(blocks, [slot * size for slot in slots])
    assert sum(plan.sizes) == size * len(blocks)
    copy_batch(plan.host, plan.device, plan.sizes)
    before = [gather(made, block) for block in blocks]
    assert [region.raw[slot * size : slot * size + size] for slot in slots] == before
    for tensor in made:
        tensor[...] = 0
    copy_batch(plan.device, plan.host, plan.sizes)
    assert [gather(made, block) for block in blocks] == before


@given(st.integers(1, 700), st.lists(st.integers(0, 9), unique=True, min_size=1), st.integers(1, 3))
def test_no_copy_crosses_a_chunk(page: int, blocks: list[int], layers: int) -> None:
    """The driver would refuse a copy across a registration boundary."""
    layout = describe([TensorShape((10, page), (page, 1), 1)] * layers)
    planner = Planner(layout, [0] * layers, 1 << 30, 10 * layers * page, chunk_bytes=CHUNK)
    plan = planner.plan(blocks, [block * layers * page for block in blocks])
    for host, size in zip(plan.host, plan.sizes, strict=True):
        assert size > 0
        assert (host - (1 << 30)) // CHUNK == (host - (1 << 30) + size - 1) // CHUNK


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 5), st.integers(1, 100))
def test_a_plan_splits_into_pieces_of_bounded_size(sizes: list[int], max_copies: int, max_bytes: int) -> None:
    """The concatenated pieces are the plan; each is bounded, except for one large copy."""
    layout = BlockLayout(1, tuple(LayoutRun(index, 0, 1, size) for index, size in enumerate(sizes)))
    plan = Planner(layout, list(range(0, 1000 * len(sizes), 1000)), 0, 1 << 20).plan([0], [0])
    pieces = list(plan.split(max_copies, max_bytes))
    for column in range(3):
        assert [value for piece in pieces for value in piece[column]] == list(plan[column])
    for piece in pieces:
        assert len(piece.sizes) <= max_copies
        assert sum(piece.sizes) <= max_bytes or len(piece.sizes) == 1


# A small model: 6 blocks of 16 tokens, 4 heads of 8 elements of 2 bytes, K and V.
BLOCKS, TOKENS, HEADS, DIM, LAYERS = 6, 16, 4, 8, 3
PAGE = 2 * TOKENS * HEADS * DIM * 2


def contiguous(sizes: Sequence[int], block_axis: int) -> TensorShape:
    array = np.empty(sizes, np.uint16)
    return TensorShape(array.shape, tuple(stride // 2 for stride in array.strides), 2, block_axis)


@pytest.mark.parametrize(
    ("tensors", "runs"),
    [
        pytest.param(
            [contiguous((BLOCKS, 2, TOKENS, HEADS, DIM), 0)] * LAYERS,
            [LayoutRun(layer, 0, PAGE, PAGE) for layer in range(LAYERS)],
            id="K and V of a block joined: a piece per layer",
        ),
        pytest.param(
            [contiguous((2, BLOCKS, TOKENS, HEADS, DIM), 1)],
            [LayoutRun(0, 0, PAGE // 2, PAGE // 2, 2, BLOCKS * PAGE // 2)],
            id="K and V apart: two pieces, half a tensor from each other",
        ),
        pytest.param(
            [contiguous((BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM), 0)],
            [LayoutRun(0, 0, LAYERS * PAGE, LAYERS * PAGE)],
            id="all layers of a block together: one piece",
        ),
        pytest.param(
            [contiguous((LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM), 1)],
            [LayoutRun(0, 0, PAGE, PAGE, LAYERS, BLOCKS * PAGE)],
            id="layers carved out of one allocation: a piece per layer at even distances",
        ),
        pytest.param(
            [contiguous((2, HEADS, BLOCKS, TOKENS, DIM), 2)],
            [LayoutRun(0, 0, PAGE // 8, PAGE // 8, 8, BLOCKS * PAGE // 8)],
            id="heads outside of blocks: a piece per head",
        ),
    ],
)
def test_layouts_of_vllm(tensors: list[TensorShape], runs: list[LayoutRun]) -> None:
    """Each of vLLM's layouts becomes the fewest possible runs."""
    assert list(describe(tensors).runs) == runs


def test_layers_in_one_allocation_become_one_run() -> None:
    """Evenly spaced layers of one allocation become one run."""
    layout = describe([contiguous((BLOCKS, 2, TOKENS, HEADS, DIM), 0)] * LAYERS)
    moved = layout.rebased([(0, 100 + layer * BLOCKS * PAGE) for layer in range(LAYERS)])
    assert moved.runs == (LayoutRun(0, 100, PAGE, PAGE, LAYERS, BLOCKS * PAGE),)


def test_blocks_in_a_row_are_one_copy() -> None:
    """If a part is one piece, adjacent blocks and slots are moved by one copy."""
    layout = describe([contiguous((BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM), 0)])
    size = layout.part_bytes
    plan = Planner(layout, [0], 0, 8 * size).plan([2, 3, 4, 0], [0, size, 2 * size, 3 * size])
    assert (list(plan.device), list(plan.host), list(plan.sizes)) == ([2 * size, 0], [0, 3 * size], [3 * size, size])


@pytest.mark.parametrize(
    ("num_blocks", "run"),
    [
        (0, LayoutRun(0, 0, 8, 8)),
        (2, LayoutRun(0, 0, 7, 8)),
        (2, LayoutRun(0, 0, 8, 8, 2, 4)),
        (3, LayoutRun(0, 0, 8, 8, 2, 16)),
        (3, LayoutRun(0, 0, 12, 8, 2, 8)),
    ],
)
def test_overlapping_blocks_are_refused(num_blocks: int, run: LayoutRun) -> None:
    """A load into one block must not write to another."""
    with pytest.raises(LayoutError):
        BlockLayout(num_blocks, (run,))


@pytest.mark.parametrize(
    "shape", [TensorShape((4, 0), (1, 1), 2), TensorShape((4, 3), (1, 0), 2), TensorShape((4, 3), (3, -1), 2)]
)
def test_odd_tensors_are_refused(shape: TensorShape) -> None:
    """Tensors that are empty, repeat elements or run backwards are refused."""
    with pytest.raises(LayoutError):
        describe([shape])


def test_tensors_of_one_group_have_the_same_blocks() -> None:
    """Layers with different numbers of blocks are refused."""
    with pytest.raises(LayoutError, match="blocks"):
        describe([TensorShape((4, 8), (8, 1), 2), TensorShape((5, 8), (8, 1), 2)])


@pytest.mark.parametrize(("block", "offset"), [(-1, 0), (BLOCKS, 0), (0, -1), (0, 8 * PAGE - PAGE + 1)])
def test_blocks_and_slots_out_of_range_are_refused(block: int, offset: int) -> None:
    """No plan accesses memory outside of the engine's blocks and the region."""
    planner = Planner(describe([contiguous((BLOCKS, 2, TOKENS, HEADS, DIM), 0)]), [0], 0, 8 * PAGE)
    with pytest.raises(LayoutError):
        planner.plan([block], [offset])
    with pytest.raises(LayoutError, match="buffers"):
        Planner(BlockLayout(1, (LayoutRun(1, 0, 8, 8),)), [0], 0, 8)
