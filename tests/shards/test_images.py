"""Decoding: pixel values worked out by hand, and the reason given for everything that is no picture."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from shards.images import check_image, decode_rgb, sniff_format
from tests.shards.layouts import encoded, jpeg


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_format_is_read_from_the_bytes(name: str) -> None:
    data = encoded(Image.new("RGB", (4, 4), (200, 10, 10)), name)
    assert sniff_format(data) == name.lower()
    assert decode_rgb(data).size == (4, 4)


def test_text_and_nothing_have_no_format() -> None:
    assert sniff_format(b"") is None
    assert sniff_format(b"<!DOCTYPE html>") is None


def test_half_transparent_rgba_lies_over_white() -> None:
    # 255 * (1 - 128/255) + 255 * 128/255 = 255 for red; 127 for channels that are 0.
    data = encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 128)), "PNG")
    assert decode_rgb(data).getpixel((0, 0)) == (255, 127, 127)


def test_la_lies_over_white() -> None:
    data = encoded(Image.new("LA", (2, 2), (0, 51)), "PNG")  # 255 * (1 - 51/255) = 204
    assert decode_rgb(data).getpixel((1, 1)) == (204, 204, 204)


def test_transparent_palette_entry_becomes_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([0, 0, 255, 10, 20, 30])
    picture.putpixel((1, 0), 1)
    pixels = decode_rgb(encoded(picture, "PNG", transparency=0))
    assert [pixels.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (10, 20, 30)]


def test_transparent_colour_of_an_rgb_png_becomes_white() -> None:
    data = encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert decode_rgb(data).getpixel((0, 0)) == (255, 255, 255)


def test_cmyk() -> None:
    # No ink but cyan: red is absorbed, green and blue stay.
    red, green, blue = decode_rgb(encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "TIFF")).getpixel((3, 3))
    assert (red, green, blue) == (0, 255, 255)
    assert decode_rgb(encoded(Image.new("CMYK", (8, 8), (0, 255, 0, 0)), "JPEG")).mode == "RGB"


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)  # multiples of 257: 0, 1, 128, 255
    for name in ("PNG", "TIFF"):
        grey = decode_rgb(encoded(Image.fromarray(values), name))
        assert np.asarray(grey)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_exif_orientation_is_applied() -> None:
    picture = Image.new("RGB", (32, 16), (255, 255, 255))
    picture.paste((0, 0, 0), (0, 0, 16, 16))  # black on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated clockwise, so that left becomes top
    upright = decode_rgb(encoded(picture, "JPEG", exif=exif, quality=95))
    assert upright.size == (16, 32)
    assert max(upright.getpixel((8, 4))) < 20
    assert min(upright.getpixel((8, 28))) > 235


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_rotten_exif_does_not_reject_the_pixels() -> None:
    data = jpeg(9)
    rotten = b"Exif\x00\x00II*\x00\xff\xff\xff\xff\x00"
    data = data[:2] + b"\xff\xe1" + struct.pack(">H", len(rotten) + 2) + rotten + data[2:]
    assert decode_rgb(data).size == (40, 30)


def test_truncated_jpeg_fails_to_decode_and_passes_the_header_check() -> None:
    data = jpeg(77, (200, 200))
    check_image(data[: len(data) // 2], "header")
    with pytest.raises(ValueError, match=r"broken jpeg: .*truncated"):
        check_image(data[: len(data) // 2], "decode")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html><body>404</body></html>", "starts with b'<html><body>'"),
        (b"\xff\xd8\xff\xe0broken", "broken jpeg"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "broken png"),
        (b"BM", "broken bmp"),
    ],
)
def test_reason_of_what_is_no_picture(data: bytes, reason: str) -> None:
    for level in ("decode", "header"):
        with pytest.raises(ValueError, match=reason):
            check_image(data, level)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_bomb_is_refused_by_its_header(side: int) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(ValueError, match=r"too large: .*89478485 pixels"):
        check_image(bomb, "header")


def test_float_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        decode_rgb(encoded(Image.new("F", (2, 2), 0.5), "TIFF"))
