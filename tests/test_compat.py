"""Version and availability checks, against package metadata that the tests make up."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from trl_packing import MissingDependencyError, UnsupportedVersionError, _compat

SUPPORTED = {"trl": "1.16.0", "transformers": "5.22.2", "torch": "2.13.0"}


@pytest.fixture
def install(monkeypatch):
    """Pretend that exactly these distributions are installed, and what transformers asks of kernels."""

    def pretend(versions, kernels_range=">=0.17.2,<0.18"):
        def version(name):
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        lines = ["numpy>=1.17", f'kernels{kernels_range}; extra == "kernels"', 'kernels<9; extra == "other"']
        monkeypatch.setattr(_compat, "version", version)
        monkeypatch.setattr(_compat, "requires", lambda name: lines if kernels_range else lines[:1])

    return pretend


@pytest.mark.parametrize(
    "versions",
    [
        SUPPORTED,
        {"trl": "1.99.1", "transformers": "5.20.2", "torch": "2.10.0+cu130"},
        {"trl": "1.17.0.dev0", "transformers": "5.24.0.dev0", "torch": "2.10.0a0+vendor.25.11"},
    ],
    ids=["pinned", "floors-and-local-build", "development-builds"],
)
def test_supported_versions_pass(install, versions):
    install(versions)
    _compat.check_versions()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("trl", "1.15.0"),
        ("trl", "2.0.0"),
        ("transformers", "5.20.1"),
        ("transformers", "6.0.0.dev0"),
        ("torch", "2.9.1"),
    ],
    ids=lambda value: value,
)
def test_unsupported_version_names_found_and_required(install, name, number):
    install({**SUPPORTED, name: number})
    with pytest.raises(UnsupportedVersionError) as caught:
        _compat.check_versions()
    assert f"`{name}` {number}" in str(caught.value)
    assert f"{name}{_compat.REQUIRED[name]}" in str(caught.value)
    others = {"trl", "transformers", "torch"} - {name}
    assert not any(f"`{other}`" in str(caught.value) for other in others)


def test_all_wrong_versions_are_named_at_once(install):
    install({"trl": "1.0", "transformers": "5.0", "torch": "2.0"})
    with pytest.raises(UnsupportedVersionError, match=r"(?s)`trl` 1\.0.*`transformers` 5\.0.*`torch` 2\.0"):
        _compat.check_versions()


def test_missing_base_package_gives_the_install_line(install):
    install({"torch": "2.13.0", "transformers": "5.22.2"})
    with pytest.raises(MissingDependencyError, match=r"`trl`.*`pip install 'trl>=1\.16,<2'`"):
        _compat.check_versions()


@pytest.mark.parametrize(
    ("host", "accepted", "kernels", "usable"),
    [
        ("5.22.2", ">=0.17.2,<0.18", "0.17.2", True),
        ("5.18.0", ">=0.17.0,<0.18", "0.17.0", True),
        ("5.22.2", ">=0.17.2,<0.18", "0.17.1", False),
        ("5.22.2", ">=0.17.2,<0.18", "0.18.2", False),
        ("5.24.0", ">=0.18.2,<0.19", "0.17.2", False),
        ("5.24.0", ">=0.18.2,<0.19", "0.18.2", True),
        ("5.22.2", ">=0.17.2,<0.18", None, False),
        ("5.99.0", None, "0.17.2", False),
        (None, ">=0.17.2,<0.18", "0.17.2", False),
    ],
    ids=["pinned", "oldest", "too-old", "too-new", "newest-host", "newest-pair", "absent", "no-extra", "no-host"],
)
def test_kernels_are_usable_only_in_a_pair_that_transformers_accepts(install, host, accepted, kernels, usable):
    install({name: number for name, number in (("transformers", host), ("kernels", kernels)) if number}, accepted)
    answer, reason = _compat.kernels_usable()
    assert answer is usable
    assert str(host) in reason
    assert usable or "pip install 'trl-packing[kernels]'" in reason


def test_kernels_verdict_is_that_of_the_installed_transformers():
    from transformers.utils import is_kernels_available

    assert _compat.kernels_usable()[0] is is_kernels_available()


def test_require_gives_the_module_or_the_exact_install_line():
    assert _compat.require("json", "dev").loads("1") == 1
    with pytest.raises(MissingDependencyError, match=r"`no_such_package`.*`pip install 'trl-packing\[gdn\]'`"):
        _compat.require("no_such_package", "gdn")


def test_require_reports_a_package_that_is_there_but_broken(tmp_path, monkeypatch):
    (tmp_path / "broken_kernel.py").write_text("raise ImportError('undefined symbol: at_')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _compat.is_available("broken_kernel")
    with pytest.raises(MissingDependencyError, match=r"undefined symbol: at_.*trl-packing\[flash\]"):
        _compat.require("broken_kernel", "flash")


def test_is_available_ignores_folders_that_only_share_the_name(tmp_path, monkeypatch):
    (tmp_path / "fla_like").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not _compat.is_available("fla_like")
    assert not _compat.is_available("no_such_package.inner")
    assert _compat.is_available("json.decoder")


def test_checks_load_neither_torch_nor_transformers():
    code = (
        "import sys; from trl_packing import _compat; _compat.check_versions(); _compat.kernels_usable();"
        "_compat.is_available('torch'); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
