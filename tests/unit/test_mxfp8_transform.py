"""MXFP8ReshardTransform, called as a refit calls it: cuts, layouts of scales, and everything it refuses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refitd import CastTransform, MXFP8Buffer, MXFP8ReshardTransform, RefusedError
from refitd.mxfp8.format import Rounding
from refitd.mxfp8.transform import Coverage, ensure_sendable, scale_slices
from refitd.transforms import Slices
from tests.support.mxfp8 import quantized_once

WHOLE = (torch.randn(20, 160, generator=torch.Generator().manual_seed(5)) * 0.02).to(torch.bfloat16)


def random_cut(rng: random.Random, shape: tuple[int, ...], step: int = 1) -> list[Slices]:
    """Return boxes that cover a tensor, split anywhere, or in whole steps along the last dimension."""
    boxes: list[Slices] = [tuple(slice(0, extent) for extent in shape)]
    for _ in range(rng.randrange(14)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        low, high = box[dim].start, box[dim].stop
        every = step if dim == len(shape) - 1 else 1
        at = low + rng.randrange((high - low) // every) * every
        parts = [slice(low, at), slice(at, high)] if low < at else [slice(low, high)]
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in parts]
    rng.shuffle(boxes)
    return boxes


def deliver(transform: MXFP8ReshardTransform, name: str, whole: torch.Tensor, boxes: list[Slices]) -> None:
    """Call the transform as a refit does on one rank."""
    sender = MXFP8ReshardTransform({name}, {}, "", transform._on_send, rounding=transform._rounding)
    sent = [sender.prepare_send(name, box, whole) for box in boxes]
    transform.begin_recv(name, boxes)
    received = [transform.prepare_recv(name, box) for box in boxes]
    for theirs, ours in zip(sent, received, strict=True):
        for source, target in zip(theirs, ours, strict=True):
            target.copy_(source)
    for box, buffers in zip(boxes, received, strict=True):
        transform.finalize_recv(name, box, buffers)
    transform.finish_recv(name)


@pytest.mark.parametrize("shape", [(20, 160), (3, 5, 64), (96,), (2, 1, 3, 32)])
@pytest.mark.parametrize("on_send", [False, True])
@pytest.mark.parametrize("is_swizzled", [False, True])
def test_any_cut_in_any_order_gives_the_bytes_of_one_conversion(
    shape: tuple[int, ...], on_send: bool, is_swizzled: bool
) -> None:
    rng = random.Random(str((shape, on_send, is_swizzled)))
    for number in range(25):
        whole = (torch.randn(shape) * 0.02).to(torch.bfloat16)
        rounding = list(Rounding)[number % 2]
        buffer = MXFP8Buffer.empty(shape, is_swizzled=is_swizzled)
        transform = MXFP8ReshardTransform({"w"}, {"w": buffer}, "", on_send, rounding=rounding)
        for values in (whole * 3, whole):  # the second time over the results of the first
            deliver(transform, "w", values, random_cut(rng, shape, 32 if on_send else 1))
        data, scale = quantized_once(whole, rounding, is_swizzled=is_swizzled)
        assert torch.equal(buffer.data.view(-1), data.view(-1))
        assert torch.equal(buffer.scale.view(-1), scale.view(-1))


def test_row_major_scales_are_there_with_each_piece_and_swizzled_ones_after_the_last() -> None:
    halves = [(slice(0, 10), slice(0, 160)), (slice(10, 20), slice(0, 160))]
    for is_swizzled in (False, True):
        buffer = MXFP8Buffer.empty((20, 160), is_swizzled=is_swizzled)
        transform = MXFP8ReshardTransform({"w"}, {"w": buffer})
        seen = []
        for box in halves:
            (room,) = transform.prepare_recv("w", box)
            room.copy_(WHOLE[box])
            transform.finalize_recv("w", box, [room])
            seen.append(int((buffer.scale != 0).sum()))
        assert seen == ([0, 100] if is_swizzled else [50, 100])


def test_pieces_of_another_shape_are_whole_blocks_too() -> None:
    """The plan cuts a transposed tensor into columns: 32 elements in a row are a block wherever they come from."""
    buffer = MXFP8Buffer.empty((4, 64))
    transform = MXFP8ReshardTransform({"w"}, {"w": buffer}, "", True)
    whole = WHOLE[:4, :64]
    transposed = whole.t().contiguous()
    boxes = [(slice(row, row + 1), slice(0, 64)) for row in range(4)]
    transform.begin_recv("w", boxes)
    for row, box in enumerate(boxes):
        sent = transform.prepare_send("w", (slice(0, 64), slice(row, row + 1)), transposed)
        transform.finalize_recv("w", box, sent)
    transform.finish_recv("w")
    data, scale = quantized_once(whole, Rounding.RCEIL)
    assert torch.equal(buffer.data, data) and torch.equal(buffer.scale, scale)


def test_elements_that_come_twice_or_never_are_refused_before_anything_arrives() -> None:
    transform = MXFP8ReshardTransform({"w"}, {"w": MXFP8Buffer.empty((8, 64))})
    top, bottom = (slice(0, 4), slice(0, 64)), (slice(4, 8), slice(0, 64))
    with pytest.raises(RefusedError, match=r"w: \[3:8, 0:64\] and \[0:4, 0:64\] overlap"):
        transform.begin_recv("w", [top, (slice(3, 8), slice(0, 64))])
    with pytest.raises(RefusedError, match=r"w: 256 of the 512 elements of \[8, 64\] are in none of the 1 pieces"):
        transform.begin_recv("w", [bottom])
    with pytest.raises(RefusedError, match=r"w: \[4:9, 0:64\] is no box inside \[8, 64\]"):
        transform.begin_recv("w", [top, (slice(4, 9), slice(0, 64))])
    transform.begin_recv("w", [top, bottom])
    (room,) = transform.prepare_recv("w", top)
    transform.finalize_recv("w", top, [room.zero_()])
    with pytest.raises(RefusedError, match="overlap"):
        transform.finalize_recv("w", top, [room])
    with pytest.raises(RefusedError, match="256 of the 512 elements"):
        transform.finish_recv("w")


def test_a_transfer_that_failed_leaves_nothing_behind() -> None:
    buffer = MXFP8Buffer.empty((20, 160), is_swizzled=True)
    transform = MXFP8ReshardTransform({"w"}, {"w": buffer})
    half = (slice(0, 20), slice(0, 50))
    transform.begin_recv("w", [half, (slice(0, 20), slice(50, 160))])
    transform.finalize_recv("w", half, [torch.ones(20, 50, dtype=torch.bfloat16)])
    deliver(transform, "w", WHOLE, random_cut(random.Random(1), (20, 160)))
    assert torch.equal(buffer.data, quantized_once(WHOLE, Rounding.RCEIL)[0])


def test_coverage_counts_many_pieces() -> None:
    coverage = Coverage("w", (40, 64))
    for row in range(40):
        for column in range(0, 64, 32):
            coverage.add(((row, row + 1), (column, column + 32)))
    coverage.check_complete()
    with pytest.raises(RefusedError, match="overlap"):
        coverage.add(((39, 40), (63, 64)))


@pytest.mark.parametrize("on_send", [False, True])
def test_senders_refuse_cut_blocks_by_name_and_receivers_put_them_together(on_send: bool) -> None:
    transform = MXFP8ReshardTransform({"w"}, {"w": MXFP8Buffer.empty((20, 160))}, "", on_send)
    boxes = [(slice(0, 20), slice(0, 80)), (slice(0, 20), slice(80, 160))]
    if not on_send:
        transform.begin_recv("w", boxes)
        return
    for call in (
        lambda: transform.begin_recv("w", boxes),
        lambda: transform.prepare_recv("w", boxes[0]),
        lambda: transform.prepare_send("w", (slice(0, 1), slice(0, 80)), WHOLE),
    ):
        with pytest.raises(RefusedError, match=r"w: a piece has .* cuts a block of 32.*convert_on_send=False"):
            call()


def test_scale_slices_count_blocks() -> None:
    assert scale_slices((slice(4, 8), slice(64, 128))) == (slice(4, 8), slice(2, 4))
    assert scale_slices((slice(None), slice(None, 96))) == (slice(None), slice(None, 3))
    assert scale_slices((slice(0, 2), 70)) == (slice(0, 2), 2)
    assert scale_slices((3, slice(0, 32)), block_size=16) == (3, slice(0, 2))


def te_tensor(**fields: Any) -> SimpleNamespace:
    """Return scales padded to 128 x 4, as in Transformer Engine's MXFP8Tensor."""
    scale = torch.zeros(128, 8, dtype=torch.uint8)
    return SimpleNamespace(_rowwise_data=torch.zeros(20, 160, dtype=torch.uint8), _rowwise_scale_inv=scale, **fields)


