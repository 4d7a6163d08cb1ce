"""The one image transform of training, evaluation and serving. Pillow and numpy only: the runtime has no torch.

It gives what open_clip's own evaluation transform gives for the same RGB picture, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.images import decode_rgb

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_RESIZE_MODES = ("shortest", "squash")
_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's own numbers, as Hugging Face writes them


@dataclass(frozen=True)
class Preprocess:
    """Resize, crop, scale to [0, 1], normalise.

    Args:
        size: side of the square picture that the model reads, pixels.
        mean, std: per channel, of values in [0, 1].
        interpolation: `bicubic` or `bilinear`, antialiased as Pillow does it.
        resize_mode: `shortest` brings the short side to `size` and crops the centre; `squash` ignores the aspect ratio.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"

    def __post_init__(self) -> None:
        if self.interpolation not in _RESAMPLING or self.resize_mode not in _RESIZE_MODES:
            raise ValueError(
                f"preprocessing knows interpolation {', '.join(_RESAMPLING)} "
                f"and resize_mode {', '.join(_RESIZE_MODES)}, not '{self.interpolation}' with '{self.resize_mode}'"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Preprocess:
        """From open_clip's `preprocess_cfg`."""
        mean: Sequence[float] = config["mean"]
        std: Sequence[float] = config["std"]
        return cls(
            size=int(config["size"]),
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
            interpolation=config.get("interpolation", "bicubic"),
            resize_mode=config.get("resize_mode", "shortest"),
        )

    def to_config(self) -> dict[str, Any]:
        """The inverse of `from_config`."""
        return asdict(self)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Preprocess:
        """From a `preprocessor_config.json` of CLIP.

        Raises:
            ValueError: it asks for what this transform does not do.
        """
        size, crop = config.get("size", 224), config.get("crop_size", 224)
        shortest = isinstance(size, int) or "shortest_edge" in size  # older files hold plain numbers
        side = size if isinstance(size, int) else size.get("shortest_edge", size.get("height"))
        crop = side if not config.get("do_center_crop", True) else crop if isinstance(crop, int) else crop["height"]
        resample = {number: name for name, number in _RESAMPLE.items()}.get(config.get("resample", 3))
        if crop != side or resample is None:
            raise ValueError(
                f"its preprocessing resizes to {side}, crops {crop}, resample {config.get('resample')}: expected equal "
                "sizes and bilinear (2) or bicubic (3)"
            )
        mean, std = config["image_mean"], config["image_std"]
        mode = "shortest" if shortest else "squash"
        return cls(int(side), (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), resample, mode)

    def to_hugging_face(self) -> dict[str, Any]:
        """The inverse of `from_hugging_face`."""
        square = {"height": self.size, "width": self.size}
        shortest = self.resize_mode == "shortest"
        return {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": self.size} if shortest else square,
            "resample": _RESAMPLE[self.interpolation],
            "do_center_crop": shortest,
            "crop_size": square,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        """An RGB picture of any size to float32 [3, size, size]."""
        pixels = np.empty((3, self.size, self.size), np.float32)
        # Channel by channel and in place: ten times faster than on [H, W, 3], whose rows of three no processor likes.
        for channel, band, mean, std in zip(pixels, self._fit(image).split(), self.mean, self.std, strict=True):
            np.divide(np.asarray(band), np.float32(255), out=channel)
            channel -= np.float32(mean)
            channel /= np.float32(std)
        return pixels

    def from_bytes(self, data: bytes) -> NDArray[np.float32]:
        """An encoded picture of any format and mode to float32 [3, size, size].

        Raises:
            ValueError: the bytes are not a picture that decodes.
        """
        return self(decode_rgb(data))

    def _fit(self, image: Image.Image) -> Image.Image:
        resampling = _RESAMPLING[self.interpolation]
        if self.resize_mode == "squash":
            return image.resize((self.size, self.size), resampling)
        width, height = image.size
        if width <= height:
            new_size = (self.size, int(self.size * height / width))
        else:
            new_size = (int(self.size * width / height), self.size)
        if new_size != image.size:
            image = image.resize(new_size, resampling)
        left = round((new_size[0] - self.size) / 2.0)
        top = round((new_size[1] - self.size) / 2.0)
        return image.crop((left, top, left + self.size, top + self.size))
