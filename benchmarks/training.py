"""The training step that methods are compared on: ResNet-18 at the size of CIFAR."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

import dafjax
from benchmarks.methods import Method
from models import memory, step
from models.data import ArraySplit, Dataset
from models.resnet import ResNet
from models.tasks.images import ImageClassification, classify_images


IMAGE_SHAPE = (32, 32, 3)
NUM_CLASSES = 10

# How XLA:CPU orders a program: for concurrency, which is the default, or for memory.
SCHEDULERS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "memory": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
}

ArrayTree = Any

_NO_SPLIT = ArraySplit(
    images=np.zeros((1, *IMAGE_SHAPE), np.float32),
    labels=np.zeros(1, np.int32),
    mean=np.zeros(3, np.float32),
    std=np.ones(3, np.float32),
)
_NO_IMAGES = Dataset("noise", _NO_SPLIT, _NO_SPLIT, NUM_CLASSES, IMAGE_SHAPE)


@final
@dataclasses.dataclass(frozen=True)
class Workload:
    """One method's training step at one batch size.

    Attributes:
        method: What is wrapped, and how it is compiled.
        batch: Images in a step.
        width: Filters of the first stage.
        dtype: What the model computes in.
    """

    method: Method
    batch: int
    width: int = 64
    dtype: DTypeLike = np.float32

    @property
    def task(self) -> ImageClassification:
        """What is learned; its images are drawn by `random_batch`."""
        return classify_images(
            "resnet18", _NO_IMAGES, width=self.width, dtype=self.dtype
        )

    @property
    def model(self) -> ResNet:
        """The model, its blocks wrapped by the method."""
        return self.task.make_model(self.method.wrap_block)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """SGD with momentum; after the first step its momentum is the gradient."""
        return optax.sgd(0.01, momentum=0.9)

    @property
    def key(self) -> jax.Array:
        """What is random in a step: nothing, but it is an argument."""
        return jax.random.key(0)

    @property
    def loss(self) -> step.LossFunction:
        """The loss, wrapped by the method."""
        return self.method.wrap_loss(step.make_loss(self.task, self.model))

    def compile(
        self,
        *,
        scheduler: str = "default",
        sharding: jax.sharding.Sharding | None = None,
    ) -> jax.stages.Compiled:
        """Compiles the whole training step, its state donated.

        Args:
            scheduler: A name of `SCHEDULERS`.
            sharding: On what it would run; None: on this machine.
        """
        batch = step.abstract_batch(self.task, self.batch)
        arguments = self.abstract_state(), {}, self.key, *batch
        train_step = step.make_train_step(self.loss, self.optimizer)
        return step.compile_train_step(
            self.method.jit(train_step, donate_argnums=0),
            *place(arguments, sharding),
            compiler_options={**self.method.compiler_options, **SCHEDULERS[scheduler]},
        )

    def abstract_state(self) -> ArrayTree:
        """Returns the state in shape and dtype only."""
        return jax.eval_shape(self._init, jax.random.key(0))

    def _init(self, key: jax.Array) -> step.TrainState:
        variables = self.task.init(self.model, key)
        return step.begin(self.task, variables, self.optimizer)[0]

    def abstract_arguments(self) -> tuple[ArrayTree, ...]:
        """Returns the arguments of the loss in shape and dtype only."""
        state = self.abstract_state()
        batch = step.abstract_batch(self.task, self.batch)
        return state.trained, state.mutable, self.key, *batch

    def initial_state(self) -> step.TrainState:
        """Draws the initial state, equal for all methods."""
        # It runs once: to optimize it takes longer.
        options = {"xla_backend_optimization_level": "0"}
        state = jax.jit(self._init, compiler_options=options)(jax.random.key(0))
        # The last norm of a block starts at zero, and with it all gradients inside: a
        # wrong one could not be told from a right one.
        trained = jax.tree_util.tree_map_with_path(
            lambda path, x: x + 1 if _is_zero_scale(path, x) else x, state.trained
        )
        return state.replace(trained=trained)

    def random_batch(self) -> tuple[jax.Array, jax.Array]:
        """Draws images and labels, equal for all methods."""
        rng = np.random.default_rng(0)
        images = rng.standard_normal((self.batch, *IMAGE_SHAPE), np.float32)
        labels = rng.integers(NUM_CLASSES, size=self.batch, dtype=np.int32)
        return jax.device_put(images), jax.device_put(labels)

    def arguments(self) -> tuple[ArrayTree, ...]:
        """Draws the arguments of the loss, equal for all methods."""
        state = self.initial_state()
        return state.trained, state.mutable, self.key, *self.random_batch()

    def stepper(self, compiled: jax.stages.Compiled) -> Callable[[], ArrayTree]:
        """Returns a function that takes the next step each time it is called."""
        state, key, batch = self.initial_state(), self.key, self.random_batch()

        def take_step() -> ArrayTree:
            nonlocal state
            state, metrics = compiled(state, {}, key, *batch)
            return state, metrics

        return take_step

    def saved_residuals(self) -> dafjax.Plan:
        """Lists what a method of dafjax keeps; runs nothing."""
        params, mutable, key, *batch = self.abstract_arguments()
        zeros = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), (params, mutable, batch)
        )
        params, rest = zeros[0], (zeros[1], key, *zeros[2])
        loss = self.loss
        return dafjax.saved_residuals(lambda params: loss(params, *rest), params)

    def saved_nbytes(self) -> int:
        """Returns the bytes that autodiff keeps for the backward pass; runs nothing.

        For methods of dafjax it checks what `saved_residuals` reports.
        """
        return memory.saved_residual_nbytes(self.loss, *self.abstract_arguments())


def place(tree: ArrayTree, sharding: jax.sharding.Sharding | None) -> ArrayTree:
    """Returns arrays in shape, dtype and place only."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def loss(output: tuple[step.TrainState, step.Metrics]) -> jax.Array:
    """Extracts the loss from a step's output."""
    return output[1]["loss"]


def gradient(output: tuple[step.TrainState, step.Metrics]) -> ArrayTree:
    """Extracts the gradient from the output of the first step."""
    traces = output[0].optimizer_state
    return next(s.trace for s in traces if isinstance(s, optax.TraceState))


def _is_zero_scale(path: tuple[Any, ...], x: jax.Array) -> bool:
    return "norm2" in jax.tree_util.keystr(path) and path[-1].key == "scale"
