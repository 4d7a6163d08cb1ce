"""Small imitations of what users have on disk, made from the formats' own descriptions and not from our readers."""

from __future__ import annotations

import base64
import csv
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image

UNICODE_CAPTION = "A “curly” sign\u00a0reads ‘Ёлка’ — ¼ price 🎄.\n\nA second  line;\r\nand a tab\there."


def jpeg(shade: int, size: tuple[int, int] = (40, 30), **save: Any) -> bytes:
    """A JPEG whose bytes differ with `shade`; a gradient, so that truncation loses something."""
    picture = Image.linear_gradient("L").resize(size).convert("RGB")
    picture = Image.blend(picture, Image.new("RGB", size, (shade, 255 - shade, 128)), 0.5)
    return encoded(picture, "JPEG", **save)


def encoded(picture: Image.Image, format: str, **save: Any) -> bytes:
    """A picture as the bytes of a file."""
    buffer = io.BytesIO()
    picture.save(buffer, format, **save)
    return buffer.getvalue()


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    """A folder with the given files."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_tar(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar with the given members in the given order; mode `w:gz` compresses it."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    """A stored zip, as image archives are."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def as_container(kind: str, folder: Path, files: dict[str, bytes]) -> Path:
    """The same files as a `folder`, `tar`, `tar.gz` or `zip`."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        return write_tree(folder / "pictures", files)
    if kind == "zip":
        return write_zip(folder / "pictures.zip", files)
    return write_tar(folder / f"pictures.{kind}", files, "w:gz" if kind == "tar.gz" else "w")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object a line, characters unescaped, as data sets are published."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


def write_csv(path: Path, header: list[str], rows: list[list[str]], delimiter: str = ",", bom: bool = False) -> Path:
    """A table with a header, by Python's csv; `bom` as spreadsheets save it."""
    with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(header)
        table.writerows(rows)
    return path


# DCI -----------------------------------------------------------------------------------------------------------------


def dci_mask(label: str, caption: str | None, quality: int, bounds: Any) -> dict[str, Any]:
    """An entry of `mask_data`. Quality 2 ("bad") has neither label nor caption, quality 1 no caption."""
    mask: dict[str, Any] = {
        "idx": label,
        "outer_mask": base64.b64encode(b"\x89PNG" + bytes(3000)).decode(),
        "mask_quality": quality,
        "parent": -1,
        "requirements": [],
        "bounds": bounds,
        "area": 123,
    }
    if quality < 2:
        mask["label"] = label
    if quality == 0:
        mask["caption"] = caption
    return mask


def dci_annotation(image: str, short: str, extra: str) -> dict[str, Any]:
    """An annotation with a mask of each quality and both published forms of `bounds`."""
    masks = {
        "0": dci_mask("tree", "a tall green tree", 0, [[10, 20], [300, 400]]),
        "1": dci_mask("bench", None, 1, {"topLeft": {"x": 1, "y": 2}, "bottomRight": {"x": 3, "y": 4}}),
        "2": dci_mask("bad", None, 2, [[0, 0], [1, 1]]),
        "3": dci_mask("dog", "a dog asleep", 0, {"topLeft": {"x": 5, "y": 6}, "bottomRight": {"x": 70, "y": 80}}),
    }
    return {
        "image": image,
        "short_caption": short,
        "extra_caption": extra,
        "mask_data": masks,
        "mask_keys": list(masks),
        "summaries": {"base": "one string", "0": ["a list", "of strings"]},
        "negatives": {"base": {"swaps": [], "layout": [], "basic": []}},
    }


def dci_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Annotations of five photographs (one with an empty extra caption, one in no split), and the photographs.

    The photographs lie as in SA-1B's tar: each beside a JSON of masks. One more photograph has no annotation.
    """
    texts = {
        "100-data.json": ("sa_1545001.jpg", "A park.", "A wide park with two benches."),
        "101-data.json": ("sa_1545002.jpg", "A mall.", UNICODE_CAPTION),
        "102-data.json": ("sa_1545003.jpg", "A dog.", ""),
        "103-data.json": ("sa_1545004.jpg", "A boat.", "A boat moored at a pier."),
        "104-data.json": ("sa_1545005.jpg", "A road.", "A road through hills."),
    }
    base = "densely_captioned_images"
    annotations = {
        f"{base}/annotations/{file}": json.dumps(dci_annotation(*text)).encode() for file, text in texts.items()
    }
    splits = {"train": ["100-data.json", "102-data.json"], "valid": ["101-data.json"], "test": ["103-data.json"]}
    annotations[f"{base}/splits.json"] = json.dumps(splits).encode()
    photos: dict[str, bytes] = {}
    for number in range(1, 7):
        photos[f"./sa_154500{number}.jpg"] = jpeg(30 * number)
        photos[f"./sa_154500{number}.json"] = b"{}"
    return annotations, photos


# IFCT ----------------------------------------------------------------------------------------------------------------

IFCT_HEADER = ["Food Code; code", "Food Name; name", "Scientific Name; scie", "Local Name; lang", "Food Group; grup"]


def ifct_files() -> dict[str, bytes]:
    """Three foods as the two npm packages hold them: with local names, without, and without a scientific name."""
    rows = [
        ["A010", "Ragi", "Eleusine coracana", "A. Ragi; E. Finger millet; H. Ragi; U. Mandwa.", "Cereals and Millets"],
        ["E030", "Mango, ripe, neelam", "Mangifera indica", "", "Fruits"],
        ["O041", "Calf, heart", "", "", "Animal Meat"],
    ]
    table = io.StringIO()
    csv.writer(table, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([IFCT_HEADER, *rows])
    files = {"compositions/index.csv": table.getvalue().encode()}
    files |= {f"pictures/assets/{row[0]}.jpeg": jpeg(40 * number) for number, row in enumerate(rows)}
    return files