def test_tensors_of_transformer_engine_are_written_in_their_memory() -> None:
    tensor = te_tensor()
    deliver(MXFP8ReshardTransform({"w"}, {"w": tensor}), "w", WHOLE, random_cut(random.Random(2), (20, 160)))
    data, scale = quantized_once(WHOLE, Rounding.RCEIL)
    assert torch.equal(tensor._rowwise_data, data)
    assert torch.equal(tensor._rowwise_scale_inv[:20, :5], scale) and not tensor._rowwise_scale_inv[20:].any()

    swizzled = te_tensor(_with_gemm_swizzled_scales=True)
    deliver(MXFP8ReshardTransform({"w"}, {"w": swizzled}), "w", WHOLE, random_cut(random.Random(3), (20, 160)))
    _, scale = quantized_once(WHOLE, Rounding.RCEIL, is_swizzled=True)
    assert torch.equal(swizzled._rowwise_scale_inv.view(-1), scale)


def test_what_is_standard_is_sent_as_it_is_and_mxfp8_only_dequantized_if_asked_for() -> None:
    param = torch.nn.Parameter(WHOLE.clone())
    sendable = ensure_sendable(param)
    assert sendable.data_ptr() == param.data_ptr() and not sendable.requires_grad
    for is_swizzled in (False, True):
        held = MXFP8Buffer.empty((20, 160), is_swizzled=is_swizzled)
        held.quantize(WHOLE)
        with pytest.raises(RefusedError, match=r"decoder\.w: the source holds it in MXFP8"):
            ensure_sendable(held, name="decoder.w")  # type: ignore[arg-type]
        back = ensure_sendable(held, dequantize=True)  # type: ignore[arg-type]
        assert back.dtype == torch.bfloat16 and torch.equal(back, held.dequantize())
        assert ((back - WHOLE).abs() <= WHOLE.abs() / 16 + 1e-4).all()


