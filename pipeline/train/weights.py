"""The trained weights and their optimizer state by parameter name, whatever ZeRO stage holds them.

DeepSpeed keeps fp32 master weights and AdamW's moments in flat pieces, cut over the ranks in a way of each stage's own.
Here a parameter is found again under its name: read whole on the main rank, or set from whole tensors on any number of
ranks. Values are copied bit by bit, so reading and setting changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from pipeline.train.distributed import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a parameter: `length` elements, from `start` of the parameter, at `offset` of `flat`."""

    flat: Tensor
    start: int
    offset: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """The piece of a tensor that is laid out like `flat`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)

    @property
    def master(self) -> Tensor:
        """The fp32 weights."""
        return self.of(self.flat)


class TrainedWeights:
    """fp32 weights, moments and step counts of everything that trains, and optionally an average of the weights.

    Args:
        engine: the DeepSpeed engine around a `DualEncoder`, with torch's AdamW.
        ranks: all of them.
        ema_decay: of the exponential average, avg = decay avg + (1 - decay) w after every step; None keeps none.

    Raises:
        ValueError: DeepSpeed keeps the state where it cannot be read by name (NVMe).
    """

    def __init__(self, engine: Any, ranks: Ranks, ema_decay: float | None = None) -> None:
        self.engine = engine
        self.ranks = ranks
        self.optimizer = engine.optimizer
        self.torch_optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        if getattr(self.optimizer, "swap_optimizer", False):
            raise ValueError("optimizer state on NVMe cannot be saved: set offload_optimizer.device to cpu or none")
        self.parameters = dict(engine.module.named_training())
        self.pieces = self._find_pieces()
        self.ema_decay = ema_decay
        self.average = {} if ema_decay is None else {n: p.master.clone() for n, p in self.pieces.items()}

    @property
    def partitioned(self) -> bool:
        """Whether a rank holds a part only."""
        return self.ranks.world_size > 1 and isinstance(
            self.optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3 | BF16_Optimizer
        )

    def update_average(self) -> None:
        """After an optimizer step."""
        if self.ema_decay is not None:
            for name, piece in self.pieces.items():
                self.average[name].lerp_(piece.master, 1 - self.ema_decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model computes with the averaged weights inside, where there are any. Collective."""
        if self.ema_decay is None:
            yield
            return
        trained = {name: piece.master.clone() for name, piece in self.pieces.items()}
        self._load_masters(self.average)
        try:
            yield
        finally:
            self._load_masters(trained)

    def read(self) -> dict[str, dict[str, Tensor]]:
        """`weight`, `exp_avg`, `exp_avg_sq` and `ema` of every parameter, fp32 on the CPU, on the main rank.

        Collective; a parameter at a time, so that the other ranks need memory for one.
        """
        found: dict[str, dict[str, Tensor]] = {"weight": {}, **{m: {} for m in MOMENTS}}
        if self.ema_decay is not None:
            found["ema"] = {}
        for name in self.parameters:
            piece = self.pieces.get(name)
            for kind, tensors in found.items():
                whole = self._gather(name, piece, None if piece is None else self._part(kind, name, piece))
                if self.ranks.is_main:
                    tensors[name] = whole
        return found

    def norms(self) -> dict[str, float]:
        """Of every trained parameter, on every rank. Collective."""
        own = {name: float(piece.master.double().square().sum()) for name, piece in self.pieces.items()}
        everyones = self.ranks.gather(own) if self.partitioned else [own]
        return {name: sum(part.get(name, 0.0) for part in everyones) ** 0.5 for name in self.parameters}

    def steps(self) -> dict[str, int]:
        """AdamW's count of steps of every parameter, on every rank."""
        own = {n: int(self.torch_optimizer.state.get(p.flat, {}).get("step", 0)) for n, p in self.pieces.items()}
        everyones = self.ranks.gather(own) if self.partitioned else [own]
        return {name: max(part[name] for part in everyones if name in part) for name in self.parameters}

    def set(self, tensor: Callable[[str, str], Tensor], steps: dict[str, int]) -> None:
        """Set everything that `read` gives. Collective.

        Args:
            tensor: of a kind ("weight", ...) and a parameter name, the whole tensor.
            steps: as `steps` gives them.
        """
        # One count serves a whole flat group; parameters that never had a gradient count less at stage 0.
        counts: dict[int, int] = {}
        for name, piece in self.pieces.items():
            counts[id(piece.flat)] = max(steps[name], counts.get(id(piece.flat), 0))
        for name, piece in self.pieces.items():
            state = self._state(piece)
            part = slice(piece.start, piece.start + piece.length)
            piece.master.copy_(tensor("weight", name).reshape(-1)[part])
            for moment in MOMENTS:
                piece.of(state[moment]).copy_(tensor(moment, name).reshape(-1)[part])
            if self.ema_decay is not None:
                self.average[name].copy_(tensor("ema", name).reshape(-1)[part])
            _set_step(state, counts[id(piece.flat)])
        self._refresh()

    def scaler(self) -> dict[str, float | int]:
        """The state of fp16's loss scale, as numbers; empty in other precisions."""
        scaler = self._scaler() if self.engine.fp16_enabled() else None
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def set_scaler(self, values: dict[str, float | int]) -> None:
        """Set what `scaler` gives; a run that goes on in another precision has no use for it."""
        for key in self.scaler().keys() & values.keys():
            setattr(self._scaler(), key, values[key])

    def live(self, name: str) -> Tensor:
        """A parameter as the model computes with it, whole. Collective under ZeRO-3."""
        parameter = self.parameters[name] if name in self.parameters else self.engine.module.clip.get_parameter(name)
        with GatheredParameters([parameter], enabled=self.engine.zero_optimization_partition_weights()):
            return parameter.detach().clone()

    def _scaler(self) -> Any:
        return getattr(self.optimizer, "loss_scaler", getattr(self.optimizer, "loss_scale_config", None))

    def _find_pieces(self) -> dict[str, Piece]:
        """This rank's pieces by parameter name; a parameter may lie wholly on other ranks."""
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            found = {name: self._piece_at_stage_3(p) for name, p in self.parameters.items()}
        elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
            found = {name: self._piece_of_flat_groups(p) for name, p in self.parameters.items()}
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
            masters = {id(low): master for low, master in pairs}
            found = {n: Piece(masters[id(p)], 0, 0, p.numel()) for n, p in self.parameters.items()}
        else:
            found = {name: Piece(p, 0, 0, p.numel()) for name, p in self.parameters.items()}
        return {name: piece for name, piece in found.items() if piece is not None}

    def _piece_at_stage_3(self, parameter: Any) -> Piece | None:
        group, offset, length = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        start = length * self.optimizer._get_param_partition_rank(parameter)
        length = min(length, parameter.ds_numel - start)  # the last part is padded
        return Piece(self.optimizer.fp32_partitioned_groups_flat[group], start, offset, length) if length > 0 else None

    def _piece_of_flat_groups(self, parameter: Any) -> Piece | None:
        fragment = parameter._hp_mapping
        if fragment is None:
            return None
        flat: list[Tensor] = (
            getattr(self.optimizer, "single_partition_of_fp32_groups", None)
            or self.optimizer.fp32_groups_flat_partition
        )
        place = fragment.hp_fragment_address
        return Piece(flat[fragment.param_group_index], fragment.lp_fragment_address.start, place.start, place.numel)

    def _part(self, kind: str, name: str, piece: Piece) -> Tensor:
        if kind == "weight":
            return piece.master
        if kind == "ema":
            return self.average[name]
        return piece.of(self._state(piece)[kind])

    def _state(self, piece: Piece) -> dict[str, Any]:
        """AdamW's state of the flat tensor, made where no step has made it yet."""
        state: dict[str, Any] = self.torch_optimizer.state[piece.flat]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(piece.flat.detach())
        return state

    def _gather(self, name: str, piece: Piece | None, part: Tensor | None) -> Tensor:
        parameter = self.parameters[name]
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if not self.partitioned:
            assert part is not None
            return part.detach().to("cpu", copy=True).view(shape)
        # The bits as integers: adding zeros to them is exact, also for -0.0.
        bits = torch.zeros(shape.numel(), dtype=torch.int32, device=self.ranks.device)
        if piece is not None and part is not None:
            bits[piece.start : piece.start + piece.length] = part.to(self.ranks.device).view(torch.int32)
        dist.all_reduce(bits)
        return bits.cpu().view(torch.float32).view(shape)

    def _load_masters(self, parts: dict[str, Tensor]) -> None:
        for name, piece in self.pieces.items():
            piece.master.copy_(parts[name])
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Let the model see the masters: under every wrapper it computes with copies of them."""
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            # `safe_set_full_fp32_param` leaves this out, and so the next step would start from the old weights.
            optimizer.checkpoint_event_prologue()
            for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
                if master.numel():
                    optimizer.fp16_partitioned_groups_flat[number].data.copy_(master.data)
                    optimizer._unflatten_partitioned_parameters(number)
            optimizer.checkpoint_event_epilogue()
        elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
            optimizer.update_lp_params()
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            for low, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, master in zip(low, masters, strict=True):
                    parameter.data.copy_(master.data)


def _set_step(state: dict[str, Any], step: int) -> None:
    if isinstance(state["step"], Tensor):
        state["step"].fill_(step)
    else:
        state["step"] = step
