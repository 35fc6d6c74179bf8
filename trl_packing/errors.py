"""The package's exception types. Everything here is public and imports nothing of ours."""


class PackingError(ValueError):
    """Bad input or a setting that packing cannot honour. The message says what to change."""


class LeakError(RuntimeError):
    """Segments of a packed row influence one another on this model. Raised by the trainer before step 1."""


class MissingDependencyError(ImportError):
    """An optional package is needed. The message holds the exact install line."""


class UnsupportedVersionError(ImportError):
    """An installed package is outside the supported range. The message gives the found and the required version."""
