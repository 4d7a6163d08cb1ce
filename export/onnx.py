"""A dual encoder to two ONNX graphs, one per tower, with torch's dynamo exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from google.protobuf.message import Message
from torch import Tensor, nn
from torch.export import Dim

from export.manifest import TEXT_GRAPH, VISION_GRAPH
from pipeline.model import DualEncoder
from pipeline.model.tokenizer import CaptionTokenizer

# A protobuf file ends at 2 GiB; the slack is for the graph itself. Weights above it go to a file beside the graph.
_MAX_WEIGHT_BYTES = 2**31 - 2**24
# Two: an example batch of one would be frozen into the graph, whatever the dynamic shapes say.
_EXAMPLE_CAPTIONS = ("a red apple on a wooden table", "two dogs")


@dataclass(frozen=True)
class Tower:
    """One side of the model: where its graph goes, the graph's input and output, and the method that computes it."""

    file: str
    input_name: str
    output_name: str
    method: str


# An output called `embedding` would clash with an initialiser of that name in BERT.
VISION = Tower(VISION_GRAPH, "pixel_values", "image_embeds", "encode_image")
TEXT = Tower(TEXT_GRAPH, "input_ids", "text_embeds", "encode_text")


def write_graphs(model: DualEncoder, folder: Path, opset: int = 18) -> None:
    """Export both towers below a folder.

    Args:
        model: fp32 on the CPU.
        folder: a bundle in the making.
        opset: of the default ONNX domain.

    Raises:
        ValueError: the model is not fp32 on the CPU, or a tower cannot be exported at this opset.
    """
    for tower in (VISION, TEXT):
        proto = export_tower(model, tower, opset)
        _save(proto, folder / tower.file)


def export_tower(model: DualEncoder, tower: Tower, opset: int = 18) -> onnx.ModelProto:
    """One tower as an ONNX model: batch and caption length are dynamic, the output is L2-normalised.

    The same weights give the same bytes: nothing in it tells of the machine or the time.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"export needs fp32 weights on the CPU, but {name} is {parameter.dtype} on {parameter.device}; "
                "load the model with load_checkpoint"
            )
    example, dynamic = _example(model, tower)
    with _serving_mode(model):
        try:
            program = torch.onnx.export(
                _Forward(model, tower.method).eval(),
                (example,),
                dynamo=True,
                opset_version=opset,
                input_names=[tower.input_name],
                output_names=[tower.output_name],
                dynamic_shapes=(dynamic,),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise ValueError(f"{tower.file} cannot be exported at opset {opset}: {error}") from error
    assert program is not None
    proto = program.model_proto
    written = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    if written != opset:
        raise ValueError(f"{tower.file} needs opset {written}, asked was {opset}; export with opset {written}")
    _strip(proto)
    return proto


class _Forward(nn.Module):
    """A method of the model as a module's forward, which is what the exporter takes."""

    def __init__(self, model: DualEncoder, method: str) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = getattr(self.model, self.method)(x, normalize=True)
        return features


def _example(model: DualEncoder, tower: Tower) -> tuple[Tensor, dict[int, Dim]]:
    """An input to trace with, and its dynamic axes."""
    if tower is VISION:
        size = int(model.spec["preprocess_cfg"]["size"])
        return torch.zeros(2, 3, size, size), {0: Dim("batch")}
    ids = CaptionTokenizer(model.spec)(_EXAMPLE_CAPTIONS)
    return ids, {0: Dim("batch"), 1: Dim("length", max=model.context_length)}


@contextmanager
def _serving_mode(model: DualEncoder) -> Iterator[None]:
    """Eval mode, and attention as plain operations: its fused fast path has no ONNX form."""
    training, fast = model.training, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        model.train(training)


def _strip(message: Message) -> None:
    """Remove comments and metadata at every level: torch writes stack traces with file paths into them."""
    for name in ("doc_string", "metadata_props"):
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)
    if isinstance(message, onnx.TensorProto):
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                _strip(part)


def _save(proto: onnx.ModelProto, path: Path) -> None:
    """One file, or for weights beyond protobuf's limit a second one, `<name>.onnx_data`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if sum(len(weight.raw_data) for weight in proto.graph.initializer) < _MAX_WEIGHT_BYTES:
        path.write_bytes(proto.SerializeToString(deterministic=True))
    else:
        onnx.save_model(proto, path, save_as_external_data=True, location=f"{path.name}_data")
