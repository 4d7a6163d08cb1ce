"""The one image transform against open_clip's own, bit for bit."""

from __future__ import annotations

import io
from dataclasses import asdict

import numpy as np
import pytest
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from pipeline.preprocess import Preprocess

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# (width, height): square, the target itself, odd, portrait, landscape, extreme, smaller than the target
SIZES = [(64, 64), (32, 32), (33, 47), (101, 57), (57, 101), (301, 20), (20, 301), (7, 5), (31, 33), (1, 1), (640, 427)]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "LA": 2, "L": 1}[mode]
    pixels = np.random.default_rng([width, height]).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", SIZES)
def test_equals_open_clips_evaluation_transform(size, interpolation, resize_mode):
    config = PreprocessCfg(size=32, mean=CLIP_MEAN, std=CLIP_STD, interpolation=interpolation, resize_mode=resize_mode)
    theirs = image_transform_v2(config, is_train=False)(picture(*size)).numpy()
    ours = Preprocess.from_config(asdict(config))(picture(*size))
    assert ours.dtype == np.float32
    assert ours.shape == (3, 32, 32)
    np.testing.assert_array_equal(ours, theirs)


def test_odd_target_sizes_agree_as_well():
    for target in (31, 33, 97):
        config = PreprocessCfg(size=target, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        theirs = image_transform_v2(config, is_train=False)(picture(123, 77)).numpy()
        np.testing.assert_array_equal(Preprocess.from_config(asdict(config))(picture(123, 77)), theirs)


@pytest.mark.parametrize(("alpha", "value"), [(0, 255), (255, 40), (128, round((40 * 128 + 255 * 127) / 255))])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_lies_over_white(mode, alpha, value):
    image = Image.new(mode, (5, 3), (40,) * (len(mode) - 1) + (alpha,))
    plain = Preprocess(size=3, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    np.testing.assert_allclose(plain.from_bytes(encoded(image)) * 255, value, atol=1e-4)


def test_an_opaque_picture_is_not_changed_by_its_alpha_channel():
    transform = Preprocess(size=16, mean=CLIP_MEAN, std=CLIP_STD)
    image = picture(23, 40)
    opaque = image.copy()
    opaque.putalpha(255)
    np.testing.assert_array_equal(transform.from_bytes(encoded(opaque)), transform(image))


def test_grey_pictures_have_three_equal_channels():
    pixels = Preprocess(size=8, mean=(0.5,) * 3, std=(0.5,) * 3).from_bytes(encoded(picture(9, 12, "L")))
    np.testing.assert_array_equal(pixels[0], pixels[1])
    np.testing.assert_array_equal(pixels[0], pixels[2])
    assert pixels.std() > 0


@pytest.mark.parametrize("data", [b"", b"not a picture", encoded(picture(50, 50))[:-3000], encoded(picture(9, 9))[:20]])
def test_bytes_that_do_not_decode_are_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        Preprocess(size=8, mean=CLIP_MEAN, std=CLIP_STD).from_bytes(data)


def test_config_round_trip_and_unknown_modes():
    transform = Preprocess(size=8, mean=CLIP_MEAN, std=CLIP_STD, interpolation="bilinear", resize_mode="squash")
    assert Preprocess.from_config(transform.to_config()) == transform
    for wrong in ({"interpolation": "nearest"}, {"resize_mode": "longest"}):
        with pytest.raises(ValueError, match=r"bicubic, bilinear .*shortest, squash"):
            Preprocess.from_config({**transform.to_config(), **wrong})


@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
@pytest.mark.parametrize("size", [(64, 64), (97, 57), (57, 97), (33, 31), (200, 130), (20, 30)])
def test_a_box_lies_where_a_painted_rectangle_comes_to_lie(size, resize_mode):
    """The middle of every edge that can be seen is where the brightness passes one half."""
    transform = Preprocess(48, (0.0,) * 3, (1.0,) * 3, "bilinear", resize_mode)
    width, height = size
    box = (width // 4, height // 3, width // 4 + width // 2, height // 3 + height // 2)
    picture = Image.new("RGB", size)
    picture.paste((255, 255, 255), box)
    seen = transform(picture)[0] > 0.5
    (rows,), (columns,) = np.nonzero(seen.any(axis=1)), np.nonzero(seen.any(axis=0))
    expected = np.clip(transform.box(size, box), 0, 48)
    np.testing.assert_allclose([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], expected, atol=0.5 + 1e-9)


def test_what_the_crop_leaves_out_lies_outside():
    """100 x 50 to 10 x 10: a fifth of the scale, and 5 of the 20 columns go on each side."""
    transform = Preprocess(10, (0.0,) * 3, (1.0,) * 3)
    assert transform.box((100, 50), (0, 0, 100, 50)) == (-5.0, 0.0, 15.0, 10.0)
    assert transform.box((50, 100), (25, 0, 50, 20)) == (5.0, -5.0, 10.0, -1.0)


def test_a_reducing_gap_gives_nearly_the_same():
    smooth = picture(8, 6).resize((800, 600), Image.Resampling.BICUBIC)
    transform = Preprocess(64, (0.0,) * 3, (1.0,) * 3)
    exact, quick = (np.asarray(image, float) for image in (transform.fit(smooth), transform.fit(smooth, 1.0)))
    assert 0 < np.abs(exact - quick).max() < 8
