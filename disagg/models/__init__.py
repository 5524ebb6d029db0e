"""The model store: gets, keeps, checks and finds model weights.

`get_model` fetches a bundled model, `resolve_model` turns the `model:` of a topology into what an engine loads.
"""

from disagg.models.catalog import BUNDLED, BundledModel
from disagg.models.resolve import resolve_model
from disagg.models.store import (
    ModelEntry,
    Progress,
    cache_dir,
    get_model,
    list_models,
    model_path,
    verify_model,
)

__all__ = [
    "BUNDLED",
    "BundledModel",
    "ModelEntry",
    "Progress",
    "cache_dir",
    "get_model",
    "list_models",
    "model_path",
    "resolve_model",
    "verify_model",
]
