"""`params.yaml` as frozen objects; `reading` builds them from the file.

Every knob is declared here once: its name, type, range, meaning and, unless the file must set it, its default. A
params file lists the knobs that people tune; any other knob declared here may be added to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swap_pipeline.config.parsing import knob

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
IntByEpoch = int | tuple[tuple[int, int], ...]
"""One value, or `[[epoch, value], …]`: each value holds from its epoch on."""
FloatByEpoch = float | tuple[tuple[int, float], ...]
Knots = tuple[tuple[float, float], ...]
"""`[[epoch, value], …]`, with straight lines between them."""
EpochList = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images to train and test on."""

    name: str = knob("the data set")
    root: str = knob("folder with your own images, or with a data set's official files if there is no network")
    train_images: int | Literal["all"] = knob(
        "use only this many training images, the same number of each class", default="all", minimum=1
    )
    validation_images: int = knob(
        "training images held back, the same number of each class, for curves and choices; test images are then left "
        "to final models",
        default=0,
        minimum=0,
    )
    max_gb_in_memory: float = knob(
        "larger data sets are read from their image files, batch by batch", default=2.0, minimum=0
    )
    copies: tuple[int, ...] = knob(
        "make smaller copies of the image files once, with this many pixels on the shorter side; an epoch reads the "
        "smallest ones of at least 5/4 of its image_size (docs/data.md)",
        default=(),
        minimum=8,
        maximum=1 << 12,
    )


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes made to every training batch, and how test images are cropped."""

    padding: int = knob(
        "pixels of reflection added on each side before a random crop of the old size", default=0, minimum=0
    )
    flip: bool = knob("flip half of the images horizontally", default=True)
    cutout: int = knob("side of a square that is blanked out in every image; 0 for none", default=0, minimum=0)
    test_crop: Literal["square", "rectangle"] = knob(
        "test images read from files: a square from the middle, or a rectangle in the image's own shape",
        default="square",
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = knob("resnet9, torchvision:<name>, timm:<name> or package.module:function")
    width: int | None = knob("channels of the first layer; the paper's ResNet-9 has 64", default=None, minimum=1)
    options: dict[str, Any] | None = knob("further arguments for the function that makes the network", default=None)
    pretrained: bool = knob("start phase 1 from published weights", default=False)
    zero_init_last_gamma: bool = knob(
        "each residual block starts as the identity: its last norm layer scales by 0", default=False
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients move the weights; a phase may have an `optimizer` section of its own."""

    name: str = knob("sgd, torch:<class> or timm:<name> (docs/optimizers.md)", default="sgd")
    options: dict[str, Any] | None = knob("further arguments of an optimizer of torch or timm", default=None)
    momentum: float = knob("momentum of sgd; others take it as an option", default=0.9, minimum=0, maximum=1)
    nesterov: bool = knob("Nesterov's variant of momentum; sgd only", default=True)
    weight_decay: float = knob(
        "with sgd, an L2 penalty that is added to the gradient; others have rules of their own", default=5e-4, minimum=0
    )
    decay_norms: bool = knob("weight decay also on the scales and shifts of norm layers", default=True)
    decay_biases: bool = knob("weight decay also on the biases of other layers", default=True)
    clip_norm: float | None = knob(
        "a gradient with a longer norm, over all parameters, is scaled down to this one", default=None, above=0
    )
    label_smoothing: float = knob(
        "probability mass moved from the true class to all classes", default=0.0, minimum=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Settings of the computation that can change its results."""

    precision: Precision = knob(
        "of forward and backward passes (weights are fp32); auto: bf16 on GPUs that have it, fp16 on other GPUs, "
        "fp32 on CPU; tf32: fp32 with faster, coarser products, on GPUs only",
        default="auto",
    )
    channels_last: bool = knob("channels-last memory layout for images and weights; usually faster", default=True)
    compile: bool | Literal["reduce-overhead"] = knob(
        "compile the network with torch.compile before training; reduce-overhead: on a GPU also as CUDA graphs, which "
        "take memory and help with small batches",
        default=False,
    )
    deterministic: bool = knob("use only algorithms that give the same bytes every time; slower on GPUs", default=True)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Batch size, learning rate and image size over the epochs of a run."""

    batch_size: IntByEpoch = knob("images per step, over all devices of the run together", minimum=1)
    shards: int = knob(
        "equal parts of a batch, each normalised separately (batch norm); at most this many devices share the run",
        default=1,
        minimum=1,
        maximum=1 << 16,
    )
    peak_lr: float | None = knob("highest learning rate", default=None, above=0)
    warmup_epochs: float | None = knob(
        "epochs of linear warm-up from 0 to the peak; no warm-up if omitted", default=None, minimum=0
    )
    schedule: Literal["linear", "cosine", "constant"] = knob(
        "the learning rate after the warm-up: down to 0 in a straight line, down to 0 along half a cosine wave, or "
        "constant",
        default="linear",
    )
    lr_knots: Knots | None = knob(
        "the learning rate by epoch, instead of peak_lr, warmup_epochs and schedule", default=None, minimum=0
    )
    image_size: IntByEpoch | None = knob(
        "side in pixels to which images read from files are resized", default=None, minimum=1
    )
    min_scale: FloatByEpoch | None = knob(
        "images read from files: a random crop of at least this share of the area", default=None, above=0, maximum=1
    )
    optimizer: Optimizer | None = knob(
        "entries that differ from the top-level `optimizer` in this phase; another name leaves out its momentum, "
        "nesterov and options",
        default=None,
    )
    ema_decay: float | None = knob(
        "keep an exponential moving average of the weights with this decay per step (e.g. 0.99); it is the result",
        default=None,
        above=0,
        maximum=1 - 1e-9,
    )


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """When phase 1 ends. None of these change how it trains, so one training run serves all of their values."""

    stop: Literal["accuracy", "plateau", "qsr", "fork", "epochs"] = knob(
        "what ends the phase before max_epochs: the training accuracy passes τ; the validation loss stops falling; "
        "the learning rate is low enough for phase 2's steps without communication; short trials of phase 2 "
        "stop improving; or nothing (docs/choosing-tau.md)",
        default="accuracy",
    )
    stop_accuracy: float = knob(
        "stop: accuracy. The phase ends once training accuracy passes this percentage (τ); 100 for never",
        default=100.0,
        minimum=0,
        maximum=100,
    )
    patience: int = knob(
        "stop: plateau. End after this many epochs in a row without a lower validation loss", default=5, minimum=1
    )
    qsr_alpha: float | None = knob(
        "stop: qsr. The α of H = (α/η)²: at a learning rate of η, workers may train H steps without communication",
        default=None,
        above=0,
    )
    qsr_steps: int | None = knob(
        "stop: qsr. Phase 2's number of steps: the phase ends once H reaches it", default=None, minimum=1
    )

    fork_every: int = knob("stop: fork. Epochs between trials of phase 2, after the warm-up", default=3, minimum=1)
    forks: int = knob("stop: fork. Workers per trial", default=4, minimum=2, maximum=1 << 16)
    fork_steps: int = knob("stop: fork. Steps per trial, at most an epoch", default=20, minimum=1)
    fork_batch_size: int | None = knob("stop: fork. Phase 2's batch size", default=None, minimum=1)
    fork_lr: float | None = knob(
        "stop: fork. Phase 2's peak learning rate; a trial decays from it to 0", default=None, above=0
    )

    @property
    def may_end_early(self) -> bool:
        return self.stop not in ("accuracy", "epochs") or (self.stop == "accuracy" and self.stop_accuracy < 100)


@dataclass(frozen=True, kw_only=True)
class Phase1(Leaving, Schedule):
    """Large batches, all devices, one model."""

    start: str | None = knob(
        "a safetensors file of this network to start from instead of initial weights (docs/networks.md)", default=None
    )
    max_epochs: int = knob("the phase ends here at the latest; a learning rate that falls reaches 0 here", minimum=1)
    sync_steps: IntByEpoch = knob(
        "local SGD: each shard takes this many steps with its own gradient, then the shards' weights are averaged; 1: "
        "every step takes the mean gradient",
        default=1,
        minimum=1,
    )
    keep_epochs: EpochList = knob(
        "epochs whose models are kept besides the last, for the analysis; a list, or all", default=(), minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class Phase2(Schedule):
    """Small batches, one independent worker for each seed."""

    epochs: int = knob("length of the phase; 0: no phase 2, the model is phase 1's", minimum=0)
    cycles: int = knob(
        "equal parts of the phase, each decaying from the peak (unless lr_knots is set) and ending in a model",
        default=1,
        minimum=1,
    )
    first_epoch: int = knob("what the knots call the first epoch of this phase", default=0, minimum=0)
    keep_epochs: EpochList = knob(
        "epochs after which the workers' models are kept and their average tested; a list, or all",
        default=(),
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of phase 2, whose models are averaged."""

    seeds: tuple[int, ...] = knob("one worker for each of these seeds", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Phase3:
    """Which workers are averaged, and the average's batch-norm statistics."""

    batch_size: int = knob(
        "images in one batch of the statistics pass; a batch is never split over devices", default=500, minimum=2
    )
    augment: bool = knob("use augmented images, as in training, instead of plain ones", default=False)
    select: Literal["all", "greedy"] = knob(
        "all: average all workers; greedy: start with the best on the validation images, then add each one that "
        "does not make the average worse there",
        default="all",
    )


@dataclass(frozen=True, kw_only=True)
class Params:
    """The whole of `params.yaml`."""

    recipe: str = knob("the file in recipes/ that this one came from; or a name of your own")
    method: str = knob("a label for tables and reports: what kind of training this is", default="swap")
    seed: int = knob(
        "for initial weights, data order and augmentation; change it for a repeat", minimum=0, maximum=2**63 - 1
    )
    data: Data
    augment: Augment
    model: Model
    optimizer: Optimizer
    compute: Compute
    phase1: Phase1
    phase2: Phase2
    workers: Workers
    phase3: Phase3

    @property
    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        """Phase 1's and phase 2's."""
        return self.phase1.optimizer or self.optimizer, self.phase2.optimizer or self.optimizer
