"""What runs in vLLM's worker processes: the workers' half of each transfer, and what they say of their weights.

vLLM loads it by name (``worker_extension_cls``) before it builds a model. Importing it registers the transfers, ties
the process to its engine, and keeps it from listening where it need not.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from stretto.models.loading import DTYPES
from stretto.rollout import vllm_compat, vllm_held
from stretto.rollout.device_receiver import Receiver
from stretto.rollout.device_transfer import DeviceTransfer
from stretto.rollout.vllm_processes import end_with_the_engine
from stretto.rollout.vllm_transfer import HostTransfer
from stretto.types import StrettoError


@dataclass
class HostInit(WeightTransferInitInfo):
    """Nothing is to be agreed on."""


@dataclass
class HostUpdate(WeightTransferUpdateInfo):
    """One bucket: the file that it lies in with its size in bytes, and name, dtype, shape and offset of each tensor."""

    path: str
    size: int
    tensors: list[tuple[str, str, list[int], int]]


class HostWeights(WeightTransferEngine[HostInit, HostUpdate]):
    """Takes buckets out of a segment of host memory.

    vLLM keeps what it is given until a layer is complete, which may take several buckets, and the segment is used
    again for the next one: hence the copies.
    """

    init_info_cls = HostInit
    update_info_cls = HostUpdate

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._segment: tuple[str, int, mmap.mmap] | None = None

    def init_transfer_engine(self, init_info: HostInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: HostUpdate) -> None:
        segment = self._open(update_info)
        self.model.load_weights((name, self._tensor(segment, *place)) for name, *place in update_info.tensors)

    def _tensor(self, segment: mmap.mmap, dtype: Any, shape: Any, offset: Any) -> Tensor:
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(segment, dtype=DTYPES[dtype], count=count, offset=offset)
        return flat.to(self.device, copy=True).reshape(shape)

    def _open(self, update: HostUpdate) -> mmap.mmap:
        if self._segment is None or self._segment[:2] != (update.path, update.size):
            with open(update.path, "r+b") as file:
                self._segment = (update.path, update.size, mmap.mmap(file.fileno(), update.size))
        return self._segment[2]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        vllm_held.renew_packed_heads(self.model)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in 0.26, and gone since."""
        raise NotImplementedError

    def shutdown(self) -> None:
        self._segment = None


@dataclass
class DeviceUpdate(HostUpdate):
    """One of three: the group of a sender to join, a version in GPU memory (pickled ``DeviceWeights``), or a bucket."""

    path: str = ""
    size: int = 0
    tensors: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    sent: bytes = b""
    group: bytes = b""
    world: int = 0


class WeightsOnDevice(HostWeights):
    """Takes versions from GPU memory, and those of a checkpoint from host memory."""

    update_info_cls = DeviceUpdate

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._receiver = Receiver(self.device, self.parallel_config.rank)
        self.lost = ""
        """Why what was taken last is not the version that was asked for; vLLM would only say that a call failed."""

    def receive_weights(self, update_info: Any) -> None:
        if update_info.group:
            self._receiver.join(update_info.group, update_info.world)
        elif update_info.sent:
            for tensors in self._receiver.receive(update_info.sent):
                self.model.load_weights(tensors)
        else:
            super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        torch.cuda.synchronize(self.device)
        self.lost = ""
        try:
            self._receiver.verify()
        except StrettoError as error:
            self.lost = str(error)

    def shutdown(self) -> None:
        self._receiver.close()
        super().shutdown()


WeightTransferEngineFactory.register_engine(HostTransfer.backend, HostWeights)
WeightTransferEngineFactory.register_engine(DeviceTransfer.backend, WeightsOnDevice)
end_with_the_engine()
vllm_compat.meet_at_one_address()


class WorkerExtension:
    """Methods that vLLM adds to its workers; the engine calls them by name."""

    model_runner: Any
    weight_transfer_engine: Any

    def stretto_differing(self, sampled: list[list[Any]]) -> list[str]:
        """Names of those tensors of a sample (``weight_sample.Sampled``, as lists of its fields) that this worker
        holds other values of, with what differs.
        """
        if lost := getattr(self.weight_transfer_engine, "lost", ""):
            return [lost]
        model = self.model_runner.get_model()
        return [text for fields in sampled if (text := vllm_held.difference(model, *fields))]