def test_buffers_say_how_their_scales_are_rounded() -> None:
    floor = MXFP8Buffer(*(torch.zeros(size, dtype=torch.uint8) for size in ((20, 160), (20, 5))), Rounding.FLOOR)
    deliver(MXFP8ReshardTransform({"w"}, {"w": floor}), "w", WHOLE, [(slice(0, 20), slice(0, 160))])
    assert torch.equal(floor.scale, quantized_once(WHOLE, Rounding.FLOOR)[1])
    assert not torch.equal(floor.scale, quantized_once(WHOLE, Rounding.RCEIL)[1])


def parts(data: Any = (20, 160), scale: Any = (20, 5), *, dtype: Any = torch.uint8) -> SimpleNamespace:
    return SimpleNamespace(data=torch.zeros(data, dtype=dtype), scale=torch.zeros(scale, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (parts((20, 150)), "its shape is [20, 150], expected a last dimension that is a multiple of 32"),
        (parts(dtype=torch.bfloat16), "data is bfloat16 and scale uint8, expected float8_e4m3fn and float8_e8m0fnu"),
        (parts(scale=(20, 4)), "the scale of [20, 160] has shape [20, 4], expected [20, 5], or [1024]"),
        (parts(scale=(100,)), "has shape [100], expected [20, 5], or [1024] where it is swizzled"),
        (SimpleNamespace(data=parts().data.t().contiguous().t(), scale=parts().scale), "must be contiguous"),
        (torch.zeros(20, 160), "Tensor is no MXFP8 tensor; expected one with `data` and `scale`"),
        (SimpleNamespace(**vars(parts()), rounding="up"), "its rounding is 'up', expected one of rceil, floor"),
        (te_tensor(_columnwise_data=torch.zeros(1)), "it holds column-wise data, too"),
    ],
)
def test_buffers_that_cannot_be_written_are_refused_by_the_constructor(buffer: Any, said: str) -> None:
    with pytest.raises(RefusedError) as caught:
        MXFP8ReshardTransform({"x.w", "x.v"}, {"w": buffer, "v": buffer}, "x.")
    assert said in str(caught.value) and "w: " in str(caught.value) and "v: " in str(caught.value)


