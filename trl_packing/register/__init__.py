"""The only place that touches the registries of transformers and kernels. Everything it changes, it can undo "
"exactly."""

from __future__ import annotations

from torch import nn

from ..errors import PackingError
from .attention import VARLEN, register_attention, unregister_attention

__all__ = ["VARLEN", "register_ops", "unregister_ops"]


def register_ops(model: nn.Module | None = None, *, ops: str = "auto") -> None:
    """
    Put the boundary-aware attention and operations in place.

    Args:
        model (`nn.Module`, *optional*):
            Model whose modeling files get the operations. Without one only the `varlen` attention is registered.
        ops (`str`, *optional*, defaults to `"auto"`):
            `"auto"` decides per call by device and by what is installed, `"kernels"` insists on the packages' kernels,
            `"torch"` on our operations.

    Raises:
        [`PackingError`]: If `ops` is none of these.
        [`MissingDependencyError`]: If `ops="kernels"` and a package is missing.
    """
    if ops not in ("auto", "kernels", "torch"):
        raise PackingError(f'`ops` is one of "auto", "kernels" and "torch", but {ops!r} was passed.')
    register_attention()
    if model is not None:
        from .dispatch import install_dispatchers

        install_dispatchers(model, ops=ops)


def unregister_ops() -> None:
    """Undo every change of `register_ops` in this process."""
    from .dispatch import remove_dispatchers
    from .towers import remove_tower_hooks

    remove_dispatchers()
    remove_tower_hooks()
    unregister_attention()
