"""Encoded pictures: what they are, whether they decode, and their RGB pixels. Needs Pillow and numpy, nothing else."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

CheckLevel = Literal["decode", "header"]

MAX_PIXELS = 89_478_485
"""Pictures with more pixels are refused: Pillow's own warning limit, a quarter of a gigabyte of 24-bit pixels."""

FORMATS = ("jpeg", "png", "webp", "gif", "bmp", "tiff")

_WHITE = (255, 255, 255, 255)
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa")
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Format (one of `FORMATS`), Pillow's mode, and size in pixels as stored, before any EXIF rotation."""

    format: str
    mode: str
    width: int
    height: int


def sniff_format(data: bytes) -> str | None:
    """The format by its first bytes, one of `FORMATS`, or None. File names lie: COCO has a PNG called .jpg."""
    if data[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if data[:4] in (b"II*\x00", b"MM\x00*"):
        return "tiff"
    if data[:2] == b"BM":
        return "bmp"
    return None


def check_image(data: bytes, level: CheckLevel = "decode") -> None:
    """Check that `data` is a picture.

    Args:
        data: An encoded picture.
        level: "header" looks at the format and the size only; "decode" reads every pixel, which alone finds truncation.

    Raises:
        ValueError: It is not a picture; the message says why.
    """
    if level == "header":
        _open(data)
    else:
        decode_rgb(data)


def decode_rgb(data: bytes) -> Image.Image:
    """Decode a picture to mode RGB, 8 bits a channel.

    The EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits, and the first
    frame of an animation stands for it. Colour profiles are not applied, which is what CLIP's own preprocessing does.

    Raises:
        ValueError: Not a picture, truncated or broken, above `MAX_PIXELS`, or of a pixel type that has no RGB meaning.
    """
    image, name = _open(data)
    try:
        image.load()
        return _to_rgb(_upright(image))
    except _DECODER_ERRORS as error:
        raise ValueError(f"broken {name}: {error}") from error


def image_facts(data: bytes) -> ImageFacts:
    """What a picture's header says.

    Raises:
        ValueError: It is not a picture, or its header cannot be read.
    """
    image, name = _open(data)
    return ImageFacts(name, image.mode, *image.size)


def _open(data: bytes) -> tuple[Image.Image, str]:
    """Parse the header. Returns the lazy image and its format's name."""
    if not data:
        raise ValueError("the file is empty (0 bytes)")
    name = sniff_format(data)
    if name is None:
        raise ValueError(f"not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image: it starts with {data[:12]!r}")
    try:
        # Only the decoder of the sniffed format may touch the bytes.
        image = Image.open(io.BytesIO(data), formats=[name.upper()])
    except Image.DecompressionBombError as error:
        raise ValueError(f"too large: above the limit of {MAX_PIXELS} pixels") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"broken {name}: its header cannot be read") from error
    except _DECODER_ERRORS as error:
        raise ValueError(f"broken {name}: {error}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"too large: {width} x {height} is above the limit of {MAX_PIXELS} pixels")
    return image, name


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation. A rotten EXIF block says nothing about the pixels, so it is passed over."""
    try:
        return ImageOps.exif_transpose(image)
    except (*_DECODER_ERRORS, KeyError):
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode that a decoder gives to RGB."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _grey16_to_grey8(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no stated range; convert the picture to 8 bits")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, _WHITE)
        return Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")


def _grey16_to_grey8(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255. Pillow's own `convert("L")` would clip everything above 255 to white."""
    grey = np.asarray(image).astype(np.int64)  # [H, W]
    if grey.min() < 0 or grey.max() > 65535:
        raise ValueError("32-bit integer pixels outside 0..65535; convert the picture to 8 or 16 bits")
    return Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8))
