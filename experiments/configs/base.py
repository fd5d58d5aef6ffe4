"""Every setting with its default, so that whatever can be set can be set from the command line."""

import dataclasses
import typing
from collections.abc import Mapping

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from tlt_jax.config import Config


def get_config(**sections) -> ConfigDict:
    """All settings of `Config`: the defaults with `sections` (values or mappings) laid over them.

    A mapping where the default is no section, as `data.tasks`, replaces it.
    """
    return settings_of(Config, **sections)


def settings_of(kind: type, **sections) -> ConfigDict:
    """`get_config` for another dataclass with a data section: that of a command of its own."""
    settings = _laid_over(_defaults(kind), sections)
    if isinstance(tasks := settings["data"]["tasks"], Mapping):
        settings["data"]["tasks"] = {
            label: {"name": label, "weight": 1.0, **spec} for label, spec in tasks.items()
        }
    return ConfigDict(settings)


def _defaults(kind: type) -> dict:
    values = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _defaults(hints[field.name])
        elif field.default is not dataclasses.MISSING:
            values[field.name] = _open(hints[field.name], field.default)
    return values


def _open(hint, default):
    """`default`, or, for a setting that may be None, a place for a value of its kind: a plain None
    could not be overridden from the command line."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return placeholder(kinds[0]) if default is None and kinds else default


def _laid_over(base: dict, changes: Mapping) -> dict:
    merged = dict(base)
    for name, value in changes.items():
        inner = isinstance(value, Mapping) and isinstance(base.get(name), dict)
        merged[name] = _laid_over(base[name], value) if inner else value
    return merged
