"""The compiled library, where one was built."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorabatch import kernels
from lorabatch.kernels import native


def test_a_library_that_was_built_for_this_processor_is_used() -> None:
    build = torch.backends.cpu.get_cpu_capability().lower()
    if not list(Path(native.__file__).parent.glob(f"_{build}.*so")):
        pytest.skip("compiled kernels were not built on this machine")
    assert native.native_build() == build, "built from other sources: build it again"


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump to read instructions with")
def test_the_library_for_avx2_has_none_of_the_larger_vectors() -> None:
    for library in Path(native.__file__).parent.glob("_avx2.*so"):
        said = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
        assert "%ymm" in said
        assert "%zmm" not in said


def test_instructions_are_known_without_torch_as_torch_knows_them() -> None:
    build = torch.backends.cpu.get_cpu_capability()
    if build not in ("AVX512", "AVX2") or "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("torch names no vectors that kernels use")
    assert kernels.cpu_instructions()[0].replace("-", "") == build


@pytest.mark.skipif(native.native_build() is None, reason="compiled kernels were not built on this machine")
def test_dot_products_are_served_where_the_processor_has_their_instructions() -> None:
    found, can = kernels.cpu_instructions(), native.native_number("kinds_of_dots")
    is_wide = native.native_build() == "avx512"
    expected = is_wide and "AVX512_BF16" in found, ("AVX512_VNNI" if is_wide else "AVX_VNNI") in found
    assert (bool(can & 1), bool(can & 2)) == expected


def test_a_library_built_from_other_sources_is_not_used_and_the_log_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_VERSION", native._VERSION + 1)
    native._library.cache_clear()
    try:
        assert native.native_build() is None
        assert native.native_function.__wrapped__("rms_norm") is None
    finally:
        native._library.cache_clear()
    (record,) = caplog.records
    assert "no compiled CPU kernels" in record.getMessage()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86")
def test_a_package_that_was_installed_without_a_compiler_is_known_without_torch(tmp_path: Path) -> None:
    shutil.copy(kernels.__file__, tmp_path)
    code = "import sys, runpy; print(runpy.run_path('__init__.py')['lacks_compiled_kernels'](), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "True False\n"
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "_avx2.cpython-311-x86_64-linux-gnu.so").touch()
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "False False\n"
