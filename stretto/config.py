"""The options of a run, as frozen, validated blocks. Importing this module loads no torch, ray or transformers.

A field is a decision: ``tests/unit/test_config.py`` holds the list of them.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Folder = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path whose ``~`` is replaced once, here, so that every use sees the same folder."""


class Block(BaseModel):
    """A frozen group of options; unknown keys are errors, nothing is coerced between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunConfig(Block):
    dir: Folder = Field("runs/default", description="folder of the run: metrics, events, manifest, checkpoints")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of data order, sampling noise and initialisation")
    updates: PositiveInt = Field(
        150, description="optimizer updates to train; a partition takes actor.minis_per_partition * actor.epochs"
    )
    determinism: Literal["exact", "fast"] = Field(
        "exact", description="exact: bit-identical from run to run, or refused; fast: no such promise"
    )


class ModelConfig(Block):
    path: Folder = Field("", description="local directory or hub id of a Qwen3-VL; empty: random init from `config`")
    config: dict[str, Any] | None = Field(
        None, description="config block for random initialisation: text, vision and size options (see docs/models.md)"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="compute type; with bfloat16, master weights, gradients and optimizer stay float32"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of transformers")
    min_pixels: PositiveInt = Field(1024, description="images with fewer pixels are enlarged to this many")
    max_pixels: PositiveInt = Field(1048576, description="images with more pixels are shrunk to this many")


class DataConfig(Block):
    source: Literal["digits", "files"] = Field(
        "digits", description="digits: built-in sums of handwritten digits; files: your own JSONL and Parquet files"
    )
    train_files: tuple[Folder, ...] = Field((), description="files to train on, .jsonl or .parquet")
    validation_files: tuple[Folder, ...] = Field((), description="files of the validation split")
    test_files: tuple[Folder, ...] = Field((), description="files of the test split, for `stretto eval`")
    image_folder: Folder = Field("", description="folder of relative image paths; empty: that of the data file")
    prompt_column: str = Field("prompt", description="column of the prompt: a string or chat messages")
    images_column: str = Field("images", description="column of the list of images; rows without it have none")
    answer_column: str = Field("answer", description="column of the answer; empty: rows have none")
    source_column: str = Field("", description="column that names where a row comes from; empty: its file's name")
    id_column: str = Field("", description="column of unique row ids; empty: file name and row number")
    bad_rows: Literal["fail", "skip"] = Field("fail", description="what rows that cannot be used do to a run")
    overlong_prompts: Literal["fail", "skip"] = Field("skip", description="what too long prompts do to a run")
    max_prompt_tokens: NonNegativeInt = Field(
        0, description="longest prompt, image tokens included; 0: what fits a microbatch beside a full response"
    )
    digits: int = Field(2, ge=1, le=16, description="digits shown per prompt")
    worked: bool = Field(False, description="answers work the sum out step by step (longer) when true")
    layout: Literal["one-image", "many-images", "text", "mixed"] = Field(
        "one-image", description="digits side by side in one image, one image each, as text, or a mixture of the three"
    )
    labelled_images: PositiveInt = Field(60, description="digit images that the supervised warm-start may see")
    shuffle: bool = Field(True, description="shuffle every epoch, by run.seed and the epoch's number")


class RewardConfig(Block):
    function: str = Field("exact_match", description="exact_match or module:function(response, answer, **info)")
    timeout_s: PositiveFloat = Field(10.0, description="seconds that the reward of one sample may take")
    workers: PositiveInt = Field(1, description="reward processes")
    max_failed_fraction: float = Field(
        0.5, ge=0, le=1, description="a partition with a larger share of failed samples stops the run"
    )


class RolloutConfig(Block):
    engine: Literal["hf", "vllm", "http"] = Field(
        "hf", description="hf: transformers; vllm: vLLM, started here; http: servers that someone else runs"
    )
    servers: tuple[str, ...] = Field((), description="http: base URLs of vLLM servers, one a replica")
    tensor_parallel: PositiveInt = Field(1, description="vllm: GPUs of one engine (tensor-parallel width)")
    engine_args: dict[str, Any] = Field(
        {}, description="vllm: further engine arguments by vLLM's names, such as gpu_memory_utilization"
    )
    weight_transfer: Literal["auto", "host", "ipc", "nccl"] = Field(
        "auto",
        description="how new weights reach a vllm engine: host memory; CUDA IPC on a GPU that both sides share; NCCL "
        "between GPUs; auto: ipc where cluster.colocate is set, else host",
    )
    in_flight: Literal["finish", "abort", "keep"] = Field(
        "finish",
        description="what new weights do to responses under way, in bounded mode: they finish first; are begun again; "
        "go on under the new weights",
    )
    logprob_gap_alarm: NonNegativeFloat = Field(
        0.5, description="warn where old-policy and rollout log-probs differ by more, mean over loss tokens; 0: never"
    )
    prompts_per_partition: PositiveInt = Field(64, description="prompt groups of one rollout batch (partition)")
    n_samples_per_prompt: PositiveInt = Field(8, description="responses sampled for each prompt (a prompt group)")
    groups_per_decode_batch: PositiveInt = Field(32, description="prompt groups decoded together")
    max_response_tokens: PositiveInt = Field(16, description="length at which a response is cut")
    temperature: NonNegativeFloat = Field(1.0, description="sampling temperature; evaluation is always greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling; training refuses anything below 1, see docs/training.md"
    )
    top_k: NonNegativeInt = Field(
        0, description="top-k sampling; training refuses anything but 0 (off), see docs/training.md"
    )
    stop: tuple[str, ...] = Field((), description="strings that end a response")
    refill_rounds: NonNegativeInt = Field(
        0,
        description="dynamic sampling: groups whose rewards are all equal are dropped and replaced by the next "
        "prompts, at most this often for a partition; 0: off",
    )
    replicas: PositiveInt = Field(1, description="engines, each in a process of its own, that share the decode batches")
    max_engine_restarts: NonNegativeInt = Field(
        3, description="engines that may die (or hang) and be replaced in one session; 0: the first death ends the run"
    )
    engine_timeout_s: PositiveFloat = Field(
        600.0,
        description="seconds that one decode batch, or loading a version, may take before the engine counts as hung",
    )


class AlgorithmConfig(Block):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "none"] = Field(
        "grpo", description="how rewards become advantages; none: only a teacher says what to learn"
    )
    advantage_eps: NonNegativeFloat = Field(1e-4, description="added to the standard deviation that divides advantages")
    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = Field(
        "ppo_clip", description="ratio clipped per token, or per sequence; cispo: clipped weight on the log-prob"
    )
    clip_low: float | None = Field(
        None, ge=0, le=1, description="ratios are clipped below at 1 - clip_low; unset: as published, see docs"
    )
    clip_high: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="ratios are clipped above at 1 + clip_high; unset: as published"
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = Field(
        "token_mean",
        description="mean over all response tokens; over samples of each one's token mean; or over samples of token "
        "sums / rollout.max_response_tokens",
    )
    truncated: Literal["train", "mask", "drop"] = Field(
        "train",
        description="responses cut by length: train them; mask: reward counts in the group, tokens in no loss; drop: "
        "neither",
    )
    old_policy: Literal["actor", "old_actor", "rollout"] = Field(
        "actor",
        description="whose log-probs the ratio starts from: the actor before the update, a snapshot, or the rollout "
        "engine's own",
    )
    old_actor_every: PositiveInt = Field(1, description="policy versions between snapshots, for old_policy = old_actor")
    importance_correction: Literal["auto", "none", "tis", "mis"] = Field(
        "auto",
        description="tis: weights old / rollout, cut at tis_cap; mis: weights outside mis_low and mis_high become 0; "
        "auto: tis when staleness.max > 0 or a snapshot lags behind (old_actor_every > 1)",
    )
    importance_level: Literal["token", "sequence"] = Field(
        "token", description="one importance weight a token, or a response"
    )
    tis_cap: PositiveFloat = Field(2.0, description="TIS weight is min(old / rollout, tis_cap)")
    mis_low: NonNegativeFloat = Field(0.5, description="MIS drops weights below it")
    mis_high: PositiveFloat = Field(5.0, description="MIS drops weights above it")
    kl_loss_coef: NonNegativeFloat = Field(0.0, description="KL to the initial policy, added to the loss; 0: off")
    kl_reward_coef: NonNegativeFloat = Field(
        0.0, description="KL to the initial policy, taken off the reward of each sample; 0: off"
    )
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = Field(
        "auto", description="estimator of that KL; auto: k3 in the loss, k1 in the reward"
    )
    teacher: Folder = Field(
        "", description="local directory or hub id of a model with the same tokenizer to distil on-policy; empty: none"
    )
    teacher_coef: PositiveFloat = Field(
        1.0, description="weight of log(teacher / old policy), added to the advantage of each token"
    )

    @property
    def clip_range(self) -> tuple[float, float]:
        """``(clip_low, clip_high)`` with the published values in place of unset ones: PPO 0.2 and 0.2
        (arXiv:1707.06347), GSPO 3e-4 and 4e-4 (arXiv:2507.18071), CISPO no lower bound and weights up to 5
        (arXiv:2506.13585 leaves its value open; arXiv:2510.13786 finds 4 to 8 alike).
        """
        low, high = {"ppo_clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}[self.policy_loss]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high


class ActorConfig(Block):
    data_parallel: PositiveInt = Field(1, description="data-parallel actor ranks, see docs/parallel.md")
    lr: PositiveFloat = Field(4e-4, description="peak learning rate")
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="AdamW betas")
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="AdamW weight decay, of matrices alone: norms and biases have none"
    )
    warmup_updates: NonNegativeInt = Field(5, description="updates of linear learning-rate warm-up")
    decay_fraction: float = Field(0.3, ge=0, le=1, description="last share of the updates, in which the rate decays")
    decay_shape: Literal["linear", "cosine"] = Field("linear", description="how it decays")
    decay_to: float = Field(0.1, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    grad_clip: PositiveFloat = Field(1.0, description="gradient norm above which gradients are scaled down")
    freeze: tuple[Literal["vision_tower", "projector"], ...] = Field((), description="parts that are not trained")
    minis_per_partition: PositiveInt = Field(1, description="optimizer updates that share one rollout batch")
    epochs: PositiveInt = Field(1, description="times that a rollout batch is trained")
    chunks_per_mini: PositiveInt = Field(2, description="group-aligned chunks of one optimizer mini")
    max_tokens_per_microbatch: PositiveInt = Field(
        8192, description="laid-out LLM tokens of one forward, padding included"
    )
    max_patches_per_microbatch: PositiveInt = Field(16384, description="image patches of one forward")
    layout: Literal["auto", "shared", "padded"] = Field(
        "auto",
        description="shared: samples of a group share the forward of their prompt; padded: a row of prompt + response "
        "each; auto: shared on the CPU, padded on a GPU or with gradient_checkpointing",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward to save memory")
    before_logprob_hook: str = Field(
        "", description="module:function(model, partition, rank), called before phase 1 computes log-probs; empty: none"
    )

    def layout_on(self, device: str) -> Literal["shared", "padded"]:
        """``layout`` with ``auto`` resolved. On a GPU, attention to kept keys and values runs by a slower kernel: there
        ``shared`` pays only where prompts are long against responses, which a recipe has to say.
        """
        if self.layout == "auto":
            return "shared" if device == "cpu" and not self.gradient_checkpointing else "padded"
        return self.layout


class LoraConfig(Block):
    rank: NonNegativeInt = Field(0, description="rank of LoRA adapters; 0: all weights are trained")
    alpha: PositiveFloat = Field(32.0, description="adapters are scaled by alpha / rank")
    dropout: Decay = Field(0.0, description="dropout before adapters, in the training forward alone")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="names of the linear layers that get an adapter",
    )
    publish: Literal["merged", "adapter"] = Field(
        "merged", description="what engines get: whole weights with adapters merged in, or the adapters"
    )


class StalenessConfig(Block):
    mode: Literal["lockstep", "bounded"] = Field(
        "lockstep",
        description="lockstep: partition k is generated by version max(0, k - max), exactly; bounded: each decode "
        "batch by the newest version, which is no older",
    )
    max: NonNegativeInt = Field(1, description="bound s on (partition - version); 0 is on-policy, 1 overlaps one step")


class PlaneConfig(Block):
    backend: Literal["ray"] = Field("ray", description="data plane implementation")
    capacity_mib: PositiveInt = Field(1024, description="MiB the plane may hold before producers wait")
    fetch_timeout_s: PositiveFloat = Field(1800.0, description="seconds a claim waits for its groups before it fails")
    lease_s: PositiveFloat = Field(1800.0, description="seconds after which an unacknowledged claim is given out again")


class CheckpointConfig(Block):
    every: NonNegativeInt = Field(25, description="updates between checkpoints; 0: only at the end")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")


class EvalConfig(Block):
    every: NonNegativeInt = Field(25, description="updates between evaluations on the validation split; 0: none")
    prompts: PositiveInt = Field(200, description="prompts of one evaluation")


class ClusterConfig(Block):
    address: str = Field("", description="address of a running Ray cluster; empty: an embedded one on this machine")
    actor_cores: tuple[int, ...] = Field((), description="CPU cores of the actor; empty: half of the machine's")
    rollout_cores: tuple[int, ...] = Field((), description="CPU cores of the rollout; empty: the other half")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where each rank and replica gets a GPU, else cpu"
    )
    colocate: bool = Field(False, description="one actor rank and one vllm engine share a GPU")


class SftConfig(Block):
    steps: PositiveInt = Field(200, description="most supervised steps")
    batch: PositiveInt = Field(32, description="prompts per step")
    lr: PositiveFloat = Field(2e-3, description="learning rate after warm-up")
    warmup_steps: NonNegativeInt = Field(10, description="steps of linear warm-up")
    stop_exact_match: float = Field(
        0.28, ge=0, le=1, description="stop once validation exact match reaches this; 1: never"
    )
    eval_below_loss: PositiveFloat = Field(0.8, description="validate only once the average loss is below this")
    eval_every: PositiveInt = Field(3, description="steps between validations")


class SwitchesConfig(Block):
    processor_pool: int = Field(
        0, ge=0, le=1024, description="P: processes that process prompts; 0: one thread of the rollout process"
    )
    logprob_reuse: bool = Field(
        False, description="R: the training forward supplies the old-policy log-probs, without a forward of their own"
    )
    chunk_overlap: bool = Field(
        False, description="S: phase 1 forwards a chunk as soon as its groups are there, not once all of the mini are"
    )


class Seams(BaseModel):
    """Which implementation stands at each seam. No option sets these: the switches do (``stretto/switches``), and the
    parity tool (``stretto/parity``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    processor_workers: NonNegativeInt = 0
    old_policy: Literal["", "training_forward"] = ""
    """Empty: what ``algorithm.old_policy`` says."""
    phase1: Literal["whole", "chunks"] = "whole"
    record: str = ""
    """Folder of the recording that partitions are written to; empty: none is."""
    record_partitions: NonNegativeInt = 0
    """How many, from partition 0 on; 0: all."""
    replay: str = ""
    """Folder of the recording that prompts, responses and rewards come from; empty: they are made."""
    replay_timing: Literal["instant", "recorded"] = "instant"
    partitions: NonNegativeInt = 0
    """The run ends after so many partitions, whatever ``run.updates`` says; 0: it does not."""
    dump_partition: int = -1
    """Partition after which gradients and parameters are written whole to ``dump/``; -1: none."""
    checkpoints: bool = True
    """False: none is written; such a run is repeated rather than resumed."""


class Config(Block):
    """A whole run. Sources, weakest first: defaults, recipe file, environment (``STRETTO_BLOCK__KEY``), ``--set``."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    lora: LoraConfig = LoraConfig()
    staleness: StalenessConfig = StalenessConfig()
    plane: PlaneConfig = PlaneConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    sft: SftConfig = SftConfig()
    switches: SwitchesConfig = SwitchesConfig()
    seams: Seams = Seams()

    def with_seams(self, **seams: Any) -> Config:
        """A new config with other seams; for switches and the parity tool alone."""
        return self.model_copy(update={"seams": self.seams.model_copy(update=seams)})

    @property
    def importance_correction(self) -> Literal["none", "tis", "mis"]:
        """``algorithm.importance_correction`` with ``auto`` resolved."""
        choice = self.algorithm.importance_correction
        if choice == "auto":
            stale = self.staleness.max > 0 and self.algorithm.old_policy != "rollout"
            return "tis" if stale or self.snapshot_lags else "none"
        return choice

    @property
    def snapshot_lags(self) -> bool:
        """Whether the ratio may start from an older version than the one that sampled, whatever the staleness is."""
        return self.algorithm.old_policy == "old_actor" and self.algorithm.old_actor_every > 1

    @property
    def weight_transfer(self) -> Literal["host", "ipc", "nccl"]:
        """``rollout.weight_transfer`` with ``auto`` resolved; ``host`` for engines that know nothing else."""
        choice = self.rollout.weight_transfer
        if self.rollout.engine != "vllm" or self.seams.replay:
            return "host"
        if choice == "auto":
            return "ipc" if self.cluster.colocate else "host"
        return choice

    @property
    def updates_per_partition(self) -> int:
        """Optimizer updates between two policy versions."""
        return self.actor.minis_per_partition * self.actor.epochs

    @property
    def partitions(self) -> int:
        """Rollout batches of the whole run, each of which makes one policy version."""
        every = self.run.updates // self.updates_per_partition
        return min(every, self.seams.partitions) if self.seams.partitions else every

    @property
    def updates_to_train(self) -> int:
        """Optimizer updates of the whole run: ``run.updates``, unless it ends early on purpose."""
        return self.partitions * self.updates_per_partition
