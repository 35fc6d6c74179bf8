"""
Every version check and every optional import, each with its reason and the bound at which it can go.

Everything is read from package metadata, so that nothing heavy is imported to find out that it is too old.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .errors import MissingDependencyError, UnsupportedVersionError

DISTRIBUTION = "trl-packing"

# Why each floor, and when it can go:
# - trl 1.16: the first whose collator and trainer pass segment boundaries, and whose private methods we override. The
#   floor moves with the methods named in trainer.py. 2.0 may move those methods.
# - transformers 5.20.2: the first that refuses packed hybrids without kernels in place of mixing them silently. Goes
#   when trl itself asks for more. 6.0 may move the modeling functions that the dispatcher replaces.
# - torch 2.10: the first with `torch.nn.attention.varlen.varlen_attn`. Goes when transformers itself asks for more.
REQUIRED = {"trl": ">=1.16,<2", "transformers": ">=5.20.2,<6", "torch": ">=2.10"}


def check_versions() -> None:
    """
    Check that the packages we build on are installed in a supported version.

    A development or vendor build counts as the release it precedes: `2.10.0a0+nv25.11` passes as 2.10.

    Raises:
        [`MissingDependencyError`]: If one of them is not installed.
        [`UnsupportedVersionError`]: If one of them is outside the supported range. All of them are named at once.
    """
    found = {name: installed_version(name) for name in REQUIRED}
    if missing := [name for name, number in found.items() if number is None]:
        wanted = " ".join(f"'{name}{REQUIRED[name]}'" for name in missing)
        raise MissingDependencyError(
            f"trl_packing needs {_listed(missing)}, not installed here. Install with `pip install {wanted}`."
        )
    wrong = [name for name, number in found.items() if number and not _within(number, REQUIRED[name])]
    if wrong:
        details = "; ".join(
            f"`{name}` {found[name]} is installed, {name}{REQUIRED[name]} is required" for name in wrong
        )
        wanted = " ".join(f"'{name}{REQUIRED[name]}'" for name in wrong)
        raise UnsupportedVersionError(
            f"trl_packing does not support the installed versions: {details}. Install with `pip install {wanted}`."
        )


def installed_version(distribution: str) -> str | None:
    """Give the installed version of a distribution without importing it, or `None` where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_available(name: str) -> bool:
    """
    Say whether a module can be imported, without importing it.

    Args:
        name (`str`):
            Name to import, for example `"flash_attn"`. A folder without `__init__.py` that happens to have this name
            does not count.

    Returns:
        `bool`: Whether it is there. It may still fail when imported; [`require`] reports that.
    """
    try:
        spec = find_spec(name)
    # find_spec raises where a parent package is missing, and where a stub without a spec sits in sys.modules.
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def require(name: str, extra: str) -> ModuleType:
    """
    Import an optional package.

    Args:
        name (`str`):
            Name to import.
        extra (`str`):
            The extra of ours that installs it.

    Returns:
        `ModuleType`: The imported module.

    Raises:
        [`MissingDependencyError`]: If it is not installed or fails to import, with the exact install line.
    """
    install = f"Install it with `pip install '{DISTRIBUTION}[{extra}]'`."
    if not is_available(name):
        raise MissingDependencyError(f"This needs the package `{name}`, which is not installed. {install}")
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"The installed package `{name}` cannot be imported: {error}. {install}"
        ) from error


def kernels_usable() -> tuple[bool, str]:
    """
    Say whether transformers will use the installed `kernels` package.

    The two work only in pairs: transformers 5.18 to 5.22 take kernels 0.17, and 5.23 and 5.24 want 0.18.2 or later,
    which the registry does not have. A wrong pair is ignored by transformers without a message, so the pair is tested,
    by the range that the installed transformers declares. Goes when the supported transformers all accept one version.

    Returns:
        `tuple[bool, str]`: Whether the pair works, and one sentence that says why or what to install.
    """
    host, kernels = installed_version("transformers"), installed_version("kernels")
    accepted = _range_for_kernels()
    install = f"`pip install '{DISTRIBUTION}[kernels]'` installs a pair that works."
    if host is None or accepted is None:
        return False, f"transformers {host} accepts no version of `kernels`. {install}"
    if kernels is None:
        return False, f"`kernels` is not installed; transformers {host} accepts kernels{accepted}. {install}"
    if not _within(kernels, accepted):
        return False, f"transformers {host} accepts kernels{accepted} and ignores the installed {kernels}. {install}"
    return True, f"transformers {host} accepts the installed kernels {kernels}."


def _range_for_kernels() -> str | None:
    """The range behind `transformers[kernels]`, which is the one transformers tests at run time."""
    for line in (requires("transformers") if installed_version("transformers") else None) or ():
        requirement = Requirement(line)
        if requirement.name == "kernels" and requirement.marker and requirement.marker.evaluate({"extra": "kernels"}):
            return str(requirement.specifier)
    return None


def _within(number: str, bounds: str) -> bool:
    return SpecifierSet(bounds).contains(Version(number).base_version)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