def test_a_shard_without_rows_is_a_buffer() -> None:
    """Of 2 rows over 3 ranks, one rank has none."""
    for held in (MXFP8Buffer(parts((0, 64), (0, 2)).data, parts((0, 64), (0, 2)).scale), MXFP8Buffer.empty((0, 64))):
        held.quantize(torch.zeros(0, 64, dtype=torch.bfloat16))
        assert held.dequantize().shape == (0, 64)
        MXFP8ReshardTransform({"w"}, {"w": held})
    swizzled = MXFP8Buffer.empty((0, 64), is_swizzled=True)
    swizzled.quantize(torch.zeros(0, 64, dtype=torch.bfloat16))
    assert swizzled.dequantize().shape == (0, 64)


def test_buffers_that_do_not_go_together_are_refused_by_the_constructor() -> None:
    plain, swizzled = MXFP8Buffer.empty((20, 160)), MXFP8Buffer.empty((20, 160), is_swizzled=True)
    with pytest.raises(RefusedError, match="b has swizzled scales and a has not; expected one layout for all"):
        MXFP8ReshardTransform({"a", "b"}, {"a": plain, "b": swizzled})
    with pytest.raises(RefusedError, match="a and b share memory"):
        MXFP8ReshardTransform({"a", "b"}, {"a": plain, "b": plain})
    with pytest.raises(RefusedError, match=r"w and decoder\.w both belong to the buffer 'w'"):
        MXFP8ReshardTransform({"decoder.w", "w"}, {"w": plain}, "decoder.")
    MXFP8ReshardTransform({"a"}, {"a": plain, "other": swizzled})  # which is not for this transform
    with pytest.raises(ValueError, match="up"):
        MXFP8ReshardTransform({"a"}, {}, rounding="up")  # type: ignore[arg-type]


def test_planning_asks_what_travels_and_names_what_cannot() -> None:
    buffers = {"w": MXFP8Buffer.empty((20, 160))}
    shape = torch.empty(20, 160)
    for on_send, dtype in ((False, torch.bfloat16), (True, torch.float8_e4m3fn)):
        transform = MXFP8ReshardTransform({"x.w", "x.v"}, buffers, "x.", on_send)
        assert transform.should_transform("x.w") and not transform.should_transform("w")
        assert transform.recv_dtype("x.w", shape) == dtype
        assert transform.send_dtype("x.w", WHOLE, "bfloat16") == (dtype if on_send else None)
        with pytest.raises(RefusedError, match=r"x.w: .* shape \[20, 160\], expected \[160, 20\]"):
            transform.recv_dtype("x.w", shape.t())
        with pytest.raises(RefusedError, match=r"x\.v: no persistent buffer is called 'v', there are: w"):
            transform.recv_dtype("x.v", shape)
    for dtype in ("float16", "int32", "float64", "float8_e4m3fn"):
        with pytest.raises(
            RefusedError, match=rf"x\.w: it is {dtype} on cpu, and bfloat16 or float32 can be converted"
        ):
            transform.send_dtype("x.w", WHOLE, dtype)
    with pytest.raises(RefusedError, match=r"x\.w: it is on meta"):
        transform.send_dtype("x.w", WHOLE.to("meta"), "bfloat16")


def test_casts_convert_on_either_side_and_refuse_by_name() -> None:
    held = {"w": torch.zeros(20, 160, dtype=torch.bfloat16)}
    whole, box = torch.randn(20, 160), (slice(0, 20), slice(0, 160))
    for on_send in (False, True):
        transform = CastTransform({"x.w"}, held, "x.", on_send)
        (sent,), (room,) = transform.prepare_send("x.w", box, whole), transform.prepare_recv("x.w", box)
        assert sent.dtype == room.dtype == (torch.bfloat16 if on_send else torch.float32)
        held["w"].zero_()
        transform.finalize_recv("x.w", box, [room.copy_(sent)])
        assert torch.equal(held["w"], whole.to(torch.bfloat16))
        with pytest.raises(RefusedError, match=r"x\.w: it is float16, expected float32"):
            transform.send_dtype("x.w", whole.half(), torch.float16)
        with pytest.raises(RefusedError, match=r"x\.w: its persistent tensor has shape"):
            transform.recv_dtype("x.w", whole.t())
    with pytest.raises(RefusedError, match="w is float32; expected bfloat16"):
        CastTransform({"w"}, {"w": whole})
