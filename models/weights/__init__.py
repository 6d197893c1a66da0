"""Weights as Hugging Face stores them: safetensors files, checked before they are read.

`load` and `save` are for whole models, `load_adapters` and `save_adapters` for what
LoRA trains. Nothing is downloaded: files lie on disk, or an error says which to put
where.
"""

from models.weights.error import WeightsError as WeightsError
from models.weights.loading import load as load, load_adapters as load_adapters
from models.weights.saving import save as save, save_adapters as save_adapters
