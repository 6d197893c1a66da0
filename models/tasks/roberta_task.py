"""What all tasks of a RoBERTa have in common."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.roberta import Roberta, RobertaConfig
from models.tasks.task import Task, Variables
from models.wrapping import WrapBlock


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RobertaTask(Task):
    """A task that a RoBERTa learns."""

    config: RobertaConfig

    def make_model(self, wrap_block: WrapBlock) -> nn.Module:
        return Roberta(self.config, wrap_block=wrap_block)

    def init(self, model: nn.Module, key: jax.Array) -> Variables:
        return model.init(key, jnp.zeros((1, 8), jnp.int32), train=False)
