"""Every locked package is listed with the license that it declares."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata

from lorabatch.install.packages import ROOT

FOLDER = ROOT / "install"
# What older packages declare instead of an SPDX expression.
FAMILIES = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "Other/Proprietary License": "NVIDIA-Proprietary",
}


def listed() -> dict[str, str]:
    """License of each package of the table. Fails for a package that stands in it twice."""
    table = re.findall(r"^\| (?!license|-)(.+?) \| (.+) \|$", (FOLDER / "licenses.md").read_text("utf-8"), re.MULTILINE)
    pairs = [(package, license) for license, packages in table for package in packages.split(", ")]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


def locked() -> set[str]:
    locks = (FOLDER / name for name in ("requirements.lock", "requirements-cuda.lock"))
    return {name for lock in locks for name in re.findall(r"^([\w.-]+)==", lock.read_text("utf-8"), re.MULTILINE)}


def test_the_table_lists_the_locked_packages_and_torch() -> None:
    assert listed().keys() == locked() | {"torch"}


def test_packages_are_under_the_license_that_the_table_says() -> None:
    seen = 0
    for package, license in listed().items():
        try:
            declared = metadata(package)
        except PackageNotFoundError:
            continue  # for other systems
        seen += 1
        if expression := declared.get("License-Expression"):
            assert license == expression, package
            continue
        names = [name.split(" :: ")[-1] for name in declared.get_all("Classifier") or [] if name.startswith("License")]
        families = [FAMILIES.get(name, name) for name in names] or (declared.get("License") or "").split()[:1]
        assert all(family in license for family in families), (package, families)
    assert seen > 50
