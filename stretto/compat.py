"""What differs between the releases of transformers that are supported (5.17 to 5.3x), and what Ray does not offer;
each with the condition under which it goes. Importing this module loads no torch, transformers or ray.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

    from torch import Tensor, nn


@functools.cache
def _cache_name() -> str:
    from transformers import Qwen3VLTextModel

    return "cache" if "cache" in inspect.signature(Qwen3VLTextModel.forward).parameters else "past_key_values"


def cache_kwargs(cache: Any) -> dict[str, Any]:
    """The keyword that hands a model its key-value cache: ``past_key_values`` up to 5.23, ``cache`` from 5.24 on (the
    old name warns there and ends with 5.40). The model fills the object in place, so no output is read back.

    Remove once the lowest supported release is 5.24: pass ``cache=cache``.
    """
    return {_cache_name(): cache}


@dataclass(frozen=True)
class ImageFeatures:
    """Vision output of a run of images: ``pooled`` [M, H] and one [M, H] per deepstack level; M image tokens."""

    pooled: Tensor
    deepstack: tuple[Tensor, ...]

    def select(self, index: Tensor) -> ImageFeatures:
        """Rows ``index`` [K] of every tensor, to repeat an image for every sample that shows it."""
        return ImageFeatures(
            self.pooled.index_select(0, index), tuple(level.index_select(0, index) for level in self.deepstack)
        )


def image_features(model: nn.Module, pixel_values: Tensor, image_grid_thw: Tensor) -> ImageFeatures:
    """The vision forward of a Qwen3-VL. 5.17 returns deepstack levels whole, 5.19 and later split by image.

    Remove the joining of levels once the lowest supported release is 5.19.
    """
    import torch

    output = model.get_submodule("model").get_image_features(pixel_values, image_grid_thw)  # type: ignore[operator]
    levels = (level if isinstance(level, torch.Tensor) else torch.cat(level) for level in output.deepstack_features)
    return ImageFeatures(torch.cat(output.pooler_output), tuple(levels))


def last_hidden_state(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    image: ImageFeatures | None,
    image_token_id: int,
    cache: Any | None = None,
) -> Tensor:
    """Hidden states [B, S, H] of a Qwen3-VL over text [B, S] and ready ``image`` features, one row per image token of
    ``input_ids`` in order. Fills ``cache`` where one is given.

    5.19 and later take ready features as ``mm_encoder_outputs``; 5.17 has no such argument and would *silently drop*
    the images, so features are placed here and the language model is called, which is what every release does itself.

    Remove once the lowest supported release is 5.19: call ``model.model(..., mm_encoder_outputs={"image": ...})``.
    Raises ValueError where features and image tokens differ in number.
    """
    embeddings = model.get_input_embeddings()(input_ids)  # type: ignore[operator]
    extra: dict[str, Any] = {} if cache is None else cache_kwargs(cache)
    if image is not None:
        mask = input_ids == image_token_id
        tokens = int(mask.sum())
        if tokens != len(image.pooled):
            raise ValueError(f"{tokens} image tokens for {len(image.pooled)} image features")
        embeddings = embeddings.masked_scatter(mask[..., None], image.pooled.to(embeddings.dtype))
        extra |= {"visual_pos_masks": mask, "deepstack_visual_embeds": list(image.deepstack)}
    language_model = model.get_submodule("model.language_model")
    return language_model(
        inputs_embeds=embeddings,
        position_ids=position_ids,
        attention_mask=attention_mask,
        use_cache=cache is not None,
        **extra,
    )[0]


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward. Called ``gradient_checkpointing_enable`` until 5.24, which warns about it.

    Remove once the lowest supported release has ``activation_checkpointing_enable``. transformers recomputes only in
    train mode, which is left to the caller.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Inside, ``ray.init`` starts a Ray whose servers listen on 127.0.0.1 alone.

    On Linux, Ray 2.60 replaces a loopback ``_node_ip_address`` by the machine's own address, and its servers then
    listen on every interface. It keeps to loopback where the platform cannot form a cluster, so it is told so.

    Remove once ``ray.init(_node_ip_address="127.0.0.1")`` is respected; ``tests/system`` looks at the ports.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def ray_without_onlookers() -> Iterator[None]:
    """Inside, ``ray.init`` starts a Ray without its autoscaler, its log monitor and its dashboard: three processes of
    Python that nothing here asks anything (one node, logs read from their files), and for whose start it would wait.

    Ray 2.60 starts the dashboard's process whatever ``include_dashboard`` says.

    Remove once ``ray.init`` has options for these.
    """
    from ray._private import node, parameter

    before = parameter.RayParams, node.Node.start_api_server
    parameter.RayParams = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    node.Node.start_api_server = lambda *_, **__: None
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server = before


@contextmanager
def ray_as_a_guest(undisturbed: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, ``ray.init`` leaves the signal handlers of this process and its terminal alone.

    Ray 2.60 replaces the SIGTERM handler twice (``sys.exit`` in Python, then a crash dump in C++), crashes at exit
    where an exception interrupts it while it connects (which it does ``undisturbed`` therefore), and prints a hint
    about token authentication, which it turns on by itself. What its nodes say of workers that died it prints
    whatever ``log_to_driver`` says, also later on; whoever called such a worker gets the error.

    Remove once ``ray.init`` has options for these; ``tests/system/test_lifecycle.py`` sends signals and reads outputs.
    """
    import logging

    from ray._private import ray_constants, utils, worker

    hints = logging.getLogger("ray._private.authentication.authentication_token_setup")
    before = ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, utils.set_sigterm_handler, worker.connect, hints.level

    def connect(*args: Any, **kwargs: Any) -> Any:
        with undisturbed():
            return before[2](*args, **kwargs)

    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    utils.set_sigterm_handler = lambda handler: None
    worker.connect = connect
    worker.print_to_stdstream = lambda *_, **__: None  # for good
    hints.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, utils.set_sigterm_handler, worker.connect = before[:3]
        hints.setLevel(before[3])


def ray_processes(names: Iterable[str]) -> dict[str, subprocess.Popen[bytes]]:
    """The processes of the Ray that this process has started, by Ray's names for them."""
    from ray._private import worker

    return {name: worker._global_node.all_processes[name][0].process for name in names}


def forget_ray() -> None:
    """Keep Ray from saying goodbye, at exit, to processes that are gone: it would wait for them."""
    import atexit

    from ray._private import worker

    atexit.unregister(worker.shutdown)
