"""Find and read a recipe's YAML, check every key and value, and parse it together with the command line."""

from .files import ConfigFile, config_folders, list_configs, read_config, resolve_config
from .lora import build_lora
from .parse import LaunchOptions, RecipeArguments, RecipeParser, parse_recipe, usage_errors

__all__ = [
    "ConfigFile",
    "LaunchOptions",
    "RecipeArguments",
    "RecipeParser",
    "build_lora",
    "config_folders",
    "list_configs",
    "parse_recipe",
    "read_config",
    "resolve_config",
    "usage_errors",
]
