"""The package's description on indexes is README.md, with no link or picture that leads into a checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from lorabatch.install.packages import ROOT
from lorabatch.setup import long_description

# Hooks of the build backend, run as pip and `build` run them: in the folder of the sources.
BUILD = """
import setuptools.build_meta as backend, sys
folder, hook = sys.argv[1:]
print(getattr(backend, hook)(folder))
"""
TARGET = re.compile(r"\]\(([^)\s]+)\)")
PLAIN = re.compile(r"[^\w\s]|\s+")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The parts of a checkout that metadata are made of; the folders of its packages are empty."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.cfg", "setup.py", "version.py", "__init__.py"):
        shutil.copyfile(ROOT / name, folder / name)
    pyproject = (folder / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(r'^  "lorabatch\.([\w.]+)",$', pyproject, re.MULTILINE)
    for package in packages:
        (folder / package.replace(".", "/")).mkdir(parents=True, exist_ok=True)
    return folder


def metadata(sources: Path) -> tuple[dict[str, str], str]:
    """The fields and the description of the wheel that would be built of these sources."""
    built = sources.parent / "built"
    built.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, built, "prepare_metadata_for_build_wheel"],
        cwd=sources,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    path = built / done.stdout.splitlines()[-1] / "METADATA"
    found = BytesParser().parsebytes(path.read_bytes())
    return dict(found.items()), bytes(found.get_payload(decode=True)).decode()


def words(text: str) -> list[str]:
    return PLAIN.sub(" ", text).split()


def test_without_a_repository_links_are_text_and_pictures_are_left_out(sources: Path) -> None:
    fields, text = metadata(sources)
    assert fields["Description-Content-Type"] == "text/markdown"
    assert TARGET.findall(text) == []
    assert "![" not in text
    assert "times as fast" in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^!\[[^\]]*\]\(.*\)$", "", readme, flags=re.MULTILINE)
    # Nothing is lost but addresses, pictures and the caption of a picture.
    caption = prose[prose.index("*Rows over 8 adapters") : prose.index("| what | result |")]
    assert words(text) == words(TARGET.sub("]", prose.replace(caption, "")))


def test_with_a_repository_links_and_pictures_lead_to_this_release(sources: Path) -> None:
    with (sources / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('\n[project.urls]\nRepository = "https://forge.example/us/lorabatch"\n')
    fields, text = metadata(sources)
    assert fields["Project-URL"] == "Repository, https://forge.example/us/lorabatch"
    targets = TARGET.findall(text)
    base = f"https://forge.example/us/lorabatch/(blob|raw)/v{re.escape(fields['Version'])}/"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [re.sub(base, "", target) for target in targets] == TARGET.findall(readme)
    assert all(re.match(base, target) for target in targets)
    pictures = re.findall(r"!\[[^\]]*\]\((.*)\)", text)
    assert len(pictures) == len(re.findall(r"^!\[", readme, re.MULTILINE)) > 0
    assert all("/raw/" in picture for picture in pictures)
    assert sum("/raw/" in target for target in targets) == len(pictures)


@pytest.mark.parametrize(
    ("written", "plain", "linked"),
    [
        ("see [a\nb](docs/x.md#c).", "see a\nb.", "see [a\nb](R/blob/v2/docs/x.md#c)."),
        ("[home](https://a.example/x) and [here](#below)",) * 3,
        ("`a[0](b)` is [code](c.py)", "`a[0](b)` is code", "`a[0](b)` is [code](R/blob/v2/c.py)"),
        ("in ![a sign](s.png) line", "in a sign line", "in ![a sign](R/raw/v2/s.png) line"),
        ("![p](p.svg)\n\n*What it is.*\n\nText.", "Text.", "![p](R/raw/v2/p.svg)\n\n*What it is.*\n\nText."),
        ("![p](p.svg)\n\n**Bold.** *x*", "**Bold.** *x*", "![p](R/raw/v2/p.svg)\n\n**Bold.** *x*"),
        ("![p](https://a.example/p.svg)\n\n*It.*\n",) * 3,
        ("```\n[x](y)\n```\n[x](y)", "```\n[x](y)\n```\nx", "```\n[x](y)\n```\n[x](R/blob/v2/y)"),
    ],
)
def test_each_form_of_link(written: str, plain: str, linked: str) -> None:
    assert long_description(written, None, "2") == plain
    assert long_description(written, "R", "2") == linked


def test_the_package_has_no_setup_script(sources: Path) -> None:
    """The folder of the package is that of the checkout, whose modules are all taken."""
    command = [sys.executable, "-P", "-c", BUILD, sources.parent / "dist", "build_wheel"]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(sources.parent / "dist" / done.stdout.splitlines()[-1]) as wheel:
        names = set(wheel.namelist())
    assert "lorabatch/version.py" in names
    assert "lorabatch/setup.py" not in names


def test_sources_can_be_built_again(sources: Path) -> None:
    """An sdist has what its own build reads: README.md, which is no file of the metadata any more."""
    command = [sys.executable, "-P", "-c", BUILD, sources.parent / "dist", "build_sdist"]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shutil.unpack_archive(
        sources.parent / "dist" / done.stdout.splitlines()[-1], sources.parent / "unpacked", filter="data"
    )
    (unpacked,) = (sources.parent / "unpacked").iterdir()
    assert {"README.md", "setup.py", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}
